"""Search for layouts of large models on clusters, from this machine: how long it takes, and where published ones rank.

    python benchmarks/layouts_search.py --json

llama3-70b on 64 H100 (steps of 512 samples of 8,192 tokens) and deepseek-v3 on 2,048 (steps of 15,360 of 4,096). Every
layout that the runner has is considered. Published layouts are planned first, whatever is known of them, and ranked
among all that were planned. For llama3-70b those are torchtitan's (docs/performance.md and the benchmark of async
tensor parallel in its repository): FSDP alone over 64 A100 with one sample a rank, and FSDP over nodes with tensor
parallel 8 inside and 16 samples, there on 256 H100; both recompute whole layers. For deepseek-v3 it is 16 stages with
experts over 64 ranks (arXiv 2412.19437), whose schedule, DualPipe, and whose kernels of 8 bits the runner does not
have.

This takes up to ten minutes for each model: ``--quick`` searches llama3-8b on 8 devices for half a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console

from lowtide.cli.searched import layouts_of
from lowtide.cost.devices import find_device
from lowtide.models.known import find_shape
from lowtide.report.layouts import print_layouts
from lowtide.train.candidates import Candidate
from lowtide.train.run import Degrees, Precision
from lowtide.train.search import Asked, search
from stamp import stamped


class Case(NamedTuple):
    """A model on some devices, and layouts that were published for it."""

    model: str
    devices: int
    global_batch: int
    sequence: int
    seconds: float
    published: tuple[Candidate, ...]


CASES = (
    Case(
        "llama3-70b",
        64,
        512,
        8192,
        500,
        (
            Candidate(degrees=Degrees(shard=64), samples=1, micro_batches=8),
            Candidate(degrees=Degrees(shard=8, tensor=8, sequence_parallel=True), samples=16, micro_batches=4),
        ),
    ),
    Case(
        "deepseek-v3",
        2048,
        15360,
        4096,
        500,
        (Candidate(degrees=Degrees(shard=128, pipeline=16, expert=64), samples=1, micro_batches=120),),
    ),
)
QUICK = (Case("llama3-8b", 8, 64, 4096, 25, ()),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a small model, in less than a minute")
    parser.add_argument("--only", metavar="MODEL", help="one of the models")
    options = parser.parse_args()
    console = Console(stderr=True, width=120)
    result: dict[str, Any] = {}
    for case in QUICK if options.quick else CASES:
        if options.only in (None, case.model):
            result[case.model] = run(case, console)
    if options.json:
        print(json.dumps(stamped(result)))


def run(case: Case, console: Console) -> dict[str, Any]:
    """Search, and say what was found."""
    device, shape = find_device("h100"), find_shape(case.model)
    asked = Asked(
        name=case.model,
        shape=replace(shape, max_position_embeddings=max(case.sequence, shape.max_position_embeddings)),
        device=device,
        devices=case.devices,
        global_batch=case.global_batch,
        sequence=case.sequence,
        precision=Precision(parameters="float32", compute="bfloat16"),
    )
    searched = search(asked, seconds=case.seconds, always=case.published)
    found = layouts_of(searched)
    assert found is not None
    console.print(f"{case.model} on {case.devices} x {device.name}")
    print_layouts(found, console)
    names = [str(one.candidate) for one in searched.found]
    why = {str(one.candidate): f"{one.why} ({one.detail})" for one in searched.left_out}
    published = {
        str(one): names.index(str(one)) + 1 if str(one) in names else why.get(str(one), "not considered")
        for one in case.published
    }
    console.print(f"published: {published}")
    best = searched.found[0] if searched.found else None
    return {
        "seconds": round(searched.seconds, 1),
        "considered": found.looked_at,
        "simulated": found.traced,
        "left_out": dict(found.reasons),
        "proved": searched.proved,
        "best": str(best.candidate) if best else None,
        "best_step_s": round(best.seconds, 4) if best else None,
        "best_mfu": round(best.plan.mfu or 0.0, 4) if best else None,
        "published_rank": published,
        "fit": len(searched.found),
    }


if __name__ == "__main__":
    sys.exit(main())
