"""Experts in one grouped product against a loop over them, and fused rotary positions and SwiGLU against eager.

    python benchmarks/moe.py --json

Forward and backward, on one thread of the CPU. Experts: one projection of each token by its expert's weights, with 16
and 64 experts, in bfloat16 and single precision; tokens are split among them at random, so that some have many and
some none. The loop is a product for each expert over unbound weights, as one would write it; ``grouped`` is torch's
grouped product, and ``chosen`` what a model takes on this device in this type: see ``grouped_is_faster``. A ratio is
the time over that of the loop (of eager, for fused kernels); below 1 is faster. Times are the processor's, which others
on the machine do not lengthen as they do the clock's, and each is the least over rounds in which all take turns.

``worst_grouped_ratio`` is the largest of bfloat16, ``worst_chosen_ratio`` the largest of all, ``rope_ratio`` and
``swiglu_ratio`` the larger of both types.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from lowtide.models.grouped import GroupedLinear, grouped_product, loop_product
from lowtide.models.kernels import choose, eager_rope, eager_swiglu
from stamp import stamped

ROUNDS, QUICK_ROUNDS = 40, 8
EXPERTS = (16, 64)
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROWS, INPUTS, OUTPUTS = 1024, 256, 512
TOLERANCE = {"bf16": 5e-2, "fp32": 1e-4}


class Result(NamedTuple):
    """One thing measured against another."""

    what: str
    type: str
    name: str
    milliseconds: float
    ratio: float
    """Its time over that of what it is measured against."""


Step = Callable[[], list[Tensor]]


def step(function: Callable[..., Any], leaves: list[Tensor], *constants: Any) -> Step:
    """Forward and backward: gives the outputs and the gradients of ``leaves``."""
    own = [one.clone().requires_grad_() for one in leaves]

    def run() -> list[Tensor]:
        outputs = function(*own, *constants)
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        return [*outputs, *torch.autograd.grad(outputs, own, [torch.ones_like(one) for one in outputs])]

    return run


def measure(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """The least seconds of each, in rounds in which all take turns."""
    least = dict.fromkeys(steps, float("inf"))
    names = list(steps)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.process_time()
            steps[name]()
            if turn:  # the first warms up
                least[name] = min(least[name], time.process_time() - begin)
    return least


def check(steps: dict[str, Step], kind: str) -> None:
    """All of them compute the same."""
    expected, *others = (one() for one in steps.values())
    for found in others:
        for one, other in zip(found, expected, strict=True):
            largest = other.float().abs().max()
            difference = (one.float() - other.float()).abs().max() / largest
            assert difference < TOLERANCE[kind], f"a relative difference of {difference:.2g}"


def by_hand(tokens: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The loop as one would write it."""
    parts = zip(tokens.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([functional.linear(part, one) for part, one in parts])


def experts(kind: str, count: int, rounds: int) -> list[Result]:
    torch.manual_seed(0)
    dtype = TYPES[kind]
    popularity = torch.randn(count).exp()
    counts = torch.bincount(torch.multinomial(popularity, ROWS, replacement=True), minlength=count)
    tokens, weight = torch.randn(ROWS, INPUTS, dtype=dtype), torch.randn(count, OUTPUTS, INPUTS, dtype=dtype) / 16
    layer = GroupedLinear(count, INPUTS, OUTPUTS, grouped=None)

    def chosen(tokens: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        layer.weight = weight  # type: ignore[assignment]  # as a model has it
        return layer(tokens, counts)

    del layer._parameters["weight"]
    forms = {"loop by hand": by_hand, "grouped": grouped_product, "loop": loop_product, "chosen": chosen}
    steps = {name: step(form, [tokens, weight], counts) for name, form in forms.items()}
    check(steps, kind)
    seconds = measure(steps, rounds)
    return [
        Result(f"{count} experts", kind, name, 1e3 * seconds[name], seconds[name] / seconds["loop by hand"])
        for name in forms
    ]


def fused(kind: str, rounds: int) -> list[Result]:
    torch.manual_seed(0)
    dtype, cpu = TYPES[kind], torch.device("cpu")
    heads = [torch.randn(4, 512, 16, 64, dtype=dtype), torch.randn(4, 512, 4, 64, dtype=dtype)]
    table = torch.randn(512, 1, 64), torch.randn(512, 1, 64)
    gates = [torch.randn(4, 512, 1408, dtype=dtype) for _ in range(2)]
    results = []
    for name, eager, leaves, constants in (
        ("rope", eager_rope, heads, table),
        ("swiglu", eager_swiglu, gates, ()),
    ):
        kernel = choose(name, True, cpu)  # type: ignore[arg-type]
        steps = {
            "eager": step(eager, leaves, *constants),
            kernel.implementation: step(kernel.function, leaves, *constants),
        }
        check(steps, kind)
        seconds = measure(steps, rounds)
        results += [Result(name, kind, one, 1e3 * seconds[one], seconds[one] / seconds["eager"]) for one in steps]
    return results


def table_of(results: list[Result]) -> Table:
    table = Table("what", "type", "how", "ms", "ratio")
    for one in results:
        table.add_row(one.what, one.type, one.name, f"{one.milliseconds:.2f}", f"{one.ratio:.3f}")
    return table


def worst(results: list[Result], what: str, name: str, kinds: tuple[str, ...] = ("bf16", "fp32")) -> float:
    found = [one.ratio for one in results if what in one.what and one.name == name and one.type in kinds]
    return round(max(found), 3) if found else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)  # a kernel that does not compile says so
    torch.set_num_threads(1)  # two threads on a busy machine wait for each other
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    console, begin = Console(stderr=True, width=120), time.perf_counter()
    results = [one for kind in TYPES for count in EXPERTS for one in experts(kind, count, rounds)]
    results += [one for kind in TYPES for one in fused(kind, rounds)]
    console.print(table_of(results))
    figures: dict[str, float | str] = {
        "worst_grouped_ratio": worst(results, "experts", "grouped", ("bf16",)),
        "worst_grouped_ratio_fp32": worst(results, "experts", "grouped", ("fp32",)),
        "worst_chosen_ratio": worst(results, "experts", "chosen"),
        "rope_ratio": worst(results, "rope", "compiled"),
        "swiglu_ratio": worst(results, "swiglu", "compiled"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - begin),
    }
    limits = {"worst_grouped_ratio": 1.0, "worst_chosen_ratio": 1.021, "rope_ratio": 1.0, "swiglu_ratio": 1.0}
    missed = [
        f"{name} is {figures[name]}, expected below {limit}" for name, limit in limits.items() if figures[name] >= limit
    ]
    for line in missed:
        console.print(line, style="red", highlight=False)
    if arguments.json:
        print(json.dumps(stamped(figures)))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
