"""The reference runner: one YAML file, trained on torch.distributed. Nothing in the library depends on it."""
