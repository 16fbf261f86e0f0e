"""Every private name of torch that lowtide uses; ``tests/test_torch_private.py`` holds each to its word.

[Note: the bottom of the stacks]
Saved-tensor hooks and dispatch modes are stacks, and whoever ends a context takes off what is on top, whoever put it
there. What lasts while other people's code runs, as a step of their own loop does, therefore goes to the bottom
of its stack: contexts that were entered before it may end before it, those that are entered later may end after it, and
each takes off its own. Ours is taken off by name, from wherever it is.

Hooks at the bottom are not asked while there are others: what those hold is theirs. A mode at the bottom sees what all
others make of an operator, right before the kernel.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, compiler
from torch._C import DisableTorchFunction
from torch._C import _accelerator_getAccelerator as current_accelerator
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._dynamo.guards import dict_version, set_is_in_mode_without_ignore_compile_internals
from torch._C._profiler import _RecordFunctionFast as profiler_range
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.library import _scoped_library as scoped_library
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack as function_modes_on
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes_on
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "COLLECTIVE_NAMESPACES",
    "PLAIN",
    "WRITES_UNCOUNTED",
    "AutocastState",
    "DeviceContext",
    "DisableTorchFunction",
    "FakeTensorMode",
    "StorageWeakRef",
    "Subclass",
    "TorchDispatchMode",
    "at_end_of_backward",
    "autocast_contexts",
    "autocast_state",
    "backward_node_number",
    "calling_scaler",
    "compiled_call",
    "count_of_writes",
    "current_accelerator",
    "current_backward",
    "current_dispatch_mode",
    "current_node",
    "dict_version",
    "dispatch_modes",
    "dispatch_modes_on",
    "drop_pipeline_losses",
    "exchange_rows",
    "finish_collective",
    "flattened",
    "forget_unscaling",
    "function_modes",
    "function_modes_on",
    "generator_key",
    "group_name_of",
    "group_named",
    "has_storage",
    "held_indices",
    "hide_dispatch_mode",
    "hooks_on_top",
    "imagined_process_group",
    "in_forward_mode",
    "inner_tensor",
    "insert_dispatch_mode",
    "insert_saved_tensors_hooks",
    "is_any_autocast_enabled",
    "is_cast",
    "is_collective",
    "is_compiled",
    "is_dynamo_compiling",
    "is_own_output",
    "landed_tensor",
    "multiply_all",
    "node_number",
    "node_sequence",
    "norms_of",
    "pop_saved_tensors_hooks",
    "profiler_range",
    "push_saved_tensors_hooks",
    "remove_dispatch_mode",
    "remove_function_mode",
    "remove_saved_tensors_hooks",
    "reset_reducer",
    "reset_sharding",
    "resize_watchers",
    "resolved_operator",
    "scoped_library",
    "set_grad_enabled",
    "storage_bytes",
    "storage_key",
    "storage_of",
    "storage_users",
    "stored_tensor",
    "subclass_wrapper",
    "taken_apart",
    "top_saved_tensors_hooks",
    "tree_leaves",
    "tree_map",
    "under_compilation",
    "unseen_by_modes",
    "version_of",
    "weak_storage",
    "without_graph",
    "written_arguments",
]


top_saved_tensors_hooks: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks that are asked now, if there are any."""

PLAIN = (Tensor, torch.nn.Parameter)
"""The classes of tensors that hold their bytes themselves."""


