"""Private names of torch that only ``lowtide.train`` uses."""
