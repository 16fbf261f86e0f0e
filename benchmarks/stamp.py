"""Where figures come from: commit, date, machine and versions, put into each benchmark's JSON by itself."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["stamped"]


def stamped(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures, and below ``stamp`` where they come from.

    ``virtual_accelerator`` says whether the virtual accelerator was used: then times that are its clock's are
    simulated.
    """
    torch = sys.modules.get("torch")
    return {
        **figures,
        "stamp": {
            "commit": _commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "torch": str(torch.__version__) if torch else "not imported",
            "python": platform.python_version(),
            "machine": f"{_processor()}, {os.cpu_count()} cores",
            "virtual_accelerator": "tide" in sys.modules,
        },
    }


def _commit() -> str:
    """The commit of the tree that this file is in, with a mark if the tree has changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", ".", ":!results")
        return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()
