"""Documents that share a sample: each is trained as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.models.shape import DecoderShape
from lowtide.train.data.megatron import write
from lowtide.train.data.packing import Packing
from models.shapes import VOCABULARY, built, deepseek, llama
from support.commands import TINY, log, merged, train
from support.layout_cases import MODELS, TENSOR, data
from support.ranks import Ranks
from train import runs

EOD = 0
LENGTHS = (5, 1, 7, 3)
"""Of the documents of one sample, the token at their end included; the last one is cut off by the sample's end."""


@pytest.mark.parametrize(
    "shape",
    [llama(), llama(flash_attention=False, num_key_value_heads=4), deepseek(experts={"auxiliary": 0.0})],
    ids=["fused attention", "attention in parts", "latent attention and experts"],
)
def test_a_document_in_a_sample_gives_what_it_gives_alone(shape: DecoderShape) -> None:
    model = built(shape).eval()
    documents = []
    for number, length in enumerate(LENGTHS):
        one = torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(number))
        if number < len(LENGTHS) - 1:
            one[0, -1] = EOD
        documents.append(one)
    sample = torch.cat(documents, 1)
    packed = model(sample, **Packing(eod=EOD, positions=True, attention=True).arguments(sample))
    alone = torch.cat([model(one) for one in documents], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(sample), alone, rtol=1e-2)


def test_positions_and_attention_may_begin_again_by_themselves() -> None:
    sample = torch.tensor([[4, EOD, EOD, 5, 6], [EOD, 1, 2, 3, EOD]])
    both = Packing(eod=EOD, positions=True, attention=True).arguments(sample)
    assert both["positions"].tolist() == [[0, 1, 0, 0, 1], [0, 0, 1, 2, 3]]
    assert both["documents"].tolist() == [[0, 0, 1, 2, 2], [0, 1, 1, 1, 1]]
    assert list(Packing(eod=EOD, positions=True, attention=False).arguments(sample)) == ["positions"]
    assert list(Packing(eod=EOD, positions=False, attention=True).arguments(sample)) == ["documents"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Short documents, each with its end."""
    random = np.random.default_rng(0)
    prefix = tmp_path_factory.mktemp("documents") / "text"
    write(prefix, [[*random.integers(1, 64, int(random.integers(3, 12))), EOD] for _ in range(400)])
    return str(prefix)


def packed(files: str, **config: Any) -> dict[str, Any]:
    config = {"data_path": [1, files], "eod": EOD, "seed": 1, **config}
    loader = {"type": "BlendedMegatronDatasetDataLoader", "config": config}
    return {"train_dataset": {"data_loader": {"sizes": None, **loader}}}


TWO_TENSOR = {**data(1, 4), **TENSOR, "parallel_config.use_seq_parallel": True}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TWO_TENSOR, id="tensor"),
        pytest.param({**data(1, 4), "parallel_config.context_parallel": 2}, id="context"),
        pytest.param({**TWO_TENSOR, "model.model_config.head_loss": "chunked"}, id="chunked", marks=pytest.mark.slow),
        pytest.param(data(2, 2), id="data", marks=pytest.mark.slow),
    ],
)
def test_sharded_ranks_train_the_same(layout: dict[str, Any], files: str, one: Ranks, ranks: Ranks) -> None:
    settings = {
        "train_dataset": packed(files, reset_attention_mask=True, reset_position_ids=True)["train_dataset"],
        "recompute_config.select_recompute": {"attention\\.flash_attention": True},
    }
    alone = _losses(one, {**data(1, 4), **settings})
    assert _losses(ranks, {**layout, **settings}) == pytest.approx(alone, rel=1e-5)
    whole = {"train_dataset": packed(files)["train_dataset"]}
    assert _losses(one, {**data(1, 4), **whole})[0] != pytest.approx(alone[0], rel=1e-5)


def _losses(where: Ranks, settings: dict[str, Any]) -> list[float]:
    return [record.loss for record in where.run(runs.records_of, MODELS["llama"], settings, 2)[0]]


def test_what_cannot_be_done_is_refused_and_what_can_is_trained(files: str, tmp_path: Path) -> None:
    asked = packed(files, create_compressed_eod_mask=True, reset_position_ids=True)
    done = train(tmp_path, merged(TINY, asked))
    assert done.returncode == 0, done.stderr
    assert "no effect" not in log(tmp_path)
    stages = {"parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2}}
    for more, said in (
        (stages, "later pipeline stages do not see the tokens"),
        ({"train_dataset": {"data_loader": {"config": {"eod": None}}}}, "which token ends a document?"),
        ({"train_dataset": {"data_loader": {"type": "SyntheticDataLoader"}}}, "has no token between documents"),
        (
            {"model": {"model_config": {"num_nextn_predict_layers": 1}}},
            "multi-token prediction goes over whole samples",
        ),
    ):
        done = train(tmp_path, merged(TINY, asked, more), "--dry-run")
        assert done.returncode == 1
        assert said in done.stderr
