"""Every private name of torch that lowtide uses, one file an area; ``tests/test_torch_private`` holds each to its word.

Nothing is imported here: who needs an area imports it, so that a name that a new torch has renamed costs the features
of one area, with an error that names torch's version and the feature (see ``needed.py``).
"""
