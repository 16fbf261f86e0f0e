"""The memory and the work of a rank of ``lowtide train``: the head's logits, routed experts, and loading a model.

    python benchmarks/runner_memory.py --json

Each run is the runner's own, on two or four processes with the virtual accelerator. A step's peak is that of the
device's allocator, with the logits of the whole vocabulary on each rank, of a rank's share of it, and in chunks of
tokens (``head_loss``). The work of experts is counted product by product, forward and backward, on all ranks, against
that of one process that trains the same samples: 1 if no rank repeats the work of another. ``load_peak_over_shard`` is
what building and loading a model of transformers under FSDP2 needs at its peak, over the shard that a rank keeps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tide
from load_memory import RANKS, load_peaks
from lowtide.units import format_bytes
from stamp import stamped
from support.expert_work import GroupedWork
from support.layout_cases import MODELS, SHARD, TENSOR, data
from support.ranks import Ranks
from train import runs

LENGTH, VOCABULARY = 512, 1 << 15
SAMPLES, QUICK_SAMPLES = 12, 4
"""Of a step: the first makes more logits than a chunk has, the second few enough to be quick."""
BOUND = 1.05
"""What the experts of all ranks may compute, against one process."""
LOADING = 1.3
"""What loading may need at its peak, against the shard."""


class Measured(NamedTuple):
    """What one measurement found."""

    rows: list[tuple[str, str, str]]
    """Lines of the table: what was run, what was measured, against what."""
    figures: dict[str, Any]
    """What goes into the JSON."""
    right: bool
    """Whether it is within its bounds."""


class Machine:
    """Processes, started when they are needed and kept."""

    def __init__(self) -> None:
        self.groups: dict[int, Ranks] = {}

    def run(self, processes: int, program: Callable[..., Any], *args: Any) -> list[Any]:
        """What each process gives."""
        return self.groups.setdefault(processes, Ranks(processes)).run(program, *args)

    def stop(self) -> None:
        """End them."""
        for ranks in self.groups.values():
            ranks.stop()


def step(settings: dict[str, Any]) -> tuple[int, float]:
    """On a rank: the peak of a warm step, and the loss of the one before."""
    tide.configure(races=False, poison=False)
    first, second = runs.records_of(MODELS["llama"], settings, 2, "tide:0")
    assert second.peak_bytes is not None
    return second.peak_bytes, first.loss


def head_peaks(machine: Machine, *, quick: bool) -> Measured:
    """A step's peak for each setting of the head's loss, on two tensor-parallel ranks and on one process."""
    samples = QUICK_SAMPLES if quick else SAMPLES
    model = {
        "model.model_config.vocab_size": VOCABULARY,
        "model.model_config.seq_length": LENGTH,
        "model.model_config.num_layers": 2,
        "runner_config.batch_size": samples,
        "runner_config.gradient_accumulation_steps": 1,
    }
    rows, peaks, losses = [], {}, {}
    for processes, ways in ((2, ("whole", "sharded", "chunked")), (1, ("whole", "chunked"))):
        for way in ways:
            layout = {**data(1, 1), **(TENSOR if processes == 2 else {}), **model}
            found = machine.run(processes, step, {**layout, "model.model_config.head_loss": way})
            name = f"tp2 {way}" if processes == 2 else f"one process {way}"
            peaks[name], losses[name] = max(peak for peak, _ in found), found[0][1]
            against = peaks[name] / peaks["tp2 whole" if processes == 2 else "one process whole"]
            rows.append((f"head, {name}", format_bytes(peaks[name]), f"{against:.2f} x whole"))
    alone = losses["one process whole"]
    figures = {
        "tokens": samples * LENGTH,
        "vocabulary": VOCABULARY,
        "peak_bytes": peaks,
        "sharded_peak_over_whole": peaks["tp2 sharded"] / peaks["tp2 whole"],
        "chunked_peak_over_whole": peaks["tp2 chunked"] / peaks["tp2 whole"],
        "chunked_peak_over_whole_one_process": peaks["one process chunked"] / peaks["one process whole"],
        "head_worst_relative_loss": max(abs(loss - alone) / alone for loss in losses.values()),
    }
    smaller = peaks["tp2 sharded"] < peaks["tp2 whole"] and peaks["tp2 chunked"] < peaks["tp2 whole"]
    return Measured(rows, figures, smaller and figures["head_worst_relative_loss"] <= 1e-5)


def work(settings: dict[str, Any]) -> int:
    """On a rank: the FLOPs of routed experts in a step."""
    tide.configure(races=False, poison=False)
    with GroupedWork() as counted:
        runs.train("deepseek", settings, steps=1, device="tide:0")
    return counted.flops


def expert_work(machine: Machine, *, quick: bool) -> Measured:
    """The FLOPs of routed experts on all ranks against those of one process."""
    both = {**data(2, 2), **SHARD, **TENSOR, "parallel_config.expert_parallel": 2}
    cases = {
        "tp2": (2, {**data(1, 4), **TENSOR}),
        "tp2 + sequence": (2, {**data(1, 4), **TENSOR, "parallel_config.use_seq_parallel": True}),
        **({} if quick else {"ep2 x tp2": (4, both)}),
    }
    (whole,) = machine.run(1, work, data(1, 4))
    ratios = {name: sum(machine.run(count, work, settings)) / whole for name, (count, settings) in cases.items()}
    rows = [
        (f"experts, {name}", f"{whole * ratio / 1e6:.1f} MFLOP", f"{ratio:.3f} x one") for name, ratio in ratios.items()
    ]
    worst = max(ratios.values())
    figures = {"expert_flops_ratio": worst, "expert_flops_ratios": ratios}
    return Measured(rows, figures, 0 < worst <= BOUND)


def loading(machine: Machine, *, quick: bool) -> Measured:
    """The peak while a model of transformers is built and loaded; it is as quick as it can be."""
    found = load_peaks(partial(machine.run, RANKS))
    ratio = found["load_peak_over_shard"]
    rows = [("transformers model, fsdp2", f"{ratio:.3f} of the shard at the peak of loading", f"at most {LOADING}")]
    return Measured(rows, found, found["weights_equal"] and ratio <= LOADING)


MEASUREMENTS = (head_peaks, expert_work, loading)
"""What is measured, one after the other; each adds its lines and figures."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, and no layout of four processes")
    arguments = parser.parse_args()
    console = Console(stderr=True, width=120)
    table = Table("what", "measured", "against")
    figures: dict[str, Any] = {"quick": arguments.quick}
    right = True
    machine = Machine()
    try:
        for measure in MEASUREMENTS:
            console.print(measure.__name__, style="dim")
            found = measure(machine, quick=arguments.quick)
            for row in found.rows:
                table.add_row(*row)
            figures |= found.figures
            right &= found.right
    finally:
        machine.stop()
    console.print(table)
    if arguments.json:
        print(json.dumps(stamped(figures)))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
