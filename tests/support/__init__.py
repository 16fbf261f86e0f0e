"""What tests and benchmarks share: one module for each subject, found by its name."""
