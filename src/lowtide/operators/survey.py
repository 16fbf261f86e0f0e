"""Run a model once and know all its layers: which kinds there are, and what each holds for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from lowtide.operators.kinds import LayerKind, layer_kind
from lowtide.operators.layers import Layers, find_layers
from lowtide.operators.observe import observe
from lowtide.policy import Catalogue

__all__ = ["Survey", "survey"]


class Survey(NamedTuple):
    """The layers of a model and their kinds."""

    layers: Layers
    kinds: tuple[LayerKind, ...]
    """The distinct kinds, in the order they appear."""
    kind_of: tuple[int, ...]
    """For each layer, the place of its kind in ``kinds``."""

    @property
    def catalogue(self) -> Catalogue:
        """The operators of every layer, as a Policy is resolved against them."""
        catalogues = [kind.catalogue for kind in self.kinds]
        return Catalogue(tuple(catalogues[kind] for kind in self.kind_of))


def survey(model: nn.Module, run: Callable[[], Any], *, layers: str | None = None) -> Survey:
    """Watch every layer of ``model`` during one ``run()`` of it.

    ``layers`` names the module that holds the layers, if the longest run of equal children is not it.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.SiLU()) for _ in range(3)))
    >>> found = survey(model, lambda: model(torch.ones(2, 4, requires_grad=True)))
    >>> len(found.kinds), [operator.name for operator in found.kinds[0].operators]
    (1, ['0', '1'])
    """
    found = find_layers(model, layers)
    contexts = [observe(module) for module in found.modules]
    results = [context.__enter__() for context in contexts]
    try:
        run()
    finally:
        for context in reversed(contexts):
            context.__exit__(None, None, None)
    kinds: dict[str, LayerKind] = {}
    kind_of: list[int] = []
    for module, result in zip(found.modules, results, strict=True):
        kind = layer_kind(module, result())
        kinds.setdefault(kind.digest, kind)
        kind_of.append(list(kinds).index(kind.digest))
    return Survey(found, tuple(kinds.values()), tuple(kind_of))
