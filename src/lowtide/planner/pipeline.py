"""How layers and micro-batches are spread over pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lowtide.errors import PlanError

__all__ = ["Pipeline", "ScheduleName", "even_pipeline"]

ScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe_v"]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages of a pipeline. One stage and one micro-batch is no pipeline."""

    placement: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """For each stage, for each of its chunks (virtual stages), the layers in it. Chunks run in the order chunk 0 of
    all stages, chunk 1 of all stages and so on; with ``zero_bubble_v`` and ``dualpipe_v`` chunk 1 runs backwards
    through the stages."""
    micro_batches: int = 1
    """Micro-batches of a step, for each data-parallel rank."""
    schedule: ScheduleName = "1f1b"

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def chunks(self) -> int:
        return len(self.placement[0]) if self.placement else 1

    def __post_init__(self) -> None:
        if any(len(stage) != self.chunks for stage in self.placement):
            raise PlanError("every pipeline stage has the same number of chunks")
        if self.micro_batches < 1:
            raise PlanError(f"a step has at least one micro-batch; found {self.micro_batches}")

    def as_json(self) -> dict[str, Any]:
        """The stages as plain JSON values."""
        placement = [[list(chunk) for chunk in stage] for stage in self.placement]
        return {"placement": placement, "micro_batches": self.micro_batches, "schedule": self.schedule}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Pipeline:
        """The reverse of :meth:`as_json`."""
        placement = tuple(tuple(map(tuple, stage)) for stage in value["placement"])
        return Pipeline(placement=placement, micro_batches=value["micro_batches"], schedule=value["schedule"])


def even_pipeline(
    layers: int, stages: int = 1, chunks: int = 1, micro_batches: int = 1, schedule: ScheduleName | None = None
) -> Pipeline:
    """Layers spread evenly; the first chunks get one more where the number does not divide.

    >>> even_pipeline(6, stages=2, chunks=2, micro_batches=4).placement
    (((0, 1), (4,)), ((2, 3), (5,)))
    """
    if layers < stages * chunks:
        raise PlanError(
            f"{layers} layers cannot be spread over {stages} stages of {chunks} chunks: some would be empty"
        )
    schedule = schedule or ("interleaved" if chunks > 1 else "1f1b")
    backwards = schedule in ("zero_bubble_v", "dualpipe_v")
    base, more = divmod(layers, stages * chunks)
    placement: list[list[tuple[int, ...]]] = [[] for _ in range(stages)]
    first = 0
    for chunk in range(chunks):
        for place in range(stages):
            stage = stages - 1 - place if backwards and chunk % 2 else place
            count = base + (chunk * stages + place < more)
            placement[stage].append(tuple(range(first, first + count)))
            first += count
    return Pipeline(placement=tuple(map(tuple, placement)), micro_batches=micro_batches, schedule=schedule)
