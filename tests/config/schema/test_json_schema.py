"""The JSON Schema of a training file."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from lowtide.config.parse import parse_document
from lowtide.config.problem import Problems
from lowtide.config.schema import json_schema, read_sections
from lowtide.config.schema.callbacks import OtherCallback
from lowtide.config.schema.catalogue import SECTIONS
from lowtide.config.schema.field import known_names
from lowtide.config.schema.top_level import TopLevel
from support.guide_examples import DEEPSEEK, FORTY_EIGHT_LAYERS, SWAP_CASES
from support.schema_reading import ALL_SECTIONS

TRAINING_CASE = """
runner_config:
  gradient_accumulation_steps: 4
runner_wrapper:
  type: MFTrainOneStepCell
  use_clip_grad: True
  max_grad_norm: 1.0
moe_config:
  use_gmm: True
  enable_gmm_safe_tokens: True
  callback_moe_droprate: True
callback:
  - type: MoEDropRateCallback
    expert_num: 4
    capacity_factor: 1.5
    num_layers: 8
    mtp_depth: 1
model_config:
  use_fused_rope: True
  use_fused_swiglu: True
"""
NEWER_CASE = """
training: {steps: 10, local_batch_size: 1, global_batch_size: 8, max_norm: 1.0, seed: 1}
parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: ["0-3", "4-7"]}
model: {num_hidden_layers: 8, hidden_size: 64}
recompute: {mode: full, full_recompute_layer: ["0-3", 5]}
swap: {enable: true, layer_swap: [{backward_prefetch: 1, layers: ["6"], tier: disk}]}
"""
DATA_CASE = """
train_dataset:
  data_loader: {type: TextDataLoader, path: wiki.txt, tokenizer: bytes}
  num_parallel_workers: 2
  prefetch_size: 4
train_dataset_task:
  dataset_config:
    data_loader: {type: SyntheticDataLoader, sizes: [1000, 0, 0], vocab_size: 50}
lr_schedule: {type: ConstantWithCoolDownLR, keep_steps: 10, lr_end1: 1.0e-5, final_steps: 5, lr_end2: 1.0e-6}
"""
GUIDE = [DEEPSEEK, FORTY_EIGHT_LAYERS, *(case.text for case in SWAP_CASES.values())]
CASES = [*GUIDE, TRAINING_CASE, NEWER_CASE, DATA_CASE]


@cache
def schema_of_files() -> dict[str, Any]:
    return json_schema()


def schema_errors(document: Any) -> list[Any]:
    return list(jsonschema.Draft202012Validator(schema_of_files()).iter_errors(document))


def test_the_json_schema_is_valid_and_plain_json() -> None:
    schema = schema_of_files()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    assert schema["$schema"].endswith("2020-12/schema")


def test_the_json_schema_describes_every_key() -> None:
    schema = schema_of_files()
    missing = [name for name, one in schema["properties"].items() if not one.get("description")]
    for name, definition in schema["$defs"].items():
        missing += [f"{name}.{key}" for key, one in definition["properties"].items() if not one.get("description")]
    assert missing == []
    assert set(SECTIONS) | {"callbacks", "callback"} | set(known_names(TopLevel)) == set(schema["properties"])
    for section in ALL_SECTIONS:
        if section not in (TopLevel, OtherCallback):
            assert set(known_names(section)) == set(schema["$defs"][section.__name__]["properties"])


@pytest.mark.parametrize("text", CASES)
def test_the_json_schema_and_the_reader_accept_the_guides_examples(text: str) -> None:
    problems = Problems()
    document = parse_document(text, problems)
    read_sections(document.value, problems)
    assert problems.errors == []
    assert schema_errors(document.value) == []


@pytest.mark.parametrize(
    "document",
    [
        {"model": {"model_config": {"num_layers": "4"}}},
        {"training": {}, "model": {"num_layers": "4"}},
        {"recompute_config": {"recompte": True}},
        {"recompute_config": {"recompute": "all"}},
        {"recompute_config": {"select_recompute": 3}},
        {"swap_config": {"op_swap": [{"op_name": "attention", "tier": "tape"}]}},
        {"swap": {"enable": "yes"}},
        {"recompute": {"mode": "half"}},
        {"recompute_config": {}, "training": {}},
        {"callbacks": [{"type": "Nothing"}]},
        {"callbacks": [{"type": "MFLossMonitor", "per_print_times": 0}]},
        {"run_mode": "predict"},
        {"context": {"max_device_memory": "58 parsecs"}},
        {"adapt": {"budget": "60 parsecs"}},
        {"adapt": {"device_swp": True}},
    ],
)
def test_the_json_schema_rejects_what_is_wrong(document: Any) -> None:
    assert schema_errors(document)
