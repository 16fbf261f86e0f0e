"""Any input, however odd: read without raising, at little cost."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.config.schema.callbacks import CALLBACKS, IGNORED
from lowtide.config.schema.catalogue import AS_WRITTEN, SECTIONS, section_class
from lowtide.config.schema.field import Section, known_names
from support.schema_reading import ALL_SECTIONS, read

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70_000),
    st.sampled_from([10**400, -(10**400), 2**63, math.inf, -math.inf, math.nan, 1e308, "\ud800", "a=b\n", "x" * 5000]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["O0", "auto", "AdamW", "true", "4", "58GB", "MoEDropRateCallback", "bfloat16"]),
)
ALL_KEYS = sorted({key for section in ALL_SECTIONS for key in known_names(section)})
NAMES = st.one_of(st.sampled_from(ALL_KEYS), st.sampled_from(sorted(SECTIONS)), st.text(max_size=6), st.just("\udfff"))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner),
        st.dictionaries(NAMES, inner, max_size=5),
        st.fixed_dictionaries({"type": st.sampled_from([*CALLBACKS, *IGNORED])}, optional={"num_layers": inner}),
    ),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(st.one_of(st.sampled_from([*SECTIONS, "callback", "callbacks"]), NAMES), VALUES, max_size=6)


def exists(path: tuple[str | int, ...], value: Any) -> bool:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS)
def test_any_document_is_read_without_raising_and_each_problem_has_its_place(document: dict[str, Any]) -> None:
    result, problems = read(document)
    for problem in problems.errors + problems.warnings:
        assert problem.message
        assert exists(problem.path[:-1], document), problem
        problem.message.encode()  # a lone surrogate could not be printed
        problem.hint.encode()
        assert len(problem.message) < 2000
    for name in SECTIONS:
        if name not in ("model_config", "lr_scheduler"):
            assert isinstance(getattr(result, name), Section)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_any_value_is_read_without_raising(value: Any) -> None:
    read(value)


@pytest.mark.parametrize(
    "document",
    [
        {"context": {f"key{index}": index for index in range(50_000)}},
        {"recompute_config": {f"recompute{index}": index for index in range(50_000)}},
        {f"recompute_confi{index}": index for index in range(50_000)},
        {"optimizer": {"betas": ["x"] * 100_000}},
        {"train_dataset": {"input_columns": ["x"] * 100_000}},
        {"train_dataset": {"data_loader": {"handler": [1] * 100_000, "sizes": [1] * 100_000}}},
        {"train_dataset": {"data_loader": {"config": {"data_path": [1, "x"] * 50_000 + [None] * 100_000}}}},
        {"grouped_lr_schedule": {"grouped": [{"learning_rate": "x", "zzz": 1}] * 100_000}},
        {"grouped_lr_schedule": {"grouped": [{"learning_rate": "x"}] * 1000}},
        {"grouped_lr_schedule": {"grouped": ["x"] * 1000}},
        {"callbacks": [1] * 100_000},
        {"callbacks": [{"type": "nothing"}] * 100_000},
        {"model_config": {"x" * 200_000: 1}},
        {"model_config": {"num_layers": 10**5000, "rms_norm_eps": -(10**5000)}},
        {"parallelism": {"pipeline_parallel_layers_per_stage": ["1," * 50_000]}},
    ],
    ids=range(15),
)
def test_a_huge_document_costs_little(document: Any) -> None:
    start = time.process_time()
    problems = read(document)[1]
    assert time.process_time() - start < 1
    assert len(problems.errors) + len(problems.warnings) < 100


def test_reading_imports_no_unused_sections_and_builds_none() -> None:
    program = (
        "import sys\n"
        "from lowtide.config.problem import Problems\n"
        "from lowtide.config.schema import read_sections\n"
        "read_sections({'parallel_config': {'pipeline_stage': 2}}, Problems())\n"
        "names = [name for name in sys.modules if name.startswith('lowtide.config.schema.')]\n"
        "from lowtide.config.schema.field import Section\n"
        "print(*(name.rpartition('.')[2] for name in names))\n"
        "print(*(one.__name__ for one in Section.__subclasses__() if one.__pydantic_complete__))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules, built = done.stdout.splitlines()
    assert not {"model", "moe", "dataset", "optimizer", "callbacks", "document_schema"} & set(modules.split())
    assert built == ""


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_sections_read_elsewhere_list_the_keys_of_their_class(name: str) -> None:
    assert sorted(AS_WRITTEN[name]) == sorted(section_class(name).model_fields)
