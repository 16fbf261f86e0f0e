"""The Trace is plain data that survives a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.errors import TraceError
from lowtide.trace.trace import Call, Kernel, Pack, Part, Static, Trace, TracedOperator, Value


def small_trace() -> Trace:
    layer = Part(
        name="Layer",
        operators=(TracedOperator("linear", 0, 0, consumers=("silu",)), TracedOperator("silu", 64, 64)),
        values=(Value(64, source="boundary", until="backward"), Value(64, "linear"), Value(64, "silu")),
        kernels=(Kernel("aten::mm", "linear", flops=128, touched=192, reads=(0,), writes=(1,)),),
        calls=(Call("linear", (0,)), Call("silu", (1,), ("linear",))),
        packs=(Pack(0, "linear", "", "boundary", 0), Pack(1, "silu", "linear", "operator", 1)),
        forward=(("call", 0), ("make", 1), ("run", 0), ("save", 0), ("end", 0)),
        backward=(("use", 1), ("done", 1), ("use", 0), ("done", 0)),
        input=0,
        output=2,
        static=Static(parameters=(256,), gradients=(256,)),
    )
    return Trace(
        model="tiny",
        parts=(layer,),
        layers=(0, 0),
        before=Part(name="before"),
        after=Part(name="after"),
        batch={"samples": 1, "tokens": 16},
    )


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = small_trace()
    trace.save(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    assert again == trace
    assert again.digest == trace.digest
    assert [operator.name for operator in again.catalogue.layers[1]] == ["linear", "silu"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"lowtide_trace": 1}', '{"lowtide_trace": 2, "model": "x"}'])
def test_what_is_no_trace_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(TraceError, match=r"trace\.json"):
        Trace.load(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.json"):
        Trace.load(tmp_path / "nowhere.json")
