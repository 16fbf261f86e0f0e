"""The recorded vectors as the files a user would write."""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@cache
def vectors(name: str) -> tuple[dict[str, Any], ...]:
    """All vectors of one recording."""
    with gzip.open(HERE / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return tuple(json.loads(line) for line in lines)


@cache
def deviations(form: str) -> dict[int, dict[str, Any]]:
    """By vector id: what we do instead, and what may differ."""
    result: dict[int, dict[str, Any]] = {}
    for entry in json.loads((HERE / "deviations.json").read_text(encoding="utf-8"))[form]:
        kind = entry.get("kind")
        for vector in entry["ids"] or [v["id"] for v in vectors("golden") if kind and v["kind"] == kind]:
            merged = result.setdefault(vector, {"we": entry["we"], "reasons": [], "normalized": False, "log": False})
            assert merged["we"] == entry["we"]
            merged["reasons"].append(entry["reason"])
            merged["normalized"] |= entry.get("normalized", False)
            merged["log"] |= entry.get("log", False)
    return result


def graph_file(vector: dict[str, Any]) -> str:
    """A vector of the graph form as a YAML file."""
    given = vector["input"]
    value = {
        "use_legacy": given["use_legacy"],
        "model": {
            "model_config": {
                key: given[key] for key in ("num_layers", "pp_interleave_num", "offset", "start_stage", "stage_num")
            }
        },
        "parallel_config": {
            "pipeline_stage": given["pipeline_stage"],
            "micro_batch_num": max(given["pipeline_stage"], 1),
        },
        "parallel": {
            "pipeline_config": {
                "pipeline_interleave": given["pipeline_interleave"],
                "pipeline_scheduler": given["pipeline_scheduler"],
            }
        },
        "recompute_config": given["recompute_config"],
        "swap_config": given["swap_config"],
    }
    return _dump(value, tuples=_TUPLES.get(vector["id"], ()) if vector["tuples"] else ())


def file_2026(vector: dict[str, Any]) -> str:
    """A vector of the 2026 form as a YAML file."""
    value = {
        "model": {"num_layers": vector["num_layers"]},
        "parallelism": {"pipeline_parallel": vector["pp"]},
        **{key: vector[key] for key in ("recompute", "recompute_comm", "swap") if vector[key] is not None},
    }
    return _dump(value, tuples=("recompute.full_recompute_layer",) if vector["note"] == "tuple" else ())


def collapse(text: str) -> str:
    """Runs of blanks and doubled backslashes are one."""
    return re.sub(r"\s+", " ", text.replace("\\\\", "\\")).strip()


# JSON knows no tuples: which values of these vectors were tuples stands in their notes.
_TUPLES = {
    452: ("recompute_config.recompute",),
    453: ("recompute_config.recompute", "recompute_config.recompute.0", "recompute_config.recompute.1"),
    454: ("recompute_config.recompute.0", "recompute_config.recompute.1"),
    532: ("swap_config.layer_swap.0.layers",),
    545: ("recompute_config.recompute",),
}


def _dump(value: dict[str, Any], tuples: tuple[str, ...]) -> str:
    """Each section on a line of its own, in YAML's flow style."""
    return "".join(f"{key}: {_flow(item, key, tuples)}\n" for key, item in value.items())


def _flow(value: object, path: str, tuples: tuple[str, ...]) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_flow(v, f'{path}.{k}', tuples)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        tag = "!!python/tuple " if path in tuples else ""
        return tag + "[" + ", ".join(_flow(item, f"{path}.{i}", tuples) for i, item in enumerate(value)) + "]"
    return json.dumps(value)
