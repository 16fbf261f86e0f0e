"""What ``torch.compile`` makes of a function: Dynamo's graph while it is traced, and the split of its joint graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from lowtide._torch_private.needed import needed_for

if TYPE_CHECKING:
    from torch import nn
    from torch.fx import Graph, GraphModule

__all__ = [
    "CUSTOM",
    "Backend",
    "JointGraph",
    "Partitioner",
    "call_while_traced",
    "compiled_alike",
    "drop_guards",
    "graph_of",
    "joint_graph",
    "key_of",
    "partitioned_by",
    "through_dynamo",
    "without_graph_cache",
    "wrap_backend",
]

Backend: TypeAlias = Callable[..., Any]
"""Compiles a graph of Dynamo's."""

Partitioner: TypeAlias = Callable[..., tuple[Any, Any]]
"""Splits a joint graph into those of forward and backward."""

CUSTOM = "custom"
"""The entry of a node's ``meta`` that torch copies from Dynamo's graph to all that is made of it."""


def graph_of(context: Any) -> Graph:
    """The graph that is being traced."""
    found: Graph = context.graph()
    return found


def call_while_traced(function: Callable[[Any], None], key: str) -> str:
    """Have Dynamo, which traces this, call ``function(context)``; nothing of it is in what is compiled."""
    from torch._dynamo.comptime import comptime  # not through `torch`, which the model may use: see drop_guards

    comptime(function)
    return key  # a variable that is not used any more would not be there for `key_of`


def drop_guards(context: Any, namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Forget the guards of these names of a module of lowtide, and of what :func:`call_while_traced` reads."""
    with needed_for("deciding operators in compiled models"):
        from torch._dynamo.source import GlobalSource

        output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
        remove = output.guards.remove_guards_with_source
    for module in (namespace["__name__"], __name__, "torch._dynamo.comptime"):
        remove(GlobalSource(f"__import_{module.replace('.', '_dot_')}"))
    if output.global_scope is namespace:  # the module's own function is what is compiled
        for name in names:
            remove(GlobalSource(name))


def key_of(context: Any) -> str:
    """The key that ``call_while_traced`` was given, for which there is a guard: another key is another graph."""
    key: str = context.get_local("key").as_python_constant()
    return key


def through_dynamo(error: Exception) -> Exception:
    """The same error in a form that Dynamo does not wrap in one of its own, while it traces or compiles."""
    with needed_for("deciding operators in compiled models"):
        from torch._dynamo.exc import ShortenTraceback
    kind = type(error)
    passing = type(kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__})
    found: Exception = passing.__new__(passing, *error.args)
    found.first_useful_frame = None  # type: ignore[attr-defined]
    return found


def wrap_backend(context: Any, wrap: Callable[[Backend], Backend]) -> None:
    """Have the graph that is being traced compiled by ``wrap(backend)``, unless it is already."""
    with needed_for("deciding operators in compiled models"):
        output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
        backend = output.compiler_fn
    if not getattr(backend, "lowtide", False):
        wrapped = wrap(backend)
        wrapped.lowtide = True  # type: ignore[attr-defined]
        wrapped.__name__ = getattr(backend, "__name__", type(backend).__name__)
        output.compiler_fn = wrapped


@contextmanager
def partitioned_by(wrap: Callable[[Partitioner], Partitioner]) -> Iterator[None]:
    """Joint graphs that are compiled inside are split by ``wrap(partitioner)``."""
    with needed_for("deciding operators in compiled models"):
        from torch._dynamo.backends import common
        from torch._functorch.partitioners import default_partition

        plain = common.aot_module_simplified  # type: ignore[attr-defined]

    def simplified(*args: Any, **kwargs: Any) -> Any:
        kwargs["partition_fn"] = wrap(kwargs.get("partition_fn") or default_partition)
        return plain(*args, **kwargs)

    common.aot_module_simplified = simplified  # type: ignore[attr-defined]
    try:
        yield
    finally:
        common.aot_module_simplified = plain  # type: ignore[attr-defined]


@contextmanager
def without_graph_cache() -> Iterator[None]:
    """Joint graphs that are compiled inside are not looked up in torch's cache of them, and not put there.

    Its key does not have what is decided: a graph from it would carry out another Policy.
    """
    with needed_for("deciding operators in compiled models"):
        from torch._functorch import config

        patched = config.patch(enable_autograd_cache=False)
    with patched:
        yield


Result = TypeVar("Result")


class JointGraph(NamedTuple):
    """A joint graph before it is split."""

    module: GraphModule
    inputs: tuple[Any, ...]
    """What the compiled function was called with, in the order of the graph's first placeholders."""
    outputs: int
    """How many outputs of the graph are forward's."""
    split: Callable[[GraphModule], tuple[GraphModule, GraphModule]]
    """What the backend splits such a graph with; it changes the one that it is given."""
    fuses: bool
    """Whether the backend makes one kernel of several operations."""


def joint_graph(call: Callable[[], Any], read: Callable[[JointGraph], Result]) -> Result | None:
    """What ``read`` makes of the joint graph of the first function that ``call`` compiles, which ends there.

    None if none is reached, as where nothing needs gradients. Sizes are those of this call, not symbols. A graph can
    only be split while it is read.
    """
    with needed_for("the joint graphs of compiled layers"):
        from torch._dynamo import config
        from torch._dynamo.backends import common

        module: Any = common
        plain = module.aot_module_simplified
    found: list[Result] = []
    errors: list[Exception] = []

    def simplified(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        partitioner = kwargs["partition_fn"]

        def take(joint: GraphModule, joint_inputs: Any, **settings: Any) -> NoReturn:
            split = partial(_split, partitioner, joint_inputs, settings)
            inner = partitioner.args[0] if isinstance(partitioner, partial) else partitioner
            fuses = not getattr(inner, "__module__", "").startswith("torch._functorch")
            try:
                found.append(read(JointGraph(joint, tuple(inputs), settings["num_fwd_outputs"], split, fuses)))
            except Exception as error:  # Dynamo would wrap it
                errors.append(error)
            raise through_dynamo(_FoundError())

        return plain(graph, inputs, *args, **{**kwargs, "partition_fn": take})

    module.aot_module_simplified = simplified
    try:
        with config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True, suppress_errors=False):
            call()
    except _FoundError:
        pass
    finally:
        module.aot_module_simplified = plain
    if errors:
        raise errors[0]
    return found[0] if found else None


class _FoundError(Exception):
    """Ends a compilation."""


def _split(partitioner: Partitioner, inputs: Any, settings: dict[str, Any], joint: GraphModule) -> tuple[Any, Any]:
    return partitioner(joint, inputs, **settings)


def compiled_alike(model: nn.Module, layer: nn.Module) -> Callable[..., Any]:
    """``layer`` compiled with the backend of ``model``, which ``torch.compile`` has made of another; by Inductor where
    it has not."""
    import torch

    context = getattr(model, "dynamo_ctx", None)
    compiled: Callable[..., Any] = torch.compile(layer) if context is None else context(layer)
    return compiled
