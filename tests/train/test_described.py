"""Patterns are matched against the model that a file describes, by ``check --trace`` and by ``train``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.config.check import check_file
from lowtide.models.build import build_model
from lowtide.models.experts_shape import ExpertsShape
from lowtide.models.initialise import initialise
from lowtide.models.shape import DecoderShape
from lowtide.operators.names import layer_operators
from lowtide.operators.survey import survey
from lowtide.policy import Catalogue
from lowtide.train.described import check_described, operators_of_shape
from lowtide.train.run import Degrees
from models.shapes import deepseek, llama, tokens
from support.commands import TINY, check, log, merged, receipts, train
from support.layout_cases import TENSOR, data
from support.ranks import Ranks
from train import runs

EXAMPLES = Path(__file__).parents[2] / "examples" / "yaml"
MOE = merged(TINY, {"moe_config": {"expert_num": 4, "num_experts_chosen": 2}})
EXPERTS = {"recompute_config": {"select_recompute": {"feed_forward\\.experts\\.mul": True}}}
SHAPES = {
    "dense": llama(),
    "dense without fused attention, with dropout": llama(flash_attention=False, hidden_dropout=0.1, qk_norm=True),
    "latent attention and experts": deepseek(),
    "experts only, with a capacity": llama(
        experts=ExpertsShape(count=4, chosen=2, intermediate_size=16, capacity=1.2, grouped=False)
    ),
}


def names(catalogue: Catalogue) -> list[list[tuple[Any, ...]]]:
    return [[(one.name, sorted(one.consumers), one.aliases) for one in layer] for layer in catalogue.layers]


def real_operators(shape: DecoderShape) -> Catalogue:
    """The operators that a run of the whole model with real numbers has."""
    model = build_model(shape)
    initialise(model, seed=1)
    return survey(model, lambda: model(tokens()), layers="layers").catalogue


@pytest.mark.parametrize("what", SHAPES)
def test_the_operators_are_those_of_a_run_with_real_numbers(what: str) -> None:
    assert names(operators_of_shape(SHAPES[what], Degrees())) == names(real_operators(SHAPES[what]))


def test_prediction_layers_come_last_and_have_experts() -> None:
    layers = operators_of_shape(deepseek(prediction_layers=2), Degrees()).layers
    assert len(layers) == 5
    assert layers[3] == layers[4] == layers[2] != layers[0]


@pytest.mark.parametrize(
    ("model", "layout", "degrees"),
    [
        (
            "llama",
            {**data(1, 4), **TENSOR, "parallel_config.use_seq_parallel": True},
            Degrees(tensor=2, sequence_parallel=True),
        ),
        (
            "llama",
            {**data(1, 8), **TENSOR, "parallel_config.use_seq_parallel": True},
            Degrees(tensor=2, sequence_parallel=True),
        ),
        ("deepseek", {**data(2, 2), "parallel_config.expert_parallel": 2}, Degrees(shard=2, expert=2)),
    ],
)
def test_they_are_those_of_sharded_ranks_too(
    model: str, layout: dict[str, Any], degrees: Degrees, ranks: Ranks
) -> None:
    found, shape = ranks.run(runs.profiled_operators, model, layout)[0]
    layers = operators_of_shape(shape, degrees, samples=layout["runner_config.batch_size"]).layers
    # FSDP copies gathered parameters while a layer runs; nothing of the model is called that.
    found = [[name for name in layer if not name.rpartition(".")[2].startswith("copy")] for layer in found]
    assert found == [sorted(one.name for one in layer) for layer in layers]


def test_check_says_what_it_knows_and_with_trace_knows_the_experts(tmp_path: Path) -> None:
    document = merged(MOE, EXPERTS)
    plain = check(tmp_path, document)
    assert plain.returncode == 0
    assert "the model has experts, and patterns were matched against the names of a dense layer" in plain.stderr
    assert "only the names of a dense layer are known here" in plain.stderr
    traced = check(tmp_path, document, "--trace")
    assert traced.returncode == 0
    assert "Set select recompute on at layer 1: feed_forward.experts.mul\n" in traced.stdout
    assert "no effect" not in traced.stderr
    value = json.loads(check(tmp_path, document, "--trace", "--json").stdout)
    assert (value["matched_against"], value["warnings"]) == ("the model", [])


def test_the_second_trace_of_a_model_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(merged(MOE, EXPERTS)))
    program = (
        "import sys; from lowtide.train.described import check_described;"
        "check = check_described('run.yaml', must=True); assert check.ok and check.model_known;"
        "print('torch' in sys.modules)"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    seen = [
        subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert seen == ["True", "False"]


def test_default_patterns_that_name_nothing_in_the_model_fail_in_check_and_before_training(tmp_path: Path) -> None:
    document = merged(MOE, {"recompute_config": {"select_recompute": True}})
    for done in (check(tmp_path, document, "--trace"), train(tmp_path, document)):
        assert done.returncode == 1
        assert "the default pattern `feed_forward\\.mul` (recompute) matches nothing in the model" in done.stderr
    assert not (tmp_path / "output").exists()  # it failed before anything was written


def test_train_says_which_operators_of_the_experts_it_recomputes_and_does(tmp_path: Path) -> None:
    done = train(tmp_path, merged(MOE, EXPERTS))
    assert done.returncode == 0, done.stderr
    assert "Set select recompute on at layer 0: feed_forward.experts.mul\n" in log(tmp_path)
    assert "no effect" not in log(tmp_path)
    (receipt,) = receipts(tmp_path)
    assert receipt["settings"][0]["operators"] == ["feed_forward.experts.mul"]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("train_*.yaml")), ids=lambda file: file.name)
def test_the_lines_of_the_guide_are_the_same_with_the_model_known(file: Path) -> None:
    plain, traced = check_file(file, layer_operators), check_described(file, must=True)
    assert traced.ok
    assert traced.model_known
    assert traced.log == plain.log
    if file.name == "train_llama_8b.yaml":  # what it recomputes and what it swaps are different operators
        assert not [text for level, text in traced.log if level == "WARNING"]


def test_a_model_that_the_file_does_not_describe_is_said_to_be_missing(tmp_path: Path) -> None:
    document = {"model": {"model_config": {"num_layers": 2, "seq_length": 8}}, **EXPERTS}
    done = check(tmp_path, document, "--trace")
    assert done.returncode == 1
    assert "model.model_config has no vocab_size" in done.stderr
