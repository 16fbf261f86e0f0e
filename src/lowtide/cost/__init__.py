"""Seconds: what a device can do, and how long a kernel takes on it."""
