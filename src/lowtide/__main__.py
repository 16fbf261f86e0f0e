"""``python -m lowtide``."""

from lowtide.cli.entry import run

run()
