"""Which pipeline stage and which chunk of it each layer is in.

``n`` layers are dealt to ``T = pp * v`` mini-stages: ``pp`` stages, each with ``v`` chunks
("virtual stages"). Every mini-stage gets ``n // T`` layers plus its entry of ``offset``; what
``n % T`` leaves over is never spread by itself.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from lowtide.config.document import Path
from lowtide.config.problem import Problems

__all__ = ["Placement", "Table", "even", "place"]

Table: TypeAlias = list[list[int]]
"""A number for each mini-stage: ``v`` rows (chunks) of ``pp`` entries (stages)."""


class Placement(NamedTuple):
    """The stage and chunk of each layer."""

    layer_list: Table
    """How many layers each mini-stage holds, in the order the layers run through them."""
    columns: tuple[int, ...]
    """The column of ``layer_list`` of each layer."""
    chunks: tuple[int, ...]
    """The row of ``layer_list`` of each layer: the chunk of its stage."""
    positions: tuple[int, ...]
    """The place of each layer within its mini-stage, from zero."""
    start_stage: int = 0
    """Added to every stage's number."""
    folded: bool = False
    """Whether odd chunks run backwards over the stages (the schedule ``zero_bubble_v``)."""

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.columns)

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages."""
        return len(self.layer_list[0])

    @property
    def num_chunks(self) -> int:
        """The number of chunks of each stage."""
        return len(self.layer_list)

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stage of each layer."""
        last = self.num_stages - 1
        return tuple(
            self.start_stage + (last - column if self.folded and chunk % 2 else column)
            for column, chunk in zip(self.columns, self.chunks, strict=True)
        )

    @property
    def accumulated(self) -> Table:
        """For each mini-stage, how many layers are in it and in those before it."""
        total = list(accumulate(count for row in self.layer_list for count in row))
        return [total[start : start + self.num_stages] for start in range(0, len(total), self.num_stages)]

    def within(self, counts: Table, layer: int) -> bool:
        """Whether ``layer`` is among the first ``counts`` layers of its mini-stage."""
        return self.positions[layer] < counts[self.chunks[layer]][self.columns[layer]]

    def log(self) -> list[tuple[str, str]]:
        """The placement in the words of the MindSpore Transformers guide."""
        return [
            ("INFO", f"num_layers per stage: {self.layer_list}"),
            ("INFO", f"Accumulated num_layers per stage: {self.accumulated}"),
            ("INFO", f"Pipeline id list with start_stage: {[self.start_stage + column for column in self.columns]}"),
            ("INFO", f"Interleave id list: {list(self.chunks)}"),
        ]

    def normalized(self) -> dict[str, Any]:
        """The placement with the keys of the recorded vectors."""
        return {
            "layer_list": self.layer_list,
            "layer_accu": self.accumulated,
            "pp_ids": [self.start_stage + column for column in self.columns],
            "interleave_ids": list(self.chunks),
            "effective_interleave": self.num_chunks,
        }


def place(
    num_layers: int,
    num_stages: int,
    num_chunks: int,
    offset: object,
    problems: Problems,
    *,
    offset_path: Path = ("offset",),
    layers_path: Path = ("num_layers",),
    start_stage: int = 0,
    folded: bool = False,
) -> Placement | None:
    """Place ``num_layers`` layers, or report why that cannot be done and return None.

    >>> place(5, 2, 1, [1, 0], Problems()).layer_list
    [[3, 2]]
    """
    count = num_stages * num_chunks
    if count == 1:
        return _fill([[num_layers]], num_layers, start_stage, folded=False)
    if count > num_layers + 2:
        problems.error(
            layers_path,
            f"{num_layers} layers cannot fill {num_stages} stages x {num_chunks} chunks = {count} mini-stages",
            "every mini-stage but the first and the last needs a layer: use fewer stages or chunks",
        )
        return None
    rows = _offset_rows(offset, num_layers, num_stages, num_chunks, problems, offset_path)
    if rows is None:
        return None
    base = num_layers // count
    table = [[base + entry for entry in row] for row in rows]
    if folded:
        table[1::2] = [row[::-1] for row in table[1::2]]
    flat = [entry for row in table for entry in row]
    if flat[0] < 0 or flat[-1] < 0 or any(entry < 1 for entry in flat[1:-1]):
        which = next(i for i, entry in enumerate(flat) if entry < (0 if i in (0, count - 1) else 1))
        problems.error(
            offset_path,
            f"mini-stage {which % num_stages} of chunk {which // num_stages} would hold {flat[which]} layers",
            "the first and the last mini-stage may hold none, every other needs at least one",
        )
        return None
    return _fill(table, num_layers, start_stage, folded=folded)


