"""Training programs that try to break lowtide; see harness."""