def inner_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the bytes: of a DTensor its local part, of a plain tensor itself."""
    while type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


class Subclass(NamedTuple):
    """A tensor subclass, such as a DTensor, taken apart."""

    kind: type[Tensor]
    tensors: dict[str, Tensor]
    """The tensors that hold its bytes."""
    rest: dict[str, Any]
    """Its other parts, such as a device mesh."""
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def rebuilt(self, tensors: dict[str, Tensor]) -> Tensor:
        """The same with other tensors."""
        kind: Any = self.kind
        made: Tensor = kind.__tensor_unflatten__(self.rest | tensors, self.context, self.shape, self.stride)
        return made


def taken_apart(tensor: Tensor) -> Subclass | None:
    """A subclass in its parts; None for a tensor that has none.

    The result of a collective that may still be under way is waited for.
    """
    if type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        return None
    if hasattr(tensor, "trigger_wait"):
        tensor.trigger_wait()
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    rest = {name: part for name, part in parts.items() if name not in tensors}
    return Subclass(type(tensor), tensors, rest, context, tensor.shape, tensor.stride())


def landed_tensor(tensor: Tensor) -> Tensor:
    """As :func:`inner_tensor`, for use at once: what a collective is still bringing is waited for."""
    while (whole := taken_apart(tensor)) is not None and whole.tensors:
        tensor = next(iter(whole.tensors.values()))
    return tensor


def subclass_wrapper(tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Makes of a plain tensor what ``tensor`` makes of the one that it holds; None if it is plain itself."""
    whole = taken_apart(tensor)
    if whole is None or len(whole.tensors) != 1:
        return None
    ((name, part),) = whole.tensors.items()
    below = subclass_wrapper(part)
    frame = whole._replace(tensors={})  # the wrapper must not hold the bytes
    return lambda plain: frame.rebuilt({name: plain if below is None else below(plain)})


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, counted where a subclass counts and where its plain tensor does.

    The result of a collective that may still be under way is waited for: until then others may count its writes. What
    was made in inference mode counts nothing, and is always at 0.
    """
    if tensor.is_inference():
        return 0
    version = tensor._version
    while type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        if hasattr(tensor, "trigger_wait"):
            tensor.trigger_wait()
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
        version += tensor._version
    return version


def count_of_writes(tensor: Tensor) -> Tensor:
    """An empty tensor whose version is always that of ``tensor``: it shares the count and holds none of the bytes.

    Of some complex ones, which torch does not let be emptied, it holds them.
    """
    counter = without_graph(tensor)
    with DisableTorchFunction(), suppress(RuntimeError):
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def hooks_on_top(pack: Any) -> bool:
    """Whether the saved-tensor hooks that are asked now are those with this ``pack``; others may have come on top."""
    top = top_saved_tensors_hooks(False)
    return top is not None and top[0] is pack


def insert_saved_tensors_hooks(pack: Any, unpack: Any) -> None:
    """Put hooks below all that are there. See [Note: the bottom of the stacks].

    RuntimeError where hooks are not allowed, as in ``torch.func``'s transforms.
    """
    above: list[tuple[Any, Any]] = []
    try:
        while (top := top_saved_tensors_hooks(True)) is not None:
            pop_saved_tensors_hooks()
            above.append(top)
        push_saved_tensors_hooks(pack, unpack)
    finally:
        for one in reversed(above):
            push_saved_tensors_hooks(*one)


def remove_saved_tensors_hooks(pack: Any) -> None:
    """Take off the hooks with this ``pack``, wherever in the stack they are; nothing if they are not."""
    above: list[tuple[Any, Any]] = []
    try:
        while (top := top_saved_tensors_hooks(True)) is not None:
            pop_saved_tensors_hooks()
            if top[0] is pack:
                break
            above.append(top)
    finally:
        for one in reversed(above):
            push_saved_tensors_hooks(*one)


def insert_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Put a mode below all that are there but torch's own. See [Note: the bottom of the stacks]."""
    _with_modes_lifted(len(dispatch_modes_on()), lambda: torch._C._push_on_torch_dispatch_stack(mode))


