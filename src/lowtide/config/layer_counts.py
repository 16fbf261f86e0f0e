"""From one recompute value to how many layers of each mini-stage it turns on.

Every form the grammar knows ends in a table of counts: the first ``count`` layers of each
mini-stage are on.
"""

from __future__ import annotations

from typing import Any

from lowtide.config.document import Path
from lowtide.config.placement import Placement, Table
from lowtide.config.problem import Problems

__all__ = ["counts_of", "indices_of"]

_FORMS = "true or false, a list with a number for each stage, or a list of such lists with one for each chunk"


def counts_of(value: object, placement: Placement, problems: Problems, path: Path) -> Table | None:
    """Normalise ``value``; report what is wrong with it and return None otherwise.

    >>> from lowtide.config.placement import place
    >>> placement = place(48, 5, 2, [[0,1,1,1,1],[1,1,1,1,0]], Problems())
    >>> counts_of([2, 1, 0, 0, 0], placement, Problems(), ())
    [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    """
    layer_list = placement.layer_list
    if value is True:
        return [list(row) for row in layer_list]
    if value is False:
        return [[0] * len(row) for row in layer_list]
    if not isinstance(value, (list, tuple)):
        problems.error(path, f"`{_key(path)}` cannot be {_describe(value)}", f"write {_FORMS}")
        return None
    if value and all(isinstance(entry, str) for entry in value):
        return [list(row) for row in layer_list]
    if any(isinstance(entry, (list, tuple)) for entry in value):
        return _rows(value, placement, problems, path)
    return _flat(value, placement, problems, path)


def indices_of(value: object, num_layers: int, problems: Problems, path: Path) -> list[int] | bool | None:
    """Read ``value`` as layer indices, as it is meant while swap is on: true, or a list of indices."""
    if value is True:
        return True
    if value is False:
        return []
    hint = f"with swap on, write true, false or a list of layer indices from 0 to {num_layers - 1}"
    if not isinstance(value, list):
        problems.error(path, f"`{_key(path)}` cannot be {_describe(value)} while swap is on", hint)
        return None
    result: list[int] = []
    for index, entry in enumerate(value):
        if not isinstance(entry, int) or isinstance(entry, bool):
            problems.error((*path, index), f"a layer index is a whole number; found {_describe(entry)}", hint)
            return None
        if not 0 <= entry < num_layers:
            problems.error((*path, index), f"there is no layer {entry}", f"layers run from 0 to {num_layers - 1}")
            return None
        result.append(entry)
    return result


def _flat(value: Any, placement: Placement, problems: Problems, path: Path) -> Table | None:
    layer_list, num_stages = placement.layer_list, placement.num_stages
    if placement.folded and value:
        problems.error(
            path, f"with zero_bubble_v, `{_key(path)}` needs a list for each chunk", "write a list of two lists"
        )
        return None
    if len(value) > num_stages:
        problems.error(
            path,
            f"length of {_key(path)} should be equal or less than pipeline_stage number: {len(value)} > {num_stages}",
            f"write at most {num_stages} numbers, or set parallel_config.pipeline_stage",
        )
        return None
    result = [[0] * num_stages for _ in layer_list]
    for stage, entry in enumerate(value):
        if not _is_count(entry, problems, (*path, stage), path):
            return None
        total = sum(row[stage] for row in layer_list)
        left = total if entry is True else min(int(entry), total)
        # One at a time to the chunks in turn, past those that are full.
        while left > 0:
            for chunk, row in enumerate(layer_list):
                if left > 0 and result[chunk][stage] < row[stage]:
                    result[chunk][stage] += 1
                    left -= 1
    return result


def _rows(value: Any, placement: Placement, problems: Problems, path: Path) -> Table | None:
    layer_list, num_stages = placement.layer_list, placement.num_stages
    if len(value) != len(layer_list):
        problems.error(
            path,
            f"`{_key(path)}` has {len(value)} rows for {len(layer_list)} chunks",
            f"write {len(layer_list)} lists of {num_stages} numbers (pp_interleave_num is {len(layer_list)})",
        )
        return None
    result: Table = []
    for chunk, row in enumerate(value):
        here = (*path, chunk)
        if isinstance(row, bool):
            result.append([count if row else 0 for count in layer_list[chunk]])
            continue
        if not isinstance(row, (list, tuple)):
            problems.error(
                here, f"a row cannot be {_describe(row)} where others are lists", f"write a list of {num_stages}"
            )
            return None
        if len(row) != num_stages:
            problems.error(
                here, f"this row has {len(row)} entries for {num_stages} stages", f"write {num_stages} numbers"
            )
            return None
        if not all(_is_count(entry, problems, (*here, stage), path) for stage, entry in enumerate(row)):
            return None
        if placement.folded and chunk % 2:
            row = row[::-1]
        result.append(
            [
                full if entry is True else min(int(entry), full)
                for entry, full in zip(row, layer_list[chunk], strict=True)
            ]
        )
    return result


def _is_count(entry: object, problems: Problems, here: Path, path: Path) -> bool:
    if not isinstance(entry, int):
        problems.error(here, f"`{_key(path)}` counts layers; it cannot hold {_describe(entry)}", f"write {_FORMS}")
        return False
    if entry < 0:
        problems.error(here, f"a number of layers cannot be negative; found {entry}", "write 0 for none")
        return False
    return True


def _key(path: Path) -> str:
    return next((part for part in reversed(path) if isinstance(part, str)), "value")


def _describe(value: object) -> str:
    if value is None:
        return "empty (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r:.60}"
    if isinstance(value, int):
        return f"the number {value!r:.60}"
    if isinstance(value, float):
        return f"the fraction {value!r}"
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else "a tuple"
