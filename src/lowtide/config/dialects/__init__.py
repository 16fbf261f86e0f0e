"""The two forms of the file: ``graph`` (recompute_config, swap_config) and ``form_2026``."""