def remove_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Take a mode off, wherever in the stack it is; nothing if it is not."""
    modes = dispatch_modes_on()
    if any(one is mode for one in modes):
        above = len(modes) - 1 - max(place for place, one in enumerate(modes) if one is mode)
        _with_modes_lifted(above, lambda: torch._C._pop_torch_dispatch_stack(None))


def remove_function_mode(mode: Any) -> None:
    """Take a function mode off, wherever in the stack it is; nothing if it is not."""
    if any(one is mode for one in function_modes_on()):
        lifted = [torch._C._pop_torch_function_stack()]
        while lifted[-1] is not mode:
            lifted.append(torch._C._pop_torch_function_stack())
        for one in reversed(lifted[:-1]):
            torch._C._push_on_torch_function_stack(one)


def hide_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Take a mode off for the rest of the node that backward runs on this thread; torch restores it for the next.

    Other threads' modes are not touched, nor what torch notes of modes for all threads.
    """
    modes = dispatch_modes_on()
    if any(one is mode for one in modes):
        lifted = [torch._C._pop_torch_dispatch_stack(None)]
        while lifted[-1] is not mode:
            lifted.append(torch._C._pop_torch_dispatch_stack(None))
        for one in reversed(lifted[:-1]):
            torch._C._push_on_torch_dispatch_stack(one)


def _with_modes_lifted(most: int, change: Callable[[], Any]) -> None:
    """Change the stack under up to so many of its uppermost modes; torch's own have places apart, below all others."""
    lifted: list[TorchDispatchMode] = []
    try:
        while len(lifted) < most and not hasattr(current_dispatch_mode(), "_mode_key"):
            lifted.append(torch._C._pop_torch_dispatch_stack(None))
        change()
    finally:
        for one in reversed(lifted):
            torch._C._push_on_torch_dispatch_stack(one)
        _count_modes()


def _count_modes() -> None:
    """Correct what torch notes of the modes: whether there are any, and in each what was so when it was entered."""
    any_mode = any_user = any_compiling = False
    for mode in dispatch_modes_on():
        for name, value in (
            ("old_dispatch_mode_flags", any_mode),
            ("old_non_infra_dispatch_mode_flags", any_user),
            ("old_without_ignore_compile_internals_dispatch_mode_flags", any_compiling),
        ):
            flags: Any = getattr(mode, name, ())
            if len(flags) == 1:  # entered once, as modes are
                flags[0] = value
        any_mode = True
        any_user |= not mode.is_infra_mode()
        any_compiling |= not mode.ignore_compile_internals()
    python_dispatch._is_in_torch_dispatch_mode = any_mode
    python_dispatch._is_in_non_infra_torch_dispatch_mode = any_user
    python_dispatch._is_in_any_mode_without_ignore_compile_internals = any_compiling
    set_is_in_mode_without_ignore_compile_internals(any_compiling)


Resize: TypeAlias = Callable[[Any, int], Any]
"""Resizes a storage."""
AroundResize: TypeAlias = Callable[[Resize, Any, int], Any]
"""Given how a storage would be resized, the storage and its new size, resizes it."""


class _ResizeWatchers:
    """Whoever wants to know of storages that are resized, which is no kernel and seen by no mode.

    The method is replaced while there is anybody: one replacement for all, since they do not end in order.
    """

    def __init__(self) -> None:
        self.watchers: list[AroundResize] = []
        self.plain: Resize = torch.UntypedStorage.resize_
        watchers = self.watchers

        def resize_(storage: Any, size: int) -> Any:
            call = self.plain
            for around in watchers:
                call = partial(around, call)
            return call(storage, size)

        self.replaced = resize_

    def add(self, around: AroundResize) -> None:
        """From now on ``around`` resizes storages."""
        if not self.watchers and torch.UntypedStorage.resize_ is not self.replaced:
            self.plain = torch.UntypedStorage.resize_
            torch.UntypedStorage.resize_ = self.replaced  # type: ignore[method-assign, assignment]
        self.watchers.append(around)

    def remove(self, around: AroundResize) -> None:
        """No longer; nothing if it did not."""
        self.watchers[:] = [one for one in self.watchers if one != around]
        if not self.watchers and torch.UntypedStorage.resize_ is self.replaced:
            torch.UntypedStorage.resize_ = self.plain  # type: ignore[method-assign, assignment]


