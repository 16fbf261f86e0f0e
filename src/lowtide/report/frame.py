"""What every page has around its text and pictures: one HTML file that asks no other host for anything."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from html import escape
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec

from lowtide.errors import ReportError
from lowtide.report.axes import Figure

__all__ = ["chart", "framed", "require_plotly", "section", "two", "unbroken"]


def framed(title: str, body: str, figures: Mapping[str, Figure | list[Figure]]) -> str:
    """The page as HTML text: a body whose charts name ``figures``, which plotly draws when it is opened."""
    home = files("lowtide.report")
    data = _packed(json.dumps(figures, separators=(",", ":")))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{(home / 'page.css').read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n{body}<footer>Made by lowtide. This file needs no network.</footer>\n"
        f'<script type="text/plain" id="figures">{data}</script>\n'
        f'<script type="text/plain" id="plotly">{_packed(_plotly())}</script>\n'
        f"<script>\n{(home / 'page.js').read_text(encoding='utf-8')}</script>\n"
        "</body>\n</html>\n"
    )


def _packed(text: str) -> str:
    """Compressed, in characters that HTML has no meaning for; page.js has the reverse. Plotly is 5 MB as it is."""
    return base64.b85encode(zlib.compress(text.encode(), 9)).translate(_HARMLESS).decode()


_HARMLESS = bytes.maketrans(b"<>&`", b"[],.")
"""The characters of base 85 that HTML has a meaning for, and others in their place."""


def require_plotly() -> None:
    """Raise ReportError if no page can be drawn here: to be asked before what takes minutes."""
    if find_spec("plotly") is None:
        raise ReportError("a page is drawn by plotly, which is not installed: pip install 'lowtide[report]'")


def _plotly() -> str:
    require_plotly()
    text: str = import_module("plotly.offline").get_plotlyjs()
    return text


def section(name: str, title: str, lead: str, body: str) -> str:
    """A part of the page with its heading."""
    return f'<section id="{name}"><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p>{body}</section>\n'


def chart(name: str, label: str) -> str:
    """Where a figure is drawn."""
    return f'<div class="chart" data-figure="{name}" role="img" aria-label="{escape(label)}"></div>'


def two(left: str, right: str) -> str:
    """Two parts side by side, or one above the other on a narrow screen."""
    return f'<div class="two"><div>{left}</div><div>{right}</div></div>'


def unbroken(text: str) -> str:
    """No line ends between a number and its unit."""
    return re.sub(r"(?<=\d) (?=[A-Za-zµ])", "\N{NO-BREAK SPACE}", text)
