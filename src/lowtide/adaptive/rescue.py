"""Come through when memory runs out.

[Note: three lines of defence]
1. A watermark: where a layer begins with more allocated than that, the oldest saved tensors leave before it runs.
2. An operator that fails for want of memory, in forward, in backward or in the optimizer: tensors leave, and it runs
   again. See [Note: saved storages], [Note: repeating an operator] and [Note: paging].
3. The step is begun anew: generators, buffers and gradients are set back, and the first two lines are armed.

The first two need handles around every saved tensor and a dispatch mode around every kernel, which costs some
microseconds each. Disarmed there is neither, and an error goes straight to the third line. Only the optimizer's step,
which has few kernels, is watched in any case.

Ranks that work together must not repeat a step alone: the order of their collectives would be broken for good. There
the third line is taken by agreement, before the first optimizer steps, where every rank has run the same collectives;
a rank that is disarmed, or that has nothing left to send away, can only fail.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._torch_private.backward import current_backward
from lowtide._torch_private.saved_tensor_hooks import insert_saved_tensors_hooks, remove_saved_tensors_hooks
from lowtide._torch_private.scaler import calling_scaler
from lowtide._torch_private.storages import storage_key
from lowtide.adaptive.counts import Counts
from lowtide.adaptive.offload import SavedStorages
from lowtide.adaptive.paging import Pager
from lowtide.adaptive.repeat import Beginning, Repeat
from lowtide.adaptive.retry import Retry
from lowtide.errors import ModelError, RescueError
from lowtide.operators.calls import tensors_of
from lowtide.operators.layers import find_layers
from lowtide.operators.saved import unpack
from lowtide.operators.wrappers import Hook, take_back
from lowtide.out_of_memory import is_out_of_memory, missing_bytes
from lowtide.runtime.apply import Handle
from lowtide.runtime.randomness import RandomState
from lowtide.units import format_bytes

__all__ = ["ATTEMPTS", "Rescue"]

ATTEMPTS = 4
"""How often a step is begun, at most."""

T = TypeVar("T")


class Rescue:
    """Keeps a model's steps from dying of out-of-memory. See [Note: three lines of defence].

    ``optimizers`` are those that ``step`` uses. ``smallest`` is the size of a storage, in bytes, below which it is not
    worth sending away, and ``multiple`` how many times the missing bytes leave. ``group`` is a process group of all
    ranks that step together, which takes tensors of the host; the default one if there are several ranks. ``layers``
    names the module that holds the layers, where the longest run of equal children is not it.

    ``rescue = Rescue(model, [optimizer])``; ``loss = rescue.run(step)``, where ``step`` runs forward, backward and the
    optimizer and can be called again.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        smallest: int = 1024,
        multiple: float = 1.0,
        group: dist.ProcessGroup | None = None,
        layers: str | None = None,
    ) -> None:
        self.model, self.optimizers, self.group = model, tuple(optimizers), group
        self.ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
        self.counts = Counts()
        self.watermark: int | None = None
        """Bytes allocated on the device above which the oldest leave when a layer begins; None: no such limit."""
        self.armed = False
        self.storages = SavedStorages(smallest, self.counts)
        self.pager = Pager(optimizers, smallest, self.storages.lock, self.counts)
        self._retry = Retry(self, multiple)
        self._hooks = self.storages.pack
        """What is on torch's stack of hooks."""
        self._inside = self._spoilt = self._agreed = False
        self._scalers: WeakSet[torch.amp.GradScaler] = WeakSet()
        """Those that were seen to work for these optimizers."""
        self._drawn: tuple[torch.Generator, ...] = ()
        """Generators of their own that steps draw from."""
        self._foreign = ""
        """An optimizer that stepped and is not one of ours."""
        self._beginning: Beginning | None = None
        self._ceiling: int | None = None
        """A watermark for a step that is begun anew."""
        self._needed = 0
        """What an operator, for which no more room could be made, would have brought the allocated bytes to."""
        self._changing: frozenset[str] | None = None
        self._handles: list[Handle] = []
        try:
            self._layers = find_layers(model, layers).modules
        except ModelError:
            if layers is not None:
                raise
            self._layers = ()  # a watermark has no place to act then
        self._on_layers: list[Any] = []
        self._on_optimizers = [
            hook
            for optimizer in self.optimizers
            for hook in (
                optimizer.register_step_pre_hook(self._before_optimizer),
                optimizer.register_step_post_hook(self._after_optimizer),
                optimizer.register_state_dict_pre_hook(self._before_saving),
            )
        ]
        self._on_model = [model.register_state_dict_pre_hook(Hook(self._before_saving))]  # type: ignore[no-untyped-call]
        for part in model if isinstance(model, nn.ModuleList) else [model]:
            self._on_model.append(part.register_forward_pre_hook(Hook(self._model_begins)))
            self._on_model.append(part.register_forward_hook(Hook(self._model_ends)))

    # What a user calls.

    def run(self, step: Callable[[], T], around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> T:
        """Run a step; where nothing else helps, run it again from its start. ``around`` is around each attempt."""
        beginning = self._beginning = Beginning(self.model, self.optimizers, self._changing, self._drawn)
        self._retry.wrote, self._foreign = False, ""
        watch = register_optimizer_step_pre_hook(self._any_optimizer_steps)
        why = ""
        try:
            for _ in range(ATTEMPTS):
                try:
                    with around(), self._watching():
                        result = step()
                    changed = beginning.changed(compared=self._changing is None)
                    self._changing = (self._changing or frozenset()) | changed
                    if self.armed:
                        self._drawn = tuple(beginning.own[key][0] for key in beginning.drawn)
                    return result
                except (Repeat, RuntimeError) as error:
                    cause = _want_of_memory(error)
                    if cause is None:
                        raise
                    why = str(cause)
                    if not isinstance(cause, Repeat):
                        missing = missing_bytes(cause)
                        self.counts.lack(missing)
                        why = f"{format_bytes(missing)} were missing"
                        if self.ranks > 1:
                            raise RescueError(self._alone(why)) from error
                    del cause  # it holds what the step had made
                self._prepare_to_repeat(beginning, why)
        finally:
            watch.remove()
            self._ceiling = self._beginning = None
        least = f"; at least {format_bytes(self._needed)} are needed, and maybe more further on" if self._needed else ""
        raise RescueError(
            f"a step was begun {ATTEMPTS} times and did not fit into the device's memory: {why}, with everything on the"
            f" host that could leave{least}; make the batch smaller, or share the model among more devices"
        )

    def _alone(self, why: str) -> str:
        """What to say where one of several ranks cannot go on."""
        if self.armed:
            return f"{why} on this rank, nothing was left to send to the host, and a rank cannot repeat a step alone"
        return f"{why} on this rank, and a rank cannot repeat a step alone; call arm() on all ranks before the step"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch over all that runs inside, without the third line of defence: a spoilt step is a RescueError."""
        with self._watching():
            yield

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._inside, self._spoilt, self._agreed = True, False, False
        try:
            self.settle()
            if self.armed:
                known = [*self.model.parameters(), *self.model.buffers()]
                self.storages.static = frozenset(storage_key(one) for one in known)
                self._retry.on()
                insert_saved_tensors_hooks(self._hooks, unpack)
                for layer in self._layers:
                    self._on_layers.append(layer.register_forward_pre_hook(Hook(self._before_layer)))
                for handle in self._handles:  # its hooks are the inner ones
                    handle.manager.keep = self.storages.pack
            yield
            if not self._agreed:  # no optimizer has stepped
                self._agree()
        finally:
            take_back([self.end_step])

    def end_step(self) -> None:
        """Take off what is on for a step; nothing if none runs. An interrupt may have left some of it."""
        for handle in self._handles:
            handle.manager.keep = None
        remove_saved_tensors_hooks(self._hooks)
        take_back(hook.remove for hook in self._on_layers)
        self._on_layers.clear()
        self._inside, self.pager.stepping = False, None
        self.pager.made.clear()
        self.settle()

    def follow(self, handle: Handle) -> None:
        """What a Policy keeps can leave as well."""
        self._handles.append(handle)
        if self._inside and self.armed:
            handle.manager.keep = self.storages.pack

    def unfollow(self, handle: Handle) -> None:
        """The Policy is no longer at work."""
        self._handles.remove(handle)
        handle.manager.keep = None

    def arm(self) -> None:
        """From the next step on, hold what is saved by handles and watch every operator. On all ranks, or on none."""
        self.armed = True

    def disarm(self) -> None:
        """From the next step on, watch only the optimizer."""
        self.armed = False

    def seconds_per_operator(self, calls: int = 100) -> float:
        """What watching an operator costs on the host, tried out here and now; 0 if that cannot be told."""
        if self._inside or self.pager.away:
            return 0.0
        one = torch.empty(1, device="cpu")

        def seconds() -> float:
            begin = perf_counter()
            for _ in range(calls):
                one.detach()
            return (perf_counter() - begin) / calls

        plain = min(seconds() for _ in range(3))
        try:
            self._retry.on()
            watched = min(seconds() for _ in range(3))
        finally:
            self._retry.off()
        return max(0.0, watched - plain)

    def settle(self) -> bool:
        """Bring back what is paged out; whether there was room for it all. The mode stays on if not."""
        done = not self.pager.away or self.pager.page_in_all()
        if done and not (self._inside and self.armed):
            self._retry.off()
        return done

    def remove(self) -> None:
        """Leave the model and the optimizers as they were.

        RescueError if there is no room on the device for all of them: what is still on the host then comes back when it
        is read, as in a step, and ``remove()`` can be called again when there is.
        """
        self.disarm()
        self.end_step()
        if self.pager.away:
            self.storages.evict(float("inf"))
            gc.collect()
            torch.accelerator.empty_cache()
            if not self.settle():
                raise RescueError(f"{self._away()}; free memory of the device and call remove() again")
        for hook in [*self._on_optimizers, *self._on_model]:
            hook.remove()

    def _away(self) -> str:
        """What is on the host, and cannot be brought back."""
        away = self.pager.away
        size = format_bytes(sum(one.host.nbytes for one in away.values()))
        names = [name for name, one in self.model.named_parameters() if storage_key(one) in away]
        some = f", among them {', '.join(names[:3])}{', …' if len(names) > 3 else ''}," if names else ""
        return (
            f"{len(away)} parameters, gradients or optimizer states ({size}){some} are on the host, and there is no"
            " room on the device to bring them back"
        )

    # What the mode asks for.

    def make_room(self, wanted: float, touched: set[int]) -> int:
        """Free so many bytes, none of the storages ``touched``; how many are free now."""
        freed = self.storages.evict(wanted)
        if freed < wanted:
            freed += self.pager.page_out(wanted - freed, touched)
        return freed

    def spoil(self, operator: str) -> None:
        """An operator may have written a part of what it writes."""
        self._spoilt = True
        reason = f"{operator} ran out of memory and may have written"
        self.counts.note(reason)
        if not self._inside:
            raise RescueError(f"{reason}, outside of a step; leave more memory")
        if self.ranks == 1 or self._agreed:
            raise self._request(reason)

    def _request(self, reason: str) -> Exception:
        """What is raised through a step that is spoilt."""
        if self._beginning is not None:
            return Repeat(reason)
        return RescueError(
            f"{reason}: the step is spoilt, and nobody can repeat a step of your own loop; give whole steps to"
            " run.step(...), or leave more memory"
        )

    def drawn_from(self, generators: RandomState) -> None:
        """An operator is about to draw random numbers."""
        if self._beginning is not None:
            self._beginning.drawn_from(generators)

    def unscaled(self) -> None:
        """A GradScaler is about to unscale gradients, or to let an optimizer step."""
        scaler = calling_scaler()
        if scaler is not None:
            self._scalers.add(scaler)

    def give_up(self, operator: str, missing: int) -> None:
        """There is no more room to be made for an operator: should the step be repeated, leave more room before it."""
        allocated = torch.accelerator.memory_allocated()
        self._ceiling = max(0, min(allocated, self._ceiling or allocated) - 2 * missing)
        self._needed = allocated + missing
        self.counts.note(f"{operator} lacked {format_bytes(missing)}, and nothing was left to send away")
        if self._inside and self._beginning is None:
            raise RescueError(
                f"{operator} lacked {format_bytes(missing)}, and nothing is left to offload; at least"
                f" {format_bytes(self._needed)} are needed; give whole steps to run.step(...), which can repeat them"
                " with more room, make the batch smaller, or share the model among more devices"
            )

    # Where it acts.

    def _before_layer(self, layer: nn.Module, args: Any) -> None:
        limits = [limit for limit in (self.watermark, self._ceiling) if limit is not None]
        if not limits or not self._inside:
            return
        excess = torch.accelerator.memory_allocated() - min(limits)
        if excess > 0 and (freed := self.storages.evict(excess)):
            self.counts.watermark += 1
            self.counts.note(f"{format_bytes(excess)} above the watermark: {format_bytes(freed)} left")

    def _model_begins(self, model: nn.Module, args: Any) -> None:
        if self._beginning is not None:
            self._beginning.look_at_gradients()

    def _model_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        beginning = self._beginning
        if beginning is not None and beginning.kept:
            for tensor in tensors_of(output):
                if tensor.requires_grad:  # where backward begins, gradients of the step before have been dropped
                    tensor.register_hook(lambda _: beginning.look_at_gradients())  # type: ignore[no-untyped-call]

    def _any_optimizer_steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any(optimizer is one for one in self.optimizers):
            self._foreign = type(optimizer).__name__

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._optimizer_begins(optimizer)
            return None

        def closed() -> Any:
            # The step's forward and backward, or one of several: the optimizer has not begun, or rests meanwhile.
            self.pager.stepping = None
            result = closure()
            self._optimizer_begins(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closed}
        return (args[0], closed, *args[2:]), kwargs

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._inside:
            return
        self.unscaled()
        if current_backward() != -1:  # on autograd's thread, where a mode would not last: it is not watched
            self._retry.wrote = True
            return
        if not self._agreed:
            self._agree()
        if self._beginning is not None:
            self._beginning.optimizer_begins(optimizer)
        self.pager.stepping = optimizer
        self._retry.on()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside:
            self._retry.wrote = True  # kernels that are not torch's write without being seen
            if self.pager.stepping is not None:
                self.pager.stepping = None
                self.pager.made.clear()
                self.settle()

    def _before_saving(self, *_: Any) -> None:
        if not self.settle():
            raise RescueError(f"{self._away()}, so they cannot be saved now; leave more memory")

    def _agree(self) -> None:
        """Begin the step anew if it is spoilt on any rank. All ranks come here at the same place."""
        if self.ranks == 1 or not self.armed:
            return
        self._agreed = True
        spoilt = torch.tensor(int(self._spoilt), device="cpu")
        dist.all_reduce(spoilt, dist.ReduceOp.MAX, self.group)
        if spoilt.item():
            raise self._request("an operator of a rank ran out of memory and may have written")

    def _prepare_to_repeat(self, beginning: Beginning, why: str) -> None:
        if self._foreign:
            raise RescueError(
                f"{why}, and the step cannot be repeated: {self._foreign} has stepped in it, which lowtide was not told"
                " of; pass every optimizer of the step: adapt(model, [first, second])"
            )
        if self._retry.wrote:
            raise RescueError(
                f"{why} after the optimizer had begun to change parameters, so the step cannot be repeated; leave more"
                " memory for the optimizer's step"
            )
        gc.collect()
        torch.accelerator.empty_cache()
        beginning.restore(self._scalers)
        self.arm()
        self.counts.repeated += 1
        self.counts.note(f"the step was begun anew: {why}")


def _want_of_memory(error: BaseException | None) -> BaseException | None:
    """The error, or the one that it came from, that is about memory; others wrap it, such as a pipeline's stage."""
    while error is not None and not isinstance(error, Repeat) and not is_out_of_memory(error):
        error = error.__cause__
    return error