resize_watchers = _ResizeWatchers()


def forget_unscaling(scalers: Iterable[torch.amp.GradScaler], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let GradScalers forget that they have unscaled gradients in these optimizers' step, which is begun anew."""
    keys = [id(optimizer) for optimizer in optimizers]
    for scaler in scalers:
        if scaler.is_enabled():
            for key in keys:
                scaler._per_optimizer_states.pop(key, None)


def generator_key(generator: torch.Generator) -> int:
    """The address of a random generator: a kernel's arguments are seen as other objects of the same."""
    address: int = generator._cdata  # type: ignore[attr-defined]
    return address


def calling_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler that this is called by, through whatever is between; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, torch.amp.GradScaler):
                return scaler
        frame = frame.f_back
    return None


def is_cast(tensor: Tensor, source: Tensor) -> bool:
    """Whether a tensor, or what it is a view of, is known to autograd as a cast of another, whatever its shape."""
    node = (tensor if tensor._base is None else tensor._base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return _before_views(node.next_functions[0][0]) is _before_views(source.grad_fn)


def _before_views(node: Any) -> Any:
    """The node that made what views, which keep the numbers and their order, see in another shape."""
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"):
        node = node.next_functions[0][0]
    return node


COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"}
)
"""The namespaces of operators that ranks take part in together."""


def is_collective(function: Any) -> bool:
    """Whether a torch function is one of the functional collectives, which give back what is still under way."""
    if not str(getattr(function, "__module__", "")).startswith("torch._ops._c10d_functional"):
        return False
    return function.__name__.split(".")[0] not in ("wait_tensor", "_wrap_tensor_autograd")


def group_name_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The name of the group that a functional collective was called for: its last argument."""
    name = kwargs.get("group_name", args[-1] if args else None)
    return name if isinstance(name, str) else None


def finish_collective(result: Any) -> Any:
    """What a functional collective gave, waited for."""
    wait = torch.ops._c10d_functional.wait_tensor
    return tree_map(lambda value: wait(value) if isinstance(value, Tensor) else value, result)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` was asked for this very module, from outside or in place."""
    return _from_outside(module) or module._compiled_call_impl is not None


def compiled_call(module: torch.nn.Module) -> str:
    """The attribute that holds what runs outside the compiled function of a module."""
    in_place = not _from_outside(module) and module._compiled_call_impl is not None
    return "_compiled_call_impl" if in_place else "forward"


def _from_outside(module: torch.nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported before something is compiled; it takes long
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def under_compilation() -> bool:
    """Whether this is being traced by ``torch.compile``, or runs where it would have been."""
    # What `torch.compiler.is_compiling` asks beside is for TorchScript, and takes microseconds of every layer.
    return is_dynamo_compiling() or compiler._is_compiling_flag or get_eval_frame_callback() is not None


def without_graph(tensor: Tensor) -> Tensor:
    """The tensor without the graph that made it, unseen by function modes.

    A node that saves its own output through hooks must not hold the output itself: the output holds the node, and if
    the graph is dropped instead of being run, nothing finds that circle.
    """
    if type(tensor) is Tensor and not function_modes():
        return tensor.detach()
    with DisableTorchFunction():
        return tensor.detach()


def unseen_by_modes() -> AbstractContextManager[None]:
    """What is done inside to plain tensors is not shown to dispatch modes, each of which takes microseconds."""
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_MODES)
    return guard


_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python).add(torch._C.DispatchKey.PythonTLSSnapshot)


def node_sequence(node: Any) -> int:
    """The number of a node of autograd's graph; those that a thread made later have higher ones."""
    number: int = node._sequence_nr()
    return number


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""A number for the backward that runs on this thread; -1 if none does."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that is running is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_forward_mode() -> bool:
    """Whether tangents are computed now, by ``torch.func.jvp`` or by a dual level."""
    return forward_ad._current_level >= 0


