"""Carries a Policy out on a live model."""
