"""What an adaptive run did, as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.adaptive.journal import Journal
from lowtide.adaptive.record import AdaptEvent, AdaptRecord, AdaptStep, Kind, Phase, load_record, save_record
from lowtide.errors import ReportError

NUMBERS = st.integers(0, 2**40)
RECORDS = st.builds(
    AdaptRecord,
    events=st.lists(st.builds(AdaptEvent, NUMBERS, st.sampled_from(get_args(Kind)), st.text())).map(tuple),
    steps=st.lists(
        st.builds(AdaptStep, NUMBERS, st.floats(0, 1e6), NUMBERS, st.sampled_from(get_args(Phase)), NUMBERS)
    ).map(tuple),
    plan=st.none() | st.just("plan.json"),
    budget=st.none() | NUMBERS,
    capacity=st.none() | NUMBERS,
)


@given(RECORDS)
def test_a_record_is_read_back_as_it_was_written(record: AdaptRecord) -> None:
    assert AdaptRecord.from_json(json.loads(json.dumps(record.as_json()))) == record


def test_a_saved_record_replaces_the_earlier_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "adaptive.json"
    save_record(AdaptRecord(budget=1), file)
    save_record(AdaptRecord(budget=2), file)
    assert load_record(file) == AdaptRecord(budget=2)
    assert list(tmp_path.iterdir()) == [file]


def test_the_record_of_a_long_run_stays_short() -> None:
    journal = Journal(None, print, None, lambda: None, verbose=False, first=True)
    for number in range(1, 30_001):
        planned = number > 5
        step = AdaptStep(number, 1.0, number, "planned" if planned else "measuring", rescued=number % 7 == 0)
        journal.ended(step)
        if step.rescued:
            journal.note(number, "rescued", "an operator lacked memory")
    journal.note(30_000, "replanned", "memory was missing")
    steps, events = journal.steps, journal.events
    assert len(steps) <= 4096
    assert len(events) <= 4096
    assert [step.step for step in steps[:5]] == [1, 2, 3, 4, 5]
    assert [step.step for step in steps[-2000:]] == list(range(28_001, 30_001))
    assert sum(step.rescued for step in steps) == 30_000 // 7
    assert [step.step for step in steps] == sorted(step.step for step in steps)
    assert {step.seconds for step in steps} == {1.0}
    assert events[-1].kind == "replanned"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not the record of an adaptive run"),
        ("[]", "lowtide_adaptive"),
        ('{"lowtide_adaptive": 1}', "KeyError"),
        (
            '{"lowtide_adaptive": 1, "plan": null, "budget": null, "capacity": null, "events":'
            ' [{"step": 1, "kind": "sung", "text": ""}], "steps": {"columns": [], "rows": []}}',
            "found 'sung'",
        ),
    ],
)
def test_another_file_is_refused_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text(text)
    with pytest.raises(ReportError, match=said) as caught:
        load_record(file)
    assert str(file) in str(caught.value)


def test_a_missing_record_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="No such file"):
        load_record(tmp_path / "adaptive.json")
