"""The consoles that commands print to."""

from __future__ import annotations

import os

from rich.console import Console

__all__ = ["make_console"]

PIPED_WIDTH = 160
"""Columns where there is no terminal to ask: rich would take 80, and cut tables off."""


def make_console(*, stderr: bool = False, no_color: bool = False) -> Console:
    """A console that prints text as it is; as wide as the terminal, or as wide as tables need in a pipe or a file."""
    console = Console(stderr=stderr, no_color=no_color, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console
