"""``python -m lowtide``."""

from lowtide.cli.main import app

app()
