"""The operators of the model that a training file describes, which its patterns are matched against.

One layer of each kind is run once with fake tensors, sharded as the file says: that takes no memory, and the operators
are those that the run will have. The result is kept in a file, named by a digest of all that it depends on, so that the
next ``lowtide check --trace`` of the same model, and each rank of a run, read it without importing torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lowtide.config.check import check_file
from lowtide.errors import ModelError
from lowtide.models.shape import DecoderShape, shape_of
from lowtide.operators.names import layer_operators
from lowtide.policy import Catalogue, Operator, Policy
from lowtide.train.run import Degrees, read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lowtide.config.check import Check

__all__ = ["check_described", "described_operators", "operators_of_shape"]

TOKENS = 16
"""Tokens of the sample that is run, on each tensor-parallel rank; which operators there are does not depend on it."""


class Kinds(NamedTuple):
    """The operators of each kind of layer, and the kind of each layer."""

    kinds: tuple[tuple[Operator, ...], ...]
    kind_of: tuple[int, ...]

    @property
    def catalogue(self) -> Catalogue:
        """The operators of every layer; layers of one kind share one tuple, so that they are resolved once."""
        return Catalogue(tuple(self.kinds[kind] for kind in self.kind_of))


def check_described(
    file: str | Path, overrides: Mapping[tuple[str | int, ...], Any] | None = None, *, must: bool = False
) -> Check:
    """Read a training file, with its patterns matched against the operators of the model that it describes.

    A file without patterns is not traced, unless it ``must`` be. A model that does not run with fake tensors is an
    error then, and otherwise a warning: the first step of a run matches the patterns too.
    """
    check = check_file(file, layer_operators, overrides)
    if not check.ok or not (must or _has_patterns(check.policy)):
        return check
    try:
        operators = described_operators(check)
    except ModelError as error:
        if must:
            raise
        check.problems.warn((), f"patterns are not matched before the first step: {error}")
        return check
    return check_file(file, layer_operators, overrides, model=operators)


def _has_patterns(policy: Policy | None) -> bool:
    """Whether a Policy names operators, so that it matters which ones there are."""
    return policy is not None and any(layer.rules or layer.collectives for layer in policy.layers)


def described_operators(check: Check) -> Catalogue:
    """The operators of every layer of the model that a checked file describes, multi-token-prediction layers last.

    ConfigError or ModelError if the file does not describe a model, or one that cannot be built.
    """
    settings = check.settings
    assert settings is not None
    run = read_run(check)
    directory = settings.top_level.pretrained_model_dir
    if directory:
        config = Path(directory) / "config.json"
        digest = [config.read_text(encoding="utf-8") if config.is_file() else "", _version("transformers")]
        return _cached(digest, lambda: _surveyed(directory)).catalogue
    return operators_of_shape(shape_of(settings), run.degrees, samples=run.batch_size)


def operators_of_shape(shape: DecoderShape, degrees: Degrees, *, samples: int = 2) -> Catalogue:
    """The operators of every layer of one of lowtide's own models, sharded by ``degrees``.

    With one sample in a micro-batch torch gathers a sharded sequence without a further copy.
    """
    samples = min(samples, 2)
    kind_of = tuple(int(not shape.is_dense(layer)) for layer in range(shape.num_layers + shape.prediction_layers))
    present = sorted(set(kind_of))
    shape = _plain(shape)
    sharded = Degrees(
        shard=degrees.expert,
        expert=degrees.expert,
        tensor=degrees.tensor,
        sequence_parallel=degrees.sequence_parallel,
    )
    parts = [repr(shape), repr(present), repr(sharded), str(samples)]
    found = _cached(parts, lambda: _traced(shape, present, sharded, samples))
    return Kinds(found.kinds, tuple(present.index(kind) for kind in kind_of)).catalogue


def _plain(shape: DecoderShape) -> DecoderShape:
    """The same operators without what fake tensors cannot do: dropping slots by their values, trying kernels."""
    experts = replace(shape.experts, capacity=None, grouped=None, first_dense=1) if shape.experts is not None else None
    return replace(
        shape,
        num_layers=2,
        experts=experts,
        max_position_embeddings=TOKENS,
        fused_rope=False,  # rotary positions are one operator, whichever kernel computes them
        prediction_layers=0,
        tie_word_embeddings=False,
        vocab_size=shape.num_attention_heads * 16,  # the head may be sharded
    )


def _traced(shape: DecoderShape, present: list[int], degrees: Degrees, samples: int) -> Kinds:
    """One layer of each kind in ``present`` (0 is dense, 1 has experts), run once with fake tensors."""
    import torch

    from lowtide._torch_private.fake import FakeTensorMode
    from lowtide._torch_private.training.meshes import imagined_process_group
    from lowtide.models.build import build_model
    from lowtide.models.feed_forward import FusedSwiGLU
    from lowtide.models.kernels import eager_swiglu
    from lowtide.operators.load import does_not_run
    from lowtide.operators.survey import survey
    from lowtide.train.mesh import make_meshes
    from lowtide.train.parallel import apply_expert_parallel, apply_tensor_parallel
    from lowtide.train.traced import TracedRank, balance_experts

    length = TOKENS * degrees.tensor
    shape = replace(shape, max_position_embeddings=length)
    with imagined_process_group(degrees.world):
        try:
            meshes = make_meshes(degrees, torch.device("cpu"))
            with torch.device("meta"):
                model = build_model(shape, layers=present)
            model.to(torch.bfloat16)  # fake tensors know the grouped product in this type only
            apply_tensor_parallel(model, TracedRank(shape=shape, degrees=degrees), meshes)
            apply_expert_parallel(model, meshes)
            balance_experts(model)
            for module in model.modules():
                if isinstance(module, FusedSwiGLU):
                    module.forward = eager_swiglu  # type: ignore[method-assign]  # one operator, whichever kernel
            with FakeTensorMode(allow_non_fake_inputs=True):
                model.to_empty(device="cpu")
                tokens = torch.zeros(samples, length, dtype=torch.long)
                found = survey(model, lambda: model(tokens), layers="layers")
        except Exception as error:
            raise does_not_run("the model that the file describes", error) from error
        finally:
            make_meshes.cache_clear()
    return Kinds(tuple(found.kinds[kind].catalogue for kind in found.kind_of), tuple(range(len(present))))


def _surveyed(directory: str) -> Kinds:
    """A model of transformers, run once with fake tensors."""
    from lowtide.operators.load import survey_source

    found = survey_source(directory, sequence=TOKENS)
    return Kinds(tuple(kind.catalogue for kind in found.kinds), found.kind_of)


def _cached(parts: list[str], make: Callable[[], Kinds]) -> Kinds:
    """What ``make`` gives, or gave before for the same ``parts`` with the same code."""
    digest = hashlib.sha256("\n".join([*parts, _code(), _version("torch")]).encode()).hexdigest()[:24]
    file = _directory() / f"{digest}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged: made again
        return _from_json(json.loads(file.read_text(encoding="utf-8")))
    found = make()
    with contextlib.suppress(OSError):  # a home that cannot be written to is no reason to fail
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(_as_json(found)), encoding="utf-8")
        draft.replace(file)
    return found


def _directory() -> Path:
    """Where results are kept: ``lowtide/operators`` in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "lowtide" / "operators"


def _code() -> str:
    """A digest of the code that decides which operators there are."""
    root = Path(__file__).parents[1]
    whole = hashlib.sha256()
    for folder in ("models", "operators"):
        for file in sorted((root / folder).glob("*.py")):
            whole.update(file.read_bytes())
    whole.update((root / "train" / "parallel.py").read_bytes())
    return whole.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _as_json(found: Kinds) -> dict[str, Any]:
    kinds = [[[one.name, list(one.consumers), list(one.aliases)] for one in kind] for kind in found.kinds]
    return {"kinds": kinds, "kind_of": list(found.kind_of)}


def _from_json(value: dict[str, Any]) -> Kinds:
    kinds = tuple(
        tuple(Operator(name, tuple(consumers), tuple(aliases)) for name, consumers, aliases in kind)
        for kind in value["kinds"]
    )
    return Kinds(kinds, tuple(int(kind) for kind in value["kind_of"]))
