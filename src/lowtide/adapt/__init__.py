"""Measure, decide and switch while training, and come through when memory runs out."""
