"""Where the shell's ``lowtide`` enters: nothing heavy is imported before the process is set up."""

from __future__ import annotations

import gc
import os
import sys

__all__ = ["run"]


def run() -> None:
    """Run the command line."""
    # A check ends before there is garbage to speak of, and the collector's passes over freshly imported modules are
    # a tenth of its time. A command that runs long turns it on again.
    gc.disable()
    # Looking through every installed distribution for pydantic plugins takes longer than reading a file. A script that
    # is run may need its own.
    if sys.argv[1:2] != ["run"]:
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    from lowtide.cli.main import app

    app()
