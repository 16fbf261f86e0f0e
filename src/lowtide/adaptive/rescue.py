"""Survive when the device runs out of memory.

[Note: three lines of defence]
1. A watermark: where a layer begins with more allocated than that, the oldest saved tensors are offloaded first.
2. An operator that runs out of memory, in forward, in backward or in the optimizer, is retried after tensors were
   offloaded. See [Note: saved storages], [Note: retrying an operator] and [Note: paging].
3. The step is retried: generators, buffers and gradients are restored, and the first two lines are armed.

The first two need a pack hook on every saved tensor and a dispatch mode around every kernel, some microseconds each.
While they are disarmed, an OOM goes straight to the third line, and the optimizer's step is watched only if
``watches_optimizer`` says so.

A rank must not retry a step alone: the order of the ranks' collectives would be broken for good. With several ranks the
third line is taken by agreement, before the first optimizer steps, where every rank has issued the same collectives,
and only in steps for which all ranks are armed. A rank that is disarmed, that has nothing left to offload, or whose
step is spoilt while the others are disarmed, can only fail.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from lowtide.adaptive.retry import RetryMode
from lowtide.adaptive.step_snapshot import Contents, RetryStep, StepSnapshot
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
"""How often a step is run, at most."""

T = TypeVar("T")


class Rescue:
    """Lets a model's steps survive OOM. See [Note: three lines of defence].

    ``optimizers`` are those that ``step`` uses. Storages below ``smallest`` bytes are never offloaded, and ``multiple``
    is how many times the missing bytes are. ``group`` is a process group of all ranks that step together, for tensors
    on the host; the default group if there are several ranks. ``layers`` names the module that holds the layers, where
    the longest run of equal children is not it. ``scalers`` are found by themselves once one has stepped or unscaled.

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
        scalers: Iterable[torch.amp.GradScaler] = (),
    ) -> None:
        self.model, self.optimizers, self.group = model, tuple(optimizers), group
        self.ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
        self.counts = Counts()
        self.watermark: int | None = None
        """Bytes allocated above which the oldest saved tensors are offloaded when a layer begins; None: no limit."""
        self.armed = self.together = False
        """Whether every operator is watched, and whether it is on all ranks."""
        self.watches_optimizer: Callable[[], bool] = lambda: True
        """Asked when an optimizer's step begins and nothing is armed: whether to watch it."""
        self.storages = SavedStorages(smallest, self.counts)
        self.pager = Pager(optimizers, smallest, self.storages.lock, self.counts)
        self._mode = RetryMode(self, multiple)
        self._pack = self.storages.pack
        """The pack hook that is on torch's stack: a bound method is another object each time."""
        self._inside = self._spoilt = self._agreed = False
        self._scalers: WeakSet[torch.amp.GradScaler] = WeakSet(scalers)
        """The scalers that work for these optimizers: those given, and those that were seen to."""
        self._drawn: tuple[torch.Generator, ...] = ()
        """Generators that steps draw from, other than torch's default ones."""
        self._foreign = ""
        """The class of an optimizer that stepped and was not passed to us."""
        self._snapshot: StepSnapshot | None = None
        """Of the running step; None where it cannot be retried."""
        self._contents: Contents | None = None
        """Of the model, in the step before."""
        self._ceiling: int | None = None
        """The watermark of a step that is retried."""
        self._needed = 0
        """Bytes that would have been allocated, had there been room for the operator that failed for good."""
        self._changing: frozenset[str] | None = None
        """The buffers that steps change; None before the first step has ended."""
        self._handles: list[Handle] = []
        try:
            self._layers = find_layers(model, layers).modules
        except ModelError:
            if layers is not None:
                raise
            self._layers = ()  # then the watermark does nothing
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
        """Run a step and return what it returns; if nothing else helps on OOM, restore the model and retry it.

        ``around`` makes a context for each attempt. RescueError if the step cannot be retried, or never fits.
        """
        snapshot = self.snapshot()
        why = ""
        with self.retryable(snapshot):
            for _ in range(ATTEMPTS):
                try:
                    with around(), self.watching():
                        result = step()
                    self.succeeded(snapshot)
                    return result
                except (RetryStep, RuntimeError) as error:
                    if (reason := self.reason_to_retry(error)) is None:
                        raise
                    why = reason
                self.restore(snapshot, why)
        raise self.never_fits(why)

    # The same for a caller that begins and ends its steps by itself: see [Note: parts of a step].

    def snapshot(self) -> StepSnapshot:
        """What a step that begins now begins with."""
        snapshot = StepSnapshot(self.model, self.optimizers, self._changing, self._drawn, self._contents)
        self._contents = snapshot.contents
        self._mode.wrote, self._foreign = False, ""
        return snapshot

    @contextmanager
    def retryable(self, snapshot: StepSnapshot) -> Iterator[None]:
        """What runs inside can be retried: an operator that cannot be raises RetryStep."""
        self._snapshot = snapshot
        hook = register_optimizer_step_pre_hook(self._any_optimizer_steps)
        try:
            yield
        finally:
            hook.remove()
            self._ceiling = self._snapshot = None

    def succeeded(self, snapshot: StepSnapshot) -> None:
        """A step has not failed: note which buffers it changed, and which generators it drew from."""
        changed = snapshot.changed(compared=self._changing is None)
        self._changing = (self._changing or frozenset()) | changed
        if self.armed:
            self._drawn = tuple(snapshot.generators[key][0] for key in snapshot.drawn)

    def reason_to_retry(self, error: BaseException) -> str | None:
        """Why a step that ended with this error is retried; None if it is not an OOM. RescueError on several ranks."""
        cause = _out_of_memory_cause(error)
        if cause is None:
            return None
        if isinstance(cause, RetryStep):
            return str(cause)
        missing = missing_bytes(cause)
        self.counts.lack(missing)
        why = f"{format_bytes(missing)} were missing"
        if self.ranks > 1:
            raise RescueError(self._alone(why)) from error
        return why

    def never_fits(self, why: str) -> RescueError:
        """The error of a step that was retried in vain."""
        least = f"; at least {format_bytes(self._needed)} are needed, and maybe more further on" if self._needed else ""
        return RescueError(
            f"a step was begun {ATTEMPTS} times and did not fit into the device's memory: {why}, with everything"
            f" offloaded that can be{least}; make the batch smaller, or shard the model over more devices"
        )

    def _alone(self, why: str) -> str:
        """The error message where one of several ranks cannot go on."""
        if self.armed and not self.together:
            return f"{why} on this rank, in a step that the other ranks do not watch; a rank cannot retry it alone"
        if self.armed:
            return f"{why} on this rank, nothing is left to offload, and a rank cannot retry a step alone"
        return (
            f"{why} on this rank, and a rank cannot retry a step alone; call arm() on all ranks before the step, as"
            " adapt(..., watch='always') does"
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for OOM in everything that runs inside. Without the third line of defence: :meth:`run` has that.

        RescueError where the step would have to be retried.
        """
        self._inside, self._spoilt, self._agreed = True, False, False
        try:
            self.settle()
            if self.armed:
                self._watch()
            yield
            if not self._agreed:  # no optimizer has stepped
                self.agree()
        finally:
            take_back([self.end_step])

    def _watch(self) -> None:
        known = [*self.model.parameters(), *self.model.buffers()]
        self.storages.static = frozenset(storage_key(one) for one in known)
        self._mode.on()
        insert_saved_tensors_hooks(self._pack, unpack)
        for layer in self._layers:
            self._on_layers.append(layer.register_forward_pre_hook(Hook(self._before_layer)))
        for handle in self._handles:  # its hooks are the inner ones
            handle.manager.keep = self.storages.pack

    def end_step(self) -> None:
        """Take off the modes and hooks of a step; an interrupt may have left some on. No-op if no step runs."""
        for handle in self._handles:
            handle.manager.keep = None
        remove_saved_tensors_hooks(self._pack)
        take_back(hook.remove for hook in self._on_layers)
        self._on_layers.clear()
        self._inside, self.pager.stepping = False, None
        self.pager.made.clear()
        self.settle()

    def follow(self, handle: Handle) -> None:
        """Let what an applied Policy keeps be offloaded too."""
        self._handles.append(handle)
        if self._inside and self.armed:
            handle.manager.keep = self.storages.pack

    def unfollow(self, handle: Handle) -> None:
        """The Policy is about to be removed."""
        self._handles.remove(handle)
        handle.manager.keep = None

    def arm(self, *, together: bool = True) -> None:
        """From the next step on, and in the rest of the running one, watch every saved tensor and every operator.

        ``together``: so do all ranks.
        """
        watched, self.armed, self.together = self.armed, True, together
        if self._inside and not watched:
            self._watch()

    def disarm(self) -> None:
        """From the next step on, watch nothing, or only the optimizer."""
        self.armed = self.together = False

    def settle(self) -> bool:
        """Page in what is paged out; whether there was room for it all. The mode stays on if not."""
        done = not self.pager.paged_out or self.pager.page_in_all()
        if done and not (self._inside and self.armed):
            self._mode.off()
        return done

    def remove(self) -> None:
        """Restore the model and the optimizers.

        RescueError if the device has no room for all of their storages: those still on the host are paged in when they
        are read, as in a step, and ``remove()`` can be called again when there is room.
        """
        self.disarm()
        self.end_step()
        if self.pager.paged_out:
            self.storages.evict(float("inf"))
            gc.collect()
            torch.accelerator.empty_cache()
            if not self.settle():
                raise RescueError(
                    f"{self.pager.stranded(self.model)}; free memory of the device and call remove() again"
                )
        for hook in [*self._on_optimizers, *self._on_model]:
            hook.remove()

    # What the mode calls.

    def make_room(self, wanted: float, touched: set[int]) -> int:
        """Free so many bytes, of storages other than ``touched``; how many were freed."""
        freed = self.storages.evict(wanted)
        if freed < wanted:
            freed += self.pager.page_out(wanted - freed, touched)
        return freed

    def spoil(self, operator: str) -> None:
        """An operator failed and may have written a part of its target. Raises where the step can be retried now."""
        self._spoilt = True
        reason = f"{operator} ran out of memory and may have written"
        self.counts.note(reason)
        if not self._inside:
            raise RescueError(f"{reason}, outside of a step; leave more memory")
        if self.ranks > 1 and not self.together:
            raise RescueError(self._alone(reason))
        if self.ranks == 1 or self._agreed:
            raise self._request(reason)

    def _request(self, reason: str) -> Exception:
        """The exception that ends a spoilt step."""
        if self._snapshot is not None:
            return RetryStep(reason)
        return RescueError(
            f"{reason}: the step is spoilt, and a step of your own loop cannot be retried; give whole steps to"
            " run.step(...), or leave more memory"
        )

    def drawn_from(self, generators: RandomState) -> None:
        """An operator is about to draw random numbers."""
        if self._snapshot is not None:
            self._snapshot.drawn_from(generators)

    def unscaled(self) -> None:
        """A GradScaler may be about to unscale gradients, or to step an optimizer: note which."""
        scaler = calling_scaler()
        if scaler is not None:
            self._scalers.add(scaler)

    def give_up(self, operator: str, missing: int) -> None:
        """No more room can be made for an operator: if the step is retried, leave more room before it."""
        allocated = torch.accelerator.memory_allocated()
        self._ceiling = max(0, min(allocated, self._ceiling or allocated) - 2 * missing)
        self._needed = allocated + missing
        self.counts.note(f"{operator} lacked {format_bytes(missing)}, and nothing was left to offload")
        if self._inside and self._snapshot is None:
            pieces = torch.accelerator.memory_reserved() - allocated
            fragmented = (
                f", and {format_bytes(pieces)} are reserved in pieces that do not fit" if pieces > missing else ""
            )
            raise RescueError(
                f"{operator} lacked {format_bytes(missing)}, and nothing is left to offload; at least"
                f" {format_bytes(self._needed)} are needed{fragmented}; give whole steps to run.step(...), which can"
                " retry them with more room, make the batch smaller, or shard the model over more devices"
            )

    # Hooks.

    def _before_layer(self, layer: nn.Module, args: Any) -> None:
        limits = [limit for limit in (self.watermark, self._ceiling) if limit is not None]
        if not limits or not self._inside:
            return
        excess = torch.accelerator.memory_allocated() - min(limits)
        if excess > 0 and (freed := self.storages.evict(excess)):
            self.counts.watermark += 1
            self.counts.note(f"{format_bytes(excess)} above the watermark: {format_bytes(freed)} offloaded")

    def _model_begins(self, model: nn.Module, args: Any) -> None:
        if self._snapshot is not None:
            self._snapshot.look_at_gradients()

    def _model_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        snapshot = self._snapshot
        if snapshot is not None and snapshot.kept:
            for tensor in tensors_of(output):
                if tensor.requires_grad:  # when backward begins, the last step's gradients have been dropped
                    tensor.register_hook(lambda _: snapshot.look_at_gradients())  # type: ignore[no-untyped-call]

    def _any_optimizer_steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any(optimizer is one for one in self.optimizers):
            self._foreign = type(optimizer).__name__

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._optimizer_begins(optimizer)
            return None

        def closed() -> Any:
            # The step's forward and backward, or one of several: the optimizer has not begun, or waits.
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
        if current_backward() != -1:  # on autograd's thread, where a mode would not last: it runs unwatched
            self._mode.wrote = True
            return
        if not self._agreed:
            self.agree()
        if self._snapshot is not None:
            self._snapshot.optimizer_begins(optimizer)
        if self.armed or self.watches_optimizer():
            self.pager.stepping = optimizer
            self._mode.on()
        elif not type(optimizer).__module__.startswith("torch.optim"):
            self._mode.wrote = True  # other optimizers may write unseen

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside:
            self._mode.wrote = True  # kernels that are not torch's write unseen
            if self.pager.stepping is not None:
                self.pager.stepping = None
                self.pager.made.clear()
                self.settle()

    def _before_saving(self, *_: Any) -> None:
        if not self.settle():
            raise RescueError(f"{self.pager.stranded(self.model)}, so they cannot be saved now; leave more memory")

    def agree(self) -> None:
        """Retry the step if it is spoilt on any rank. All ranks call this at the same point of a step."""
        if self.ranks == 1 or not self.together:
            return
        self._agreed = True
        spoilt = torch.tensor(int(self._spoilt), device="cpu")
        dist.all_reduce(spoilt, dist.ReduceOp.MAX, self.group)
        if spoilt.item():
            raise self._request("an operator of a rank ran out of memory and may have written")

    def restore(self, snapshot: StepSnapshot, why: str) -> None:
        """Restore what a step began with, and watch every operator from now on. RescueError if that is not possible."""
        if self._foreign:
            raise RescueError(
                f"{why}, and the step cannot be retried: {self._foreign} has stepped in it, which was not passed to"
                " lowtide; pass every optimizer of the step: adapt(model, [first, second])"
            )
        if self._mode.wrote:
            raise RescueError(
                f"{why} after the optimizer had begun to change parameters, so the step cannot be retried; leave more"
                " memory for the optimizer's step"
            )
        gc.collect()
        torch.accelerator.empty_cache()
        snapshot.restore(self._scalers)
        self.arm()
        self.counts.retried_steps += 1
        self.counts.note(f"the step was retried: {why}")


def _out_of_memory_cause(error: BaseException | None) -> BaseException | None:
    """The error, or a cause of it, that asks for a retry or is an OOM; others wrap it, such as a pipeline's stage."""
    while error is not None and not isinstance(error, RetryStep) and not is_out_of_memory(error):
        error = error.__cause__
    return error