def even(num_layers: int, num_stages: int, num_chunks: int) -> Placement:
    """A placement of the same shape that needs no offset, to go on checking a file whose own does not fit."""
    count = min(num_stages * num_chunks, num_layers)
    shares = [num_layers // count + (index < num_layers % count) for index in range(count)]
    if count < num_stages * num_chunks:
        return _fill([shares], num_layers, 0, folded=False)
    table = [shares[start : start + num_stages] for start in range(0, count, num_stages)]
    return _fill(table, num_layers, 0, folded=False)


def _offset_rows(
    offset: object, num_layers: int, num_stages: int, num_chunks: int, problems: Problems, path: Path
) -> Table | None:
    """Check ``offset`` as written and spread it to ``num_chunks`` rows of ``num_stages``."""
    remainder = num_layers % (num_stages * num_chunks)
    shape = f"a whole number, a list of {num_stages}, or {num_chunks} lists of {num_stages}"
    rows: Table
    if isinstance(offset, int) and not isinstance(offset, bool):
        rows, total = [[offset] * num_stages] * num_chunks, offset
    elif isinstance(offset, (list, tuple)) and offset and all(_whole(entry) for entry in offset):
        if len(offset) != num_stages:
            problems.error(path, f"offset has {len(offset)} entries for {num_stages} stages", f"write {shape}")
            return None
        rows, total = [list(offset)] * num_chunks, sum(offset)
    elif isinstance(offset, (list, tuple)) and offset and all(isinstance(row, (list, tuple)) for row in offset):
        for index, row in enumerate(offset):
            if not all(_whole(entry) for entry in row):
                problems.error((*path, index), "offset takes whole numbers only", f"write {shape}")
                return None
            if len(row) != num_stages:
                problems.error(
                    (*path, index), f"offset has {len(row)} entries here for {num_stages} stages", f"write {shape}"
                )
                return None
        if len(offset) != num_chunks:
            problems.error(path, f"offset has {len(offset)} rows for {num_chunks} chunks", f"write {shape}")
            return None
        rows, total = [list(row) for row in offset], sum(map(sum, offset))
    else:
        problems.error(path, f"offset must be {shape}; found {offset!r:.80}", "for example offset: 0")
        return None
    if total != remainder:
        mini = f"{num_stages} stages" + (f" x {num_chunks} chunks" if num_chunks > 1 else "")
        problems.error(
            path,
            f"offset adds up to {total}, but {num_layers} layers over {mini} leave {remainder} over",
            f"give each of the {remainder} left-over layers to a stage: offset must add up to {remainder}"
            if remainder
            else "offset must add up to 0: what one stage gets another must give",
        )
        return None
    return rows


def _fill(table: Table, num_layers: int, start_stage: int, *, folded: bool) -> Placement:
    cells = [
        (column, chunk, position)
        for chunk, row in enumerate(table)
        for column, count in enumerate(row)
        for position in range(count)
    ][:num_layers]
    columns, chunks, positions = (tuple(part) for part in zip(*cells, strict=True))
    return Placement(table, columns, chunks, positions, start_stage, folded)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
