"""Put each command's ``--help`` into ``docs/commands.md``: ``python docs/make_commands.py``.

A test fails if one of them is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent / "commands.md"
BLOCK = re.compile(r"(<!-- help: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def help_of(command: str) -> str:
    """What ``lowtide COMMAND --help`` prints on a terminal of 88 columns, without colours."""
    from typer.testing import CliRunner

    from lowtide.cli.main import app

    environment = {"COLUMNS": "88", "TERMINAL_WIDTH": "88", "NO_COLOR": "1", "TERM": "dumb"}
    text = CliRunner().invoke(app, [command, "--help"], env=environment, prog_name="lowtide").output
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def rendered() -> str:
    """The page with the help of each command as it is now."""
    page = PAGE.read_text(encoding="utf-8")
    return BLOCK.sub(lambda found: f"{found[1]}```text\n{help_of(found[2])}\n```\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
