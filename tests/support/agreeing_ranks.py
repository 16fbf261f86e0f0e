"""What ranks agree on, as programs for real processes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from lowtide.adaptive.agreement import Agreement
from lowtide.adaptive.ranks import Ranks
from lowtide.planner.pipeline import even_pipeline
from lowtide.trace.trace import Part, Static, Trace
from support.traced_cases import PARAMETER, hand_made_trace

__all__ = ["agreed_trace", "group_count", "merged_numbers", "unlike_trace"]


def merged_numbers(members: list[int]) -> tuple[list[int], int]:
    """Each member's rank in one list, in order, and how many lists this rank merged."""
    agreement = Agreement(timedelta(seconds=60), members)
    if dist.get_rank() not in members:
        return [], 0
    merges = 0

    def merge(first: list[int], second: list[int]) -> list[int]:
        nonlocal merges
        merges += 1
        return first + second

    found = agreement.merged([dist.get_rank()], merge), merges
    agreement.close()
    return found


def unlike_trace(rank: int) -> Trace:
    """A Trace of a layer with experts: no rank has the sizes of another, and the second ran other kernels."""

    def changed(part: Part) -> Part:
        sizes = tuple(value._replace(size=value.size + 512 * (rank * 7 % 5)) for value in part.values)
        kernels = tuple(
            kernel._replace(seconds=1e-3 * (1 + (place + rank) % 4), flops=kernel.flops + rank)
            for place, kernel in enumerate(part.kernels)
        )
        static = Static(parameters=(PARAMETER,) * (1 + rank % 3))
        backward = part.backward[:-2] if rank == 1 else part.backward
        return replace(part, values=sizes, kernels=kernels, static=static, backward=backward)

    trace = hand_made_trace(2).changed(changed)
    return replace(trace, batch={"samples": 1, "tokens": 100 + rank}, notes=("assumed by all", f"assumed by {rank}"))


def agreed_trace() -> str:
    """The Trace that all ranks agree on, when each has another, by its digest."""
    ranks = Ranks()
    found = ranks.trace([unlike_trace(dist.get_rank())], even_pipeline(2, 1, 1))
    ranks.close()
    return found.digest


def group_count() -> int:
    """Process groups that an adaptive run without pipeline stages makes."""
    before = dist.get_pg_count()
    ranks = Ranks()
    made = dist.get_pg_count() - before
    ranks.close()
    return made
