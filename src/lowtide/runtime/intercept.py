"""Intercept single calls inside a layer: those of some leaf modules, and of some functions in some modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.overrides import TorchFunctionMode

from lowtide.operators.calls import Site
from lowtide.operators.wrappers import Function, Wrappers

if TYPE_CHECKING:
    from lowtide.runtime.run import CapturingRun

__all__ = ["intercept"]


def intercept(
    layer: nn.Module,
    sites: Mapping[str, tuple[Site, ...]],
    running: Callable[[], CapturingRun | None],
    wrappers: Wrappers,
) -> None:
    """Send the calls at ``sites`` through the run that ``running()`` returns, while it returns one."""
    modules: dict[str, list[str]] = {}
    functions: dict[str, dict[Any, dict[int, str]]] = {}
    for name, calls in sites.items():
        for site in calls:
            if site.function is None:
                modules.setdefault(site.module, []).append(name)
            else:
                functions.setdefault(site.module, {}).setdefault(site.function, {})[site.turn] = name
    for path, names in modules.items():
        module = layer.get_submodule(path)
        wrappers.wrap(module, partial(_module_call, module=module, names=names, running=running))
    for path, wanted in functions.items():
        wrappers.wrap(layer.get_submodule(path), partial(_functions, wanted=wanted, running=running))


def _module_call(
    forward: Function, module: nn.Module, names: list[str], running: Callable[[], CapturingRun | None]
) -> Function:
    """A leaf module's forward; its k-th call in a run of the layer is the k-th name."""
    if len(set(names)) == 1:
        name = names[0]

        def once(*args: Any, **kwargs: Any) -> Any:
            runner = running()
            return forward(*args, **kwargs) if runner is None else runner.call(name, forward, args, kwargs, module)

        return once

    def several(*args: Any, **kwargs: Any) -> Any:
        runner = running()
        if runner is None:
            return forward(*args, **kwargs)
        turn = runner.turns.get(several, 0)
        runner.turns[several] = turn + 1
        return runner.call(names[min(turn, len(names) - 1)], forward, args, kwargs, module)

    return several


def _functions(
    forward: Function, wanted: dict[Any, dict[int, str]], running: Callable[[], CapturingRun | None]
) -> Function:
    """A module's forward in which some functions are intercepted."""

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        runner = running()
        if runner is None:
            return forward(*args, **kwargs)
        with _Functions(wanted, runner):
            return forward(*args, **kwargs)

    return intercepted


class _Functions(TorchFunctionMode):
    """Sees every torch function; all but a few pass through."""

    def __init__(self, wanted: dict[Any, dict[int, str]], runner: CapturingRun) -> None:
        super().__init__()
        self.wanted, self.runner = wanted, runner
        self.turns: dict[Any, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = self.wanted.get(func)
        if names is not None:
            turn = self.turns.get(func, 0)
            self.turns[func] = turn + 1
            name = names.get(turn)
            if name is not None:
                return self.runner.call(name, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)