def is_own_output(tensor: Tensor) -> bool:
    """Whether ``tensor``, which is just being saved, is saved by the very node that made it."""
    node: Any = tensor.grad_fn
    return node is not None and node_sequence(node) == node_number() - 1


node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of autograd's graph gets on this thread."""


def backward_node_number() -> int:
    """The number of the node that backward is running on this thread; -1 if it runs none."""
    node: Any = torch._C._current_autograd_node()
    return -1 if node is None else node_sequence(node)


def current_node() -> Any:
    """The node that backward is running on this thread, until what it gave has been added to what was there."""
    return torch._C._current_autograd_node()


def storage_key(tensor: Tensor) -> int:
    """The address of the tensor's storage object: equal for views, unique while the storage lives."""
    key: int = storage_of(tensor)._cdata
    return key


def storage_bytes(tensor: Tensor) -> int:
    """The size of the tensor's whole storage on this rank."""
    return storage_of(tensor).nbytes()


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Where a tensor's values are; of a sparse one, without its indices."""
    try:
        return inner_tensor(tensor).untyped_storage()
    except NotImplementedError:
        return stored_tensor(tensor).untyped_storage()


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has its values in one storage of its own: not those of sparse layouts, nor those inside vmap."""
    try:
        inner_tensor(tensor).untyped_storage()
    except NotImplementedError:
        return False
    return True


def stored_tensor(tensor: Tensor) -> Tensor:
    """The tensor that has the values of one that has no storage itself: sparse, or wrapped by vmap, jvp or grad."""
    with DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        elif tensor.layout is not torch.strided:
            tensor = tensor.values()
        return inner_tensor(tensor)


def storage_users(tensor: Tensor) -> int:
    """How many tensors see the storage of a plain tensor."""
    storage = tensor.untyped_storage()  # the object that stands for it in Python holds it once as well
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to the tensor's storage."""
    return StorageWeakRef(storage_of(tensor))


WRITES_UNCOUNTED = {
    "aten::cudnn_batch_norm": slice(3, 5),
    "aten::miopen_batch_norm": slice(3, 5),
    "aten::native_batch_norm": slice(3, 5),
    "aten::batch_norm_gather_stats_with_counts": slice(3, 5),
    "aten::batch_norm_gather_stats": slice(3, 5),
    "aten::batch_norm_update_stats": slice(1, 3),
}
"""Kernels that change their running statistics, which are these arguments: neither their schemas nor versions tell."""


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a kernel writes into, by its schema or by :data:`WRITES_UNCOUNTED`."""
    arguments = func._schema.arguments
    given = [*args, *([None] * (len(arguments) - len(args)))]
    uncounted = WRITES_UNCOUNTED.get(func._schema.name)
    if uncounted is not None:
        values = {argument.name: value for argument, value in zip(arguments, given, strict=False)} | kwargs
        running = [argument.name for argument in arguments[uncounted]]
        written = [values[name] for name in running if values[name] is not None]
        return written if values.get("training", True) else []
    return [
        kwargs.get(argument.name, value)
        for argument, value in zip(arguments, given, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def resolved_operator(kind: str, args: list[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The operator that a name such as ``aten::add`` means with these arguments; AttributeError if there is none.

    Finding it once is more than convenience: for each overload that does not fit, torch writes the arguments out.
    """
    space, _, name = kind.partition("::")
    overload = torch._C._jit_resolve_packet(kind, *args, **kwargs)
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
    return found


AutocastState: TypeAlias = tuple[tuple[str, torch.dtype | None], ...]
"""For each kind of device what autocast casts to, None where it is off; empty if it is off everywhere."""


