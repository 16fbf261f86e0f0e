"""What a model does and holds in one step: how it is captured, and the Trace file."""
