"""Draw the pictures of docs/plan.md: ``python docs/make_plan_images.py``. Needs Chromium, and the extra ``report``.

The plan is made again, so that the pictures show what this version does: about eight minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from make_images import IMAGES, console, save
from rich.text import Text

from lowtide.cli.traced import LayoutOptions, trace_of
from lowtide.planner.make import make_plan
from lowtide.planner.plan import Plan
from lowtide.report.page import write_page
from lowtide.report.plan import print_explanation

COMMAND = "llama3-70b --tp 8 --pp 4 --micro-batches 16 --seq 8192"
GAP = 16
LAYOUT = LayoutOptions(tensor=8, pipeline=4, micro_batches=16, sequence=8192)


def screenshot(page: Path, name: str, views: list[tuple[int, int]], height: int) -> None:
    """Take a picture of a page, side by side as it looks in windows of some widths, scrolled down so far."""
    browser = next((found for one in ("chromium", "google-chrome") if (found := shutil.which(one))), None)
    if browser is None:
        sys.exit("no Chromium was found; install it, or draw the page by hand")
    frames = "".join(
        f"<div style='width:{width}px;height:{height}px;overflow:hidden'>"
        f"<iframe src='{page.name}' style='border:0;width:{width}px;height:5000px;margin-top:-{scrolled}px'>"
        "</iframe></div>"
        for width, scrolled in views
    )
    around = page.with_name(f"{name}.html")
    around.write_text(f"<body style='margin:0;display:flex;gap:{GAP}px;background:#b8bcc0'>{frames}")
    width = sum(width for width, _ in views) + GAP * (len(views) - 1)
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={profile}", "--virtual-time-budget=8000", f"--window-size={width},{height}",
                f"--screenshot={IMAGES / name}.png", around.as_uri(),
            ],
            check=True, capture_output=True,
        )  # fmt: skip


def draw_explanation(plan: Plan, budget: str) -> None:
    terminal = console(110)
    terminal.print(Text(f"$ lowtide explain {COMMAND} --budget {budget}", style="bold"))
    print_explanation(plan, terminal)
    save(terminal, "explain", "lowtide explain")
    (IMAGES / "last.log").unlink()


def draw_search(page: Path) -> None:
    """The page of a search for a layout, which takes three minutes."""
    command = ["plan", "llama3-8b", "--devices", "8", "--global-batch", "64", "--seq", "4096", "--html", str(page)]
    subprocess.run([sys.executable, "-m", "lowtide", *command], check=True, capture_output=True)
    screenshot(page, "search", [(1180, 430), (420, 640)], 640)


def draw_sweep(page: Path) -> None:
    """The page of a sweep over budgets."""
    command = ["plan", "llama3-8b", "--dp", "8", "--seq", "8192", "--micro-batch-size", "2"]
    command += ["--sweep", "budget=44GiB..76GiB", "--html", str(page)]
    subprocess.run([sys.executable, "-m", "lowtide", *command], check=True, capture_output=True)
    screenshot(page, "sweep", [(1180, 0), (420, 0)], 1260)


def main() -> None:
    traced = trace_of("llama3-70b", LAYOUT)
    draw_explanation(make_plan(traced.trace, "40GiB", "h100", traced.pipeline), "40GiB")
    plan = make_plan(traced.trace, "72GiB", "h100", traced.pipeline)
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "page.html"
        write_page(page, plan)
        screenshot(page, "report", [(1180, 0), (420, 0)], 1120)
        screenshot(page, "report-layers", [(1180, 1330)], 1130)
        draw_search(Path(directory) / "layouts.html")
        draw_sweep(Path(directory) / "sweep.html")


if __name__ == "__main__":
    main()
