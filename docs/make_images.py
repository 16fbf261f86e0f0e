"""Draw the terminal pictures of the README and the docs: ``python docs/make_images.py``."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lowtide.config.check import check_file, check_text
from lowtide.operators.names import layer_operators
from lowtide.report.terminal import print_check, print_problems

HERE = Path(__file__).parent
IMAGES = HERE / "images"
EXAMPLES = HERE.parent / "examples" / "yaml"
BROKEN = (EXAMPLES / "llama_48_layers.yaml").read_text(encoding="utf-8")
BROKEN = BROKEN.replace("pipeline_stage: 5", "pipeline_stage: 4").replace("select_comm_rec", "select_com_rec")
BROKEN = BROKEN.replace(r"feed_forward\.w1\.activation", r"feed_forward\.w1\.(activation")


def console(width: int) -> Console:
    return Console(
        record=True, width=width, file=(IMAGES / "last.log").open("w"), force_terminal=True, highlight=False,
        markup=False, emoji=False,
    )  # fmt: skip


def save(terminal: Console, name: str, title: str) -> None:
    svg = terminal.export_svg(title=title)
    # Plain monospace: a picture in a README must not ask another host for a font.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
    (IMAGES / f"{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def main() -> None:
    terminal = console(124)
    check = check_file(EXAMPLES / "llama_48_layers.yaml", layer_operators)
    check.document.name = "examples/yaml/llama_48_layers.yaml"
    whole = check.log
    settings = [line for line in whole if line[1].startswith("Formative layer")]
    terminal.print(Text("$ lowtide check examples/yaml/llama_48_layers.yaml", style="bold"))
    for level, text in settings:
        terminal.print(Text(f"{level} - {text}"))
    more = f"… {len(whole) - len(settings)} more lines: how each setting was read, what each layer does"
    terminal.print(Text(more, style="dim"))
    check.log = []
    print_check(check, terminal)
    print_problems(check, terminal)
    save(terminal, "check", "lowtide check")

    terminal = console(124)
    terminal.print(Text("$ lowtide check train.yaml", style="bold"))
    print_problems(check_text(BROKEN, layer_operators, name="train.yaml"), terminal)
    save(terminal, "error", "lowtide check")
    (IMAGES / "last.log").unlink()


if __name__ == "__main__":
    main()
