"""Sphinx configuration."""

from lowtide import __version__

project = "lowtide"
author = "The lowtide authors"
copyright = "The lowtide authors"  # noqa: A001
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon"]
intersphinx_mapping: dict[str, tuple[str, None]] = {}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "lowtide"
html_static_path = ["_static"]
html_css_files = ["lowtide.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False
