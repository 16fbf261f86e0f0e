"""Draw the chart of the front page from ``benchmarks/results/at_a_budget.json``: ``python docs/make_chart.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "at_a_budget.json"
IMAGE = ROOT / "docs" / "images" / "at-a-budget.svg"
WIDTH, HEIGHT = 760, 410
LEFT, RIGHT, TOP, BOTTOM = 70, 730, 48, 330
TEAL, GREY, INK, FAINT = "#0f766e", "#64748b", "#0f172a", "#e2e8f0"
STYLE = f"""<style>
text {{ font: 17px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: {INK}; }}
.small {{ font-size: 14px; fill: {GREY}; }} .ours {{ fill: {TEAL}; font-weight: 600; }}
</style>"""


def drawn(points: list[dict[str, Any]]) -> str:
    """The chart as SVG: peak memory to the right, step time upwards."""
    top = 1.32
    """Points above it are drawn at the upper edge, with their figure."""

    def x(peak: float) -> float:
        return LEFT + (RIGHT - LEFT) * peak / 1.06

    def y(time: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (min(time, top) - 0.98) / (top - 0.98)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Step time against peak memory</title>",
        STYLE,
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18">step time, over keeping everything</text>',
    ]
    for tick in (1.0, 1.1, 1.2, 1.3):
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{FAINT}"/>')
        parts.append(f'<text class="small" x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}x</text>')
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(
            f'<text class="small" x="{x(share):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{share:.0%}</text>'
        )
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{BOTTOM + 46}" text-anchor="middle">peak memory of the activations</text>')
    parts.append(
        f'<text class="small" x="{middle}" y="{BOTTOM + 68}" text-anchor="middle">'
        "simulated on the virtual accelerator; lower and further left is better</text>"
    )
    ours = sorted((one for one in points if one["name"].startswith("lowtide")), key=lambda one: one["peak"])
    line = " ".join(f"{x(one['peak']):.1f},{y(one['time']):.1f}" for one in ours)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{TEAL}" stroke-width="2.5"/>')
    for one in points:
        mine, above = one in ours, one["time"] > top
        across, down = x(one["peak"]), y(one["time"])
        colour = TEAL if mine else GREY
        if above:  # an arrow out of the chart
            parts.append(f'<path d="M {across - 7:.1f} {down + 8:.1f} l 7 -12 l 7 12 z" fill="{colour}"/>')
        else:
            parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="8" fill="{colour}"/>')
        name = f"{one['name']}, {one['time']:.1f}x" if above else one["name"]
        right = across > RIGHT - 90
        if mine:
            at_margin = across < LEFT + 130
            place, height, anchor = (across - 6, down + 48, "start") if at_margin else (across - 12, down + 22, "end")
            parts.append(f'<text class="ours" x="{place:.1f}" y="{height:.1f}" text-anchor="{anchor}">{name}</text>')
        else:
            place, anchor = (across - 14, "end") if right else (across + 14, "start")
            height = down + 5
            if one["name"] == "save_on_cpu":  # the other arrow is next to it
                place, height = across - 7, down + 28
            parts.append(f'<text x="{place:.1f}" y="{height:.1f}" text-anchor="{anchor}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    IMAGE.write_text(drawn(json.loads(RESULT.read_text(encoding="utf-8"))["points"]), encoding="utf-8")