def autocast_state() -> AutocastState:
    """How autocast is set now."""
    kinds = _device_kinds()
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
            return tuple((kind, dtype(kind) if enabled(kind) else None) for kind in kinds)
    return ()


def autocast_contexts(state: AutocastState) -> list[AbstractContextManager[None]]:
    """Contexts that set autocast as it was, where that is another way than now.

    Weights that it has cast for others stay as they are, and none are added: a cast that is made without gradients must
    not be found by a forward that wants them.
    """
    now = autocast_state()
    if now == state:
        return []
    was, current = dict(state), dict(now)
    return [
        _casts_left_alone(),
        *(
            torch.autocast(kind, dtype=was.get(kind), enabled=was.get(kind) is not None, cache_enabled=False)
            for kind in _device_kinds()
            if was.get(kind) != current.get(kind)
        ),
    ]


@contextmanager
def _casts_left_alone() -> Iterator[None]:
    """The outermost autocast of a thread throws all threads' cast weights away when it ends: be one further out."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


@cache
def _device_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def group_named(name: str) -> Any:
    """The process group that a functional collective names."""
    return importlib.import_module("torch.distributed.distributed_c10d")._resolve_process_group(name)


@contextmanager
def imagined_process_group(world: int) -> Iterator[None]:
    """A process group of ``world`` ranks of which only this one is there, and in which nothing is sent."""
    dist = torch.distributed
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def flattened(mesh: DeviceMesh, names: tuple[str, ...], name: str) -> DeviceMesh:
    """Some dimensions of a mesh as one, known to the mesh by ``name``."""
    return mesh[names]._flatten(name)


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor in float32, whatever its own type; few kernels for all of them."""
    norms: list[Tensor] = list(torch._foreach_norm(tensors, 2.0, torch.float32))
    return norms


def multiply_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a number on their device; few kernels for all of them."""
    torch._foreach_mul_(tensors, factor)


def held_indices(tensor: Tensor) -> list[Tensor]:
    """For each dimension of a DTensor the places in the whole tensor that this rank holds, in its order.

    Placements are followed as DTensor itself splits, so that shards of shards come out right. A rank outside the mesh
    holds nothing.
    """
    whole: Any = tensor
    coordinate = whole.device_mesh.get_coordinate()
    held = [torch.arange(size if coordinate is not None else 0) for size in whole.shape]
    for axis, placement in enumerate(whole.placements):
        if coordinate is None or not hasattr(placement, "_split_tensor"):
            continue
        dimension = placement.dim % len(held)
        shape = [-1 if one == dimension else 1 for one in range(len(held))]
        parts, _ = placement._split_tensor(
            held[dimension].view(shape), whole.device_mesh.size(axis), with_padding=False, contiguous=False
        )
        held[dimension] = parts[coordinate[axis]].reshape(-1)
    return held


def exchange_rows(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    """Send each rank of a group some of our rows, and give back those that arrived, one rank's after another's.

    The functional collective makes the result itself, so that whoever watches kernels sees who wrote it.
    """
    functional = importlib.import_module("torch.distributed._functional_collectives")
    arrived = functional.all_to_all_single(rows, received, sent, group)
    done: Tensor = functional.wait_tensor(arrived)
    return done


def reset_reducer(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Let DDP forget a backward that was broken off; otherwise the next forward is refused."""
    module.reducer._reset_state()


def drop_pipeline_losses(schedule: Any) -> None:
    """Let a pipeline schedule forget the losses of a step that was broken off; they would count for the next one."""
    schedule._internal_losses.clear()


def reset_sharding(module: Any) -> None:
    """Let FSDP forget a step that was broken off; ``module`` is the root that ``fully_shard`` was called on.

    Torch's own ``reset_iter_state`` leaves the gradients of gathered parameters that were not reduced yet; the next
    backward would add to them.
    """
    module.reset_iter_state()
    for state in module._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # gathered before
                    parameter._unsharded_param.grad = None
