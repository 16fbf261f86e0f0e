"""Find the layers of a model: the blocks that it has several of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from lowtide.errors import ModelError

__all__ = ["Layers", "check_module", "find_layers", "other_stacks"]


class Layers(NamedTuple):
    """The layers of a model, in order."""

    path: str
    """The path of the module that holds them: ``model.layers``."""
    names: tuple[str, ...]
    """Each layer's full name: ``model.layers.0``."""
    modules: tuple[nn.Module, ...]
    """The layers themselves."""


def check_module(model: object, verb: str) -> None:
    """ModelError that says what to pass, if ``model`` is no module."""
    if isinstance(model, nn.Module):
        return
    inner = next((name for name in ("model", "module") if isinstance(getattr(model, name, None), nn.Module)), None)
    instead = f": pass its .{inner}" if inner is not None else ""
    raise ModelError(f"{verb}() takes a torch.nn.Module; found {type(model).__name__}{instead}")


def find_layers(model: nn.Module, path: str | None = None) -> Layers:
    """The longest run of children of one class, or the children of the module at ``path``.

    Of two runs as long as each other, the one with more parameters is taken.

    >>> find_layers(nn.Sequential(nn.Embedding(8, 4), *(nn.TransformerEncoderLayer(4, 1) for _ in range(3)))).names
    ('1', '2', '3')
    """
    if path is not None:
        try:
            parent = model.get_submodule(path)
        except AttributeError:
            known = ", ".join(name for name, module in model.named_modules() if name and list(module.children()))
            raise ModelError(f"the model has no module {path!r}; modules with children: {known[:400]}") from None
        children = list(parent.named_children())
        if not children:
            raise ModelError(f"the module {path!r} has no children to take as layers")
        return _layers(path, children)
    runs = [run for name, module in model.named_modules() for run in _runs(name, module)]
    if not runs:
        raise ModelError(
            "no two neighbouring children of any module are of one class with children of their own:"
            " name the module that holds the layers, as in layers='encoder.blocks'"
        )
    return max(runs, key=lambda run: (len(run.modules), _parameters(run)))


def other_stacks(model: nn.Module, found: Layers) -> tuple[Layers, ...]:
    """The runs of layers that are not ``found``: an encoder's, where the decoder's are. None is inside a layer of
    another, and what holds or is inside a layer of ``found`` is none.

    >>> model = nn.Transformer(8, 1, 2, 2, 8)
    >>> [stack.path for stack in other_stacks(model, find_layers(model))]
    ['encoder.layers']
    """
    runs = [run for name, module in model.named_modules() for run in _runs(name, module)]
    runs.sort(key=lambda run: (-len(run.modules), -_parameters(run)))
    others: list[Layers] = []
    taken = list(found.names)
    for run in runs:
        if not any(_within(name, other) or _within(other, name) for name in run.names for other in taken):
            others.append(run)
            taken += run.names
    return tuple(others)


def _within(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def _runs(path: str, parent: nn.Module) -> Iterator[Layers]:
    """The runs of at least two neighbouring children of one class that have children themselves."""
    run: list[tuple[str, nn.Module]] = []
    for name, child in parent.named_children():
        if run and type(child) is not type(run[-1][1]):
            if len(run) > 1:
                yield _layers(path, run)
            run = []
        container = isinstance(child, (nn.ModuleList, nn.ModuleDict))  # these cannot be called
        if next(child.children(), None) is not None and not container:
            run.append((name, child))
    if len(run) > 1:
        yield _layers(path, run)


def _layers(path: str, children: list[tuple[str, nn.Module]]) -> Layers:
    prefix = f"{path}." if path else ""
    return Layers(path, tuple(prefix + name for name, _ in children), tuple(child for _, child in children))


def _parameters(layers: Layers) -> int:
    return sum(parameter.numel() for module in layers.modules for parameter in module.parameters())
