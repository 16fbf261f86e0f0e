"""The values of sections: their types, their defaults, and the words of an error."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from lowtide.config.problem import Problems
from lowtide.config.schema.catalogue import SECTIONS, section_class
from lowtide.config.schema.context import Context
from lowtide.config.schema.dataset import BlendConfig, DataLoader
from lowtide.config.schema.field import Section, known_names
from lowtide.config.schema.memory import RecomputeConfig
from lowtide.config.schema.model import ModelConfig, ModelSection
from lowtide.config.schema.optimizer import Optimizer
from lowtide.config.schema.parallel import ParallelConfig
from lowtide.config.schema.reader import read_section
from lowtide.config.schema.runner import RunnerConfig, RunnerWrapper
from support.schema_reading import ALL_SECTIONS, errors, only_error, read


@pytest.mark.parametrize(
    ("document", "message", "hint"),
    [
        ({"model_config": {"num_layers": "4"}}, "`num_layers` must be a whole number, found the text '4'", "4 without"),
        ({"model_config": {"num_layers": True}}, "`num_layers` must be a whole number, found true", "number, such as"),
        ({"model_config": {"num_layers": 4.0}}, "`num_layers` must be a whole number, found the number 4.0", "write 4"),
        ({"model_config": {"num_layers": 0}}, "`num_layers` must be at least 1, found 0", ""),
        ({"model_config": {"num_layers": 10_001}}, "`num_layers` must be at most 10,000, found 10001", ""),
        ({"model_config": {"pp_interleave_num": 1025}}, "`pp_interleave_num` must be at most 1,024, found 1025", ""),
        ({"model_config": {"start_stage": -1}}, "`start_stage` must be at least 0, found -1", ""),
        ({"parallel_config": {"pipeline_stage": 65_537}}, "`pipeline_stage` must be at most 65,536, found 65537", ""),
        ({"runner_wrapper": {"max_grad_norm": 0}}, "`max_grad_norm` must be above 0, found 0", ""),
        ({"runner_wrapper": {"use_clip_grad": 1}}, "`use_clip_grad` must be true or false, found the number 1", "true"),
        ({"optimizer": {"eps": "1e-5"}}, "`eps` must be a number, found the text '1e-5'", "1e-5 without quotes"),
        ({"optimizer": {"eps": math.nan}}, "`eps` must be a finite number, found nan", ""),
        ({"optimizer": {"betas": [0.9, "x"]}}, "`betas[1]` must be a number, found the text 'x'", ""),
        ({"context": "memory_optimize_level=O0"}, "must be a mapping, found the text 'memory_optimize_l", "colon"),
        ({"context": {"max_device_memory": "58 parsecs"}}, "must be a size such as \"58GB\"", "24GiB"),
        ({"runner_config": {"gradient_accumulation_steps": True}}, "must be a whole number, found true", ""),
        ({"callbacks": {"type": "MFLossMonitor"}}, "`callbacks` must be a list, found a mapping", "- type"),
        ({"recompute": True}, "`recompute` must be a mapping, found true", "recompute_config:\n  recompute: true"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_reported_in_plain_words(document: Any, message: str, hint: str) -> None:
    problem = only_error(document)
    assert message in problem.message
    assert hint in problem.hint


def test_key_equals_value_is_shown_with_a_colon() -> None:
    problem = only_error({"context": "memory_optimize_level=O0"})
    assert problem.hint.endswith('context:\n  memory_optimize_level: "O0"')


def test_a_wrong_choice_names_the_choices_that_work() -> None:
    problem = only_error({"parallel": {"pipeline_config": {"pipeline_scheduler": "1f1c"}}})
    assert "one of gpipe, 1f1b, zero_bubble_v" in problem.message
    assert problem.hint == "did you mean 1f1b?"


def test_no_message_has_the_jargon_of_a_library() -> None:
    document = {
        name: {key: object() for key in known_names(section_class(name))} for name in SECTIONS if name != "model"
    }
    text = " ".join(f"{problem.message} {problem.hint}" for problem in errors(document))
    for word in ("pydantic", "Input should", "type=", "https://", "Annotated", "NoneType", "Section"):
        assert word not in text


def test_problems_of_sections_come_in_the_order_of_the_file() -> None:
    document = {"model": {"model_config": {"num_layers": "4"}}, "callbacks": 1, "runner_config": {"epochs": "1"}}
    assert [problem.path[0] for problem in errors(document)] == list(document)


def test_whole_numbers_are_numbers() -> None:
    result = read({"optimizer": {"weight_decay": 1}})[0]
    assert type(result.optimizer.weight_decay) is float


def test_null_leaves_the_default() -> None:
    result, problems = read({"runner_config": {"gradient_accumulation_steps": None}, "context": None})
    assert result.runner_config.gradient_accumulation_steps == 1
    assert problems.errors == problems.warnings == []
    assert "context" not in result.present


def test_a_broken_value_leaves_its_default_and_the_rest_is_read() -> None:
    result = read({"parallel_config": {"pipeline_stage": "x", "model_parallel": 8}})[0]
    assert result.parallel_config == ParallelConfig(model_parallel=8)


def test_sizes_are_bytes() -> None:
    assert read({"context": {"max_device_memory": "58GB"}})[0].context.max_device_memory == 58 * 10**9


def test_the_offset_and_the_memory_settings_are_handed_on_as_written() -> None:
    result, problems = read(
        {"model_config": {"offset": [[0, "x"]]}, "recompute_config": {"recompute": "odd"}, "swap_config": {"swap": 1}}
    )
    assert result.model.offset == [[0, "x"]]
    assert result.recompute_config.recompute == "odd"  # type: ignore[comparison-overlap]
    assert result.swap_config.swap == 1
    assert problems.errors == []


def test_sections_are_frozen_values() -> None:
    section = RunnerConfig(epochs=2)
    with pytest.raises(ValidationError, match="frozen"):
        section.epochs = 3
    with pytest.raises(ValidationError, match="epoch"):
        RunnerConfig(epoch=2)  # type: ignore[call-arg]
    assert section.model_copy(update={"batch_size": 4}) == RunnerConfig(epochs=2, batch_size=4)
    assert section != RunnerConfig()
    assert pickle.loads(pickle.dumps(section)) == copy.deepcopy(section) == section


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_every_section_is_a_strict_and_frozen_pydantic_model(section: type[Section]) -> None:
    assert issubclass(section, BaseModel)
    assert section.model_config["strict"]
    assert section.model_config["frozen"]
    assert section.model_validate({}) == section.model_construct() == section()


@pytest.mark.parametrize(
    ("section", "name", "good", "bad"),
    [
        (RunnerConfig, "epochs", [3, None], ["3", 3.0, True, 0, 10**400]),
        (RunnerWrapper, "max_grad_norm", [1, 0.5], ["1", 0, math.inf, math.nan, 10**400, -(10**400)]),
        (RunnerWrapper, "scale_sense", [2.0, {"scale_window": 10}], [-1, {"scale_window": "10"}, []]),
        (Optimizer, "betas", [[0.9, 1], []], [[0.9, 1.5], ["0.9"], 0.9]),
        (Context, "mode", [0, 1], [True, 1.0, 2, "\ud800"]),
        (Context, "max_device_memory", ["58GB", 58], ["58 parsecs", "0GB", 0, -1, 10**400, 5.5, True, "9" * 50]),
        (DataLoader, "config", [{"seq_length": 4}, BlendConfig(seed=1)], [{"seq_length": 0}, "x"]),
        (ModelSection, "model_config", [{"num_layers": 4}], [{"num_layers": "4"}]),
        (RecomputeConfig, "recompute", [True, None, "odd", [[object()]]], []),
    ],
)
def test_values_are_validated_by_pydantic(section: type[Section], name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        section.model_validate({name: value})
        assert not read_problems(section, {name: value}).errors
    for value in bad:
        with pytest.raises(ValidationError):
            section.model_validate({name: value})
        assert len(read_problems(section, {name: value}).errors) == 1


def read_problems(section: type[Section], value: Any) -> Problems:
    problems = Problems()
    read_section(section, value, (), problems)
    return problems


def test_one_error_of_a_value_with_several_forms_is_about_the_form_that_was_meant() -> None:
    loader = {"config": {"data_path": [1, "x", None]}}
    problem = only_error({"train_dataset": {"data_loader": loader}})
    assert problem.path == ("train_dataset", "data_loader", "config", "data_path", 2)
    assert problem.message == "`data_path[2]` must be text, a whole number or a number, found nothing (null)"
    assert only_error({"model_config": {"moe_aux_loss_coeff": [1, -1]}}).message.startswith("`moe_aux_loss_coeff[1]`")
    assert "at least 0" in only_error({"model_config": {"moe_aux_loss_coeff": -1}}).message
    assert "a number or a list of numbers" in only_error({"model_config": {"moe_aux_loss_coeff": "x"}}).message


def test_problems_of_a_section_come_in_the_order_of_its_keys() -> None:
    document = {"zzz": 1, "search_mode": "x", "pipeline_config": {"zzz": 1}, "full_batch": True}
    assert [problem.path[1] for problem in read({"parallel": document})[1].warnings] == list(document)


def test_absent_sections_are_defaults() -> None:
    result = read({})[0]
    assert result.layout == "graph"
    assert result.present == frozenset()
    for name in SECTIONS:
        if name not in ("model", "model_config", "lr_scheduler"):
            assert getattr(result, name) == section_class(name)()
    assert result.top_level.use_legacy is True
    assert result.parallel.pipeline_config.pipeline_interleave is None
    assert result.model == ModelConfig()
