"""Run a model once and write its Trace: with fake tensors, where no memory is taken, or on a live device."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.compiled import NothingCompiled, is_compiled
from lowtide._torch_private.fake import FakeTensorMode
from lowtide._torch_private.storages import storage_key
from lowtide._torch_private.subclasses import inner_tensor
from lowtide.errors import TraceError
from lowtide.operators.calls import tensors_of
from lowtide.operators.checkpointing import checkpointing_off
from lowtide.operators.layers import find_layers, other_stacks
from lowtide.operators.saved import PackHook, kept_apart
from lowtide.operators.survey import survey
from lowtide.trace.assemble import assemble
from lowtide.trace.compiled import calls_of, with_compiled_layers
from lowtide.trace.in_place import change_in_place
from lowtide.trace.layout import Layout
from lowtide.trace.loss import loss_of
from lowtide.trace.places import device_of, places
from lowtide.trace.recorder import Recorder, imagined
from lowtide.trace.stacks import uncovered_notes
from lowtide.trace.trace import Trace

__all__ = ["capture"]


def capture(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    layers: str | None = None,
    name: str = "",
    layout: Layout | None = None,
    batch: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
    rounds: int = 1,
    compiled: bool | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Trace:
    """The Trace of one micro-batch of ``model``; ``run`` does its forward and returns the loss, or what has it.

    With fake parameters nothing is computed and no memory is taken. On a live device each kernel is timed, ``rounds``
    times, and the median counts. Parameters stay as they are; gradients are gone afterwards. Where an ``optimizer`` is
    given its step is traced too, which needs fake parameters: real ones would change. ``batch``, unless given, is read
    off the first tensor that the model is called with. Gradient checkpointing that the model has on is off while it is
    traced, and a warning says so.

    Compiled layers are recorded in eager mode and then priced as ``torch.compile`` has them; ``compiled`` asks for
    that, or against it, whatever they are. See :mod:`lowtide.trace.compiled`.

    ``trace = capture(model, lambda: model(tokens, labels=tokens))``
    """
    fake = isinstance(_mode_of(model), FakeTensorMode)
    if optimizer is not None and not fake:
        raise TraceError("the optimizer's step would change the parameters: trace it with fake tensors")
    progress("profiling the operators")
    stack = find_layers(model, layers)
    off = checkpointing_off(model, stack)
    is_any_compiled = is_compiled(model) or any(map(is_compiled, stack.modules))
    eager = NothingCompiled() if is_any_compiled else nullcontext()
    with off as checkpointed, _random_restored(), _mode_of(model), eager:
        if checkpointed:
            warnings.warn(
                f"lowtide: the model has gradient checkpointing on ({checkpointed}); it was traced without, and must be"
                " turned off before a Policy is applied",
                UserWarning,
                stacklevel=2,
            )
        with _first_input(model) as given, calls_of(stack.modules) as calls:
            found = survey(model, run, layers=layers)
        runs = _Runs(model, run, optimizer, layers)
        progress("recording a step")
        if fake:
            runs.whole(imagined, streams=True)  # the first makes what later ones find: states, buffers
            forward = backward = runs.whole(imagined, streams=True)
            timed: list[Recorder] = []
        else:
            runs.whole(kept_apart)
            forward = runs.forward()
            backward = runs.whole(kept_apart)
            timed = [runs.whole(kept_apart, timed=True) for _ in range(rounds)]
    _check_equal(forward, backward, *timed)
    progress("writing the trace")
    trace = assemble(
        found,
        forward,
        backward,
        seconds=_seconds(timed, len(backward.kernels)),
        model=model,
        optimizers=[optimizer] if optimizer is not None else [],
        name=name or type(model).__name__,
        layout=layout,
        batch=dict(given if batch is None else batch),
    )
    if compiled or (compiled is None and is_any_compiled):
        trace = with_compiled_layers(trace, model, stack.modules, calls, progress)
    stacks = uncovered_notes(found.layers, other_stacks(model, found.layers), trace)
    return replace(trace, notes=(*notes, *trace.notes, *stacks))


@contextmanager
def _first_input(model: nn.Module) -> Iterator[dict[str, int]]:
    """The samples and tokens of the first tensor that the model is called with inside this context.

    It has tokens if it has indices of them, or samples of tokens of some width.
    """
    batch: dict[str, int] = {}

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shaped = [tensor for tensor in tensors_of([args, kwargs]) if tensor.dim()]
        if shaped and not batch:
            shape = shaped[0].shape
            batch["samples"] = shape[0]
            if len(shape) == (3 if shaped[0].is_floating_point() else 2):
                batch["tokens"] = shape[0] * shape[1]

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield batch
    finally:
        hook.remove()


class _Runs:
    """Runs of a micro-batch, recorded."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[], Any],
        optimizer: torch.optim.Optimizer | None,
        layers: str | None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.run: Callable[[], Tensor] = lambda: loss_of(run())
        self.layers: Sequence[nn.Module] = find_layers(model, layers).modules
        self.device = device_of(model)

    def forward(self) -> Recorder:
        """A forward of which nothing is held."""
        with self._recorded(Recorder(len(self.layers), hold=None, device=self.device)) as recorder:
            loss = self.run()
            recorder.move("optimizer", 1)  # that its graph ends now is of no interest
            del loss
        return recorder

    def whole(self, hold: PackHook, *, timed: bool = False, streams: bool = False) -> Recorder:
        """A forward and a backward, and the optimizer's step."""
        recorder = Recorder(len(self.layers), hold=hold, device=self.device, timed=timed, streams=streams)
        with self._recorded(recorder):
            loss = self.run()
            recorder.follow(loss.grad_fn)
            recorder.move("backward", len(self.layers))
            loss.backward()
            recorder.gradients = {
                recorder.number(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None
            }
            if self.optimizer is not None:
                recorder.move("optimizer", 0)
                self.optimizer.step()
            recorder.move("optimizer", 1)
            del loss
        change_in_place(recorder)
        return recorder

    @contextmanager
    def _recorded(self, recorder: Recorder) -> Iterator[Recorder]:
        self._forget_gradients()
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        known = [*self.model.parameters(), *self.model.buffers(), *tensors_of([dict(state) for state in states])]
        recorder.static = {storage_key(tensor) for tensor in known}
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # what ends when a cycle is found would end at another place in every run
        try:
            with ExitStack() as stack:
                stack.enter_context(places(self.model, self.layers, recorder))
                stack.enter_context(recorder.recording())
                yield recorder
        finally:
            if collecting:
                gc.enable()
            self._forget_gradients()

    def _forget_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


def _mode_of(model: nn.Module) -> AbstractContextManager[Any]:
    """The mode that the parameters were made in, for other tensors that are made."""
    parameter = next(model.parameters(), None)
    mode: AbstractContextManager[Any] | None = getattr(parameter, "fake_mode", None)
    if mode is None and parameter is not None:
        mode = getattr(inner_tensor(parameter), "fake_mode", None)
    return mode or nullcontext()


def _check_equal(first: Recorder, *others: Recorder) -> None:
    kinds = [kernel.kind for kernel in first.kernels]
    for other in others:
        if [kernel.kind for kernel in other.kernels[: len(kinds)]] != kinds:
            raise TraceError(
                "the model's second run diverged from its first: its control flow depends on values or on chance, and"
                " one run does not represent all; give it fixed inputs, or call eval() on what changes"
            )


def _seconds(timed: Sequence[Recorder], count: int) -> list[float] | None:
    """The median of what each kernel took."""
    if not timed:
        return None
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    rows = [[kernel.seconds for kernel in recorder.kernels] for recorder in timed]
    return [median(column) for column in zip(*rows, strict=True)][:count]


@contextmanager
def _random_restored() -> Iterator[None]:
    """The generators, put back where they were: looking at a model must not change its training."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = list(range(torch.accelerator.device_count())) if accelerator is not None else []
    with torch.random.fork_rng(devices, device_type=accelerator.type if accelerator is not None else "cuda"):
        yield
