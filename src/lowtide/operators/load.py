"""Load a model that a command names, without its weights: from a configuration or from a function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide._torch_private.fake import FakeTensorMode
from lowtide.errors import LowtideError, ModelError
from lowtide.operators.survey import Survey, survey

__all__ = ["LoadedModel", "does_not_run", "load_model", "one_sequence_each", "survey_source"]


class LoadedModel(NamedTuple):
    """A model and what to call it with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[[], Any] | None = None
    """What does one forward and returns the loss, where the user's function gave it."""
    notes: tuple[str, ...] = ()
    """What was assumed."""


def load_model(source: str, *, batch: int = 1, sequence: int = 2048, dtype: torch.dtype | None = None) -> LoadedModel:
    """Make the model that ``source`` names.

    ``source`` is a directory with a Hugging Face ``config.json`` (needs the ``transformers`` extra), or
    ``module:function`` or ``file.py:function``; the function returns a model, or a model with the arguments to call it
    with, or a model with a function that does one forward and returns the loss. Parameters are of ``dtype`` if it is
    given. Call it inside a ``FakeTensorMode`` and no memory is taken.
    """
    if (Path(source) / "config.json").is_file():
        return _from_configuration(source, batch, sequence, dtype)
    name, colon, attribute = source.rpartition(":")
    if not colon:
        raise ModelError(
            f"{source!r} is neither a directory with a config.json nor module:function;"
            " write for example ./llama-8b or my_package.models:build"
        )
    function = getattr(_module(name), attribute, None)
    if not callable(function):
        raise ModelError(f"{name} has no function {attribute!r}")
    try:
        made = function()
    except Exception as error:
        raise ModelError(f"{source}() failed: {type(error).__name__}: {error}") from error
    model, *rest = made if isinstance(made, tuple) else (made,)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{source} returned {type(model).__name__}; expected a torch.nn.Module, or one with arguments")
    if dtype is not None:
        model.to(dtype)
    if rest and callable(rest[0]):
        return LoadedModel(model, (), {}, run=rest[0])
    if not rest:
        return LoadedModel(model, *_inputs(model, batch, sequence))
    args = tuple(rest[0]) if isinstance(rest[0], (tuple, list)) else (rest[0],)
    return LoadedModel(model, args, dict(rest[1]) if len(rest) > 1 else {})


def _from_configuration(source: str, batch: int, sequence: int, dtype: torch.dtype | None) -> LoadedModel:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    except ImportError:
        raise ModelError(
            "reading a Hugging Face configuration needs transformers: pip install lowtide[transformers]"
        ) from None
    config = AutoConfig.from_pretrained(source)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # training keeps no cache of keys and values
    auto = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    chosen = dtype or getattr(config, "dtype", None)
    notes = () if chosen else ("config.json has no dtype: float32 is assumed; --dtype says another",)
    try:
        model = auto.from_config(config, dtype=chosen or torch.float32).train()
    except ValueError as error:
        raise ModelError(f"{source}: {str(error).splitlines()[0]}; give module:function instead") from None
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return LoadedModel(model, (tokens,), {"labels": tokens}, notes=notes)


@contextmanager
def one_sequence_each() -> Iterator[None]:
    """Tell transformers, while a model of it runs with fake tensors, that no row packs several sequences.

    It finds that out from the positions' values, which fake tensors do not have, and would build a mask of
    sequence x sequence numbers where real runs have none.
    """
    masks = sys.modules.get("transformers.masking_utils")
    plain = getattr(masks, "find_packed_sequence_indices", None)
    if plain is None:
        yield
        return
    setattr(masks, "find_packed_sequence_indices", lambda *_, **__: None)  # noqa: B010  # mypy knows no such name
    try:
        yield
    finally:
        setattr(masks, "find_packed_sequence_indices", plain)  # noqa: B010


def _inputs(model: nn.Module, batch: int, sequence: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Token indices, for a model that has an embedding first; anything else has to bring its arguments."""
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        base = getattr(model, "get_base_model", None)  # peft hides the signature
        whole = base() if callable(base) else model
        labelled = "labels" in inspect.signature(whole.forward).parameters
        return (tokens,), {"labels": tokens} if labelled else {}
    names = ", ".join(inspect.signature(model.forward).parameters)
    raise ModelError(f"return the arguments of forward({names}) with the model: return model, (tensor,)")


def _module(name: str) -> Any:
    # As `python -m module` and `python file.py` have it: what the module imports may be next to it.
    home = str(Path(name).resolve().parent) if name.endswith(".py") else str(Path.cwd())
    if home not in sys.path:
        sys.path.insert(0, home)
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ModelError(f"cannot import {name}: {error}") from None
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ModelError(f"there is no file {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def does_not_run(source: str, error: Exception) -> ModelError:
    """The error to raise where a model fails with fake tensors."""
    return ModelError(
        f"{source} does not run with fake tensors: {type(error).__name__}: {str(error).rstrip('.')}.\n"
        "A model whose control flow depends on values cannot. If it is the dtype, give the one you train in:"
        " `lowtide plan --dtype bf16`, or --autocast"
    )


def survey_source(
    source: str,
    *,
    batch: int = 1,
    sequence: int = 2048,
    autocast: torch.dtype | None = None,
    layers: str | None = None,
) -> Survey:
    """Run the model that ``source`` names once with fake tensors, and profile it; ModelError if it does not run."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the error below says it
    with FakeTensorMode(allow_non_fake_inputs=True):
        loaded = load_model(source, batch=batch, sequence=sequence)
        try:
            with one_sequence_each(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                return survey(loaded.model, lambda: loaded.model(*loaded.args, **loaded.kwargs), layers=layers)
        except LowtideError:
            raise
        except Exception as error:
            raise does_not_run(source, error) from error
