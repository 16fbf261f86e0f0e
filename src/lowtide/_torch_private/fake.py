"""Fake tensors: shapes and bytes without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lowtide._torch_private.needed import needed_for

with needed_for("tracing with fake tensors"):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

    _apply: Callable[..., Any] = nn.Module._apply

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "converting_fake_parameters",
    "unset_fake_temporarily",
]


@contextmanager
def converting_fake_parameters() -> Iterator[None]:
    """Let ``module.to(...)`` convert fake parameters inside this context.

    Torch swaps the content of the old and the new tensor, which it refuses where a fake tensor has weak references, as
    some do: PEFT's adapters, for one. Here the new parameter replaces the old one; tied ones stay tied.
    """
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old one too, so that its id is not used again

    def convert(module: nn.Module, change: Callable[[Any], Any], recurse: bool = True) -> Any:
        fake: dict[str, Any] = {name: one for name, one in module._parameters.items() if isinstance(one, FakeTensor)}
        module._parameters.update(dict.fromkeys(fake))
        result = _apply(module, change, recurse)
        for name, old in fake.items():
            if id(old) not in replaced:
                changed = change(old.detach())
                same = changed.dtype == old.dtype and changed.device == old.device
                replaced[id(old)] = old, old if same else nn.Parameter(changed, old.requires_grad)
            module._parameters[name] = replaced[id(old)][1]
        return result

    setattr(nn.Module, "_apply", convert)  # noqa: B010  # a method, to mypy
    try:
        yield
    finally:
        setattr(nn.Module, "_apply", _apply)  # noqa: B010
