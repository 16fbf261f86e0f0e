"""Reference models whose operators have the names of the MindSpore Transformers guide."""
