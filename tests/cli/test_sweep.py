"""``lowtide plan --sweep``: the values, a row for each, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide.cli.main import app
from lowtide.cli.sweep import parse_range
from lowtide.errors import LowtideError
from lowtide.models.known import SHAPES
from lowtide.models.shape import DecoderShape
from lowtide.trace.layout import Layout
from support.hand_made_traces import llama_trace

TINY = DecoderShape(
    vocab_size=512, hidden_size=256, num_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=64,
    intermediate_size=512, max_position_embeddings=512,
)  # fmt: skip
MIB = 1 << 20


def run(*arguments: object, width: int = 120) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": str(width)})
    return result.exit_code, result.stdout, result.stderr


def rows(*arguments: object) -> list[dict[str, Any]]:
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)["rows"]
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    given = llama_trace(layers=4)
    replace(given, layout=Layout(shard=8), batch={"samples": 1, "tokens": 4096}).save(file)
    return file


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return "tiny"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("budget=40GiB..80GiB", tuple(size << 30 for size in (40, 50, 60, 70, 80))),
        ("budget=40GiB..80GiB:3", tuple(size << 30 for size in (40, 60, 80))),
        ("budget=80GiB,40GiB", (80 << 30, 40 << 30)),
        ("seq=4096..32768", (4096, 8192, 16384, 32768)),
        ("devices=8..48", (8, 16, 32, 48)),
        ("devices=8..64:8", (8, 16, 24, 32, 40, 48, 56, 64)),
        ("seq=1..3:9", (1, 2, 3)),
        ("seq=512", (512,)),
    ],
)
def test_values_are_read_as_people_write_them(text: str, values: tuple[int, ...]) -> None:
    assert parse_range(text).values == values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("40GiB..80GiB", "expected budget=40GiB..80GiB"),
        ("tp=1..8", "expected budget=40GiB..80GiB"),
        ("budget=80GiB..40GiB", "less than the last"),
        ("budget=40..80", 'for 40 GiB write "40GiB"'),
        ("budget=40GiB..80GiB:1", "two values at least"),
        ("budget=40GiB..80GiB:few", "not a whole number"),
        ("budget=40GiB:4", "a count goes with a range"),
        ("seq=0..4", "not a whole number above zero"),
        ("seq=", "not a whole number"),
    ],
)
def test_a_range_that_cannot_be_read_is_said_in_words(text: str, words: str) -> None:
    with pytest.raises(LowtideError) as caught:
        parse_range(text)
    assert words in str(caught.value)
    assert run("llama3-8b", "--sweep", text) == (1, "", f"error: {caught.value}\n")


def test_each_budget_has_the_plan_that_it_has_alone_and_one_that_does_not_fit_is_a_row(trace: Path) -> None:
    none, some, most = rows(trace, "--sweep", "budget=600MiB,1000MiB,1400MiB")
    assert (none["fits"], none["value"]) == (False, 600 * MIB)
    assert none["least"] > 600 * MIB
    assert "the least that any policy needs is" in none["why"]
    alone = json.loads(run(trace, "--budget", "1000MiB", "--json")[1])
    assert some["step_s"] == alone["simulation"]["seconds"]
    assert some["tokens_per_second"] == 8 * 4096 / some["step_s"]
    assert some["peak"] <= some["reserved"] <= 1000 * MIB
    assert some["step_s"] > most["step_s"]
    assert most["mfu"] > some["mfu"]
    assert most["activations"]["recompute"] == most["activations"]["swap"] == 0
    assert most["decided"] == []
    by_kind = {
        kind: sum(one["bytes"] for one in some["decided"] if one["decision"] == kind) for kind in ("recompute", "swap")
    }
    assert by_kind == {kind: some["activations"][kind] for kind in by_kind}
    assert sum(some["activations"].values()) == sum(most["activations"].values())


def test_the_table_has_a_line_for_each_value_and_the_page_is_written(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    code, out, err = run(trace, "--sweep", "budget=600MiB..1400MiB:2", "--html", page)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "hand-made llama with 600 MiB to 1.367 GiB: 1 of 2 fit" in lines[0]
    assert lines[2].split() == ["600", "MiB", "does", "not", "fit"]
    assert "47.5%" in lines[3]
    assert "1.367 GiB: everything is kept" in lines
    assert any(line.startswith("600 MiB: the least that any policy needs is") for line in lines)
    text = page.read_text()
    assert "does not<br>fit" not in text  # the figures are packed
    assert text.count('class="chart"') == 4
    assert "everything is kept" in text
    narrow = run(trace, "--sweep", "budget=1400MiB", width=80)[1].splitlines()
    assert max(map(len, narrow[1:3])) <= 80
    assert "…" not in narrow[2]


def test_where_no_value_fits_the_table_says_so_with_exit_code_1(trace: Path) -> None:
    code, out, _ = run(trace, "--sweep", "budget=100MiB..200MiB:2")
    assert code == 1
    assert "0 of 2 fit" in out


def test_a_length_that_ranks_cannot_split_is_a_row(tiny: str) -> None:
    odd, even = rows(tiny, "--tp", 2, "--sweep", "seq=255,256")
    assert not odd["fits"]
    assert "255" in odd["why"]
    assert even["fits"]
    assert even["tokens_per_second"] == pytest.approx(256 / even["step_s"])


def test_devices_are_data_parallel_ranks_of_the_given_layout(tiny: str) -> None:
    odd, four = rows(tiny, "--tp", 2, "--seq", 256, "--sweep", "devices=3,4")
    assert odd["why"] == "3 devices are no multiple of --tp and --pp, 2"
    assert four["tokens_per_second"] == pytest.approx(2 * 256 / four["step_s"])


@pytest.mark.slow
def test_devices_with_a_global_batch_are_searched_for_their_layouts(tiny: str) -> None:
    three, two = rows(tiny, "--global-batch", 2, "--seq", 256, "--sweep", "devices=3,2")
    assert not three["fits"]
    assert "no layout of 3 devices" in three["why"]
    assert two["layout"]
    assert two["tokens_per_second"] == pytest.approx(2 * 256 / two["step_s"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("llama3-8b", "--sweep", "budget=1GiB..2GiB", "--budget", "2GiB"), "say the same"),
        (("llama3-8b", "--sweep", "seq=512", "--seq", "512"), "say the same"),
        (("llama3-8b", "--sweep", "devices=8", "--dp", "8"), "leave out --dp"),
        (("llama3-8b", "--sweep", "seq=512", "-o", "policy.json"), "--output one file of one"),
        (("llama9-8b", "--sweep", "seq=512,1024"), "did you mean llama3-8b"),
        (("llama3-8b", "--sweep", "devices=8,16", "--device", "h1000"), "did you mean h100"),
        (("llama3-8b", "--sweep", "devices=8,16", "--global-batch", "64", "--tp", "2"), "does not take --tp"),
        (("llama3-8b", "--sweep", "seq=512", "--html", "nowhere/page.html"), "there is no directory nowhere"),
    ],
)
def test_what_is_wrong_with_every_value_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
