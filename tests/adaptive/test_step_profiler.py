"""A step of the user's is profiled in little memory, and none of its values change."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tide
from lowtide.adaptive.machine import profile_device
from lowtide.adaptive.step_profiler import TIMED_STEPS, StepProfiler
from lowtide.errors import TraceError
from lowtide.models.build import build_model
from lowtide.models.initialise import initialise
from lowtide.models.shape import DecoderShape
from lowtide.planner.pipeline import even_pipeline
from lowtide.planner.simulate import simulate
from lowtide.policy import LayerPolicy, Policy, Recompute, Swap
from lowtide.runtime.apply import apply
from lowtide.trace.capture import capture
from lowtide.trace.trace import Part, Trace, kernels_of
from support import parity_models
from support.garbage import collect_garbage

LAYERS, LENGTH, BATCH, VOCABULARY = 4, 64, 4, 200
SHAPE = DecoderShape(
    vocab_size=VOCABULARY, hidden_size=64, num_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=128, max_position_embeddings=LENGTH,
)  # fmt: skip
POLICIES = {
    "keep": Policy((LayerPolicy(),) * LAYERS),
    "recompute": Policy((LayerPolicy(Recompute()),) * LAYERS),
    "swap": Policy((LayerPolicy(Swap(4)),) * LAYERS),
}
ROOMY = 1 << 30
SLOW = pytest.mark.slow


class Run:
    """Somebody's training run on tide."""

    def __init__(self, *, autocast: bool = False, micro_batches: int = 1, batch: int = BATCH) -> None:
        machine = tide.scaled("h100", 1 / 16)
        tide.reset()
        tide.configure(preset=machine, capacity=ROOMY, flops_fp32=machine.flops_half, efficiency_seed=3, races=False)
        self.autocast, self.micro_batches = autocast, micro_batches
        self.model = build_model(SHAPE)
        initialise(self.model, seed=0)
        self.model.train().to("tide")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.tokens = torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(0)).to("tide")

    def loss(self) -> Tensor:
        with torch.autocast("tide", torch.bfloat16, enabled=self.autocast):
            logits = self.model(self.tokens)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), self.tokens[:, 1:].flatten())

    def step(self) -> None:
        for _ in range(self.micro_batches):
            self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def peak(self, step: Callable[[], None]) -> int:
        collect_garbage()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        step()
        return torch.accelerator.max_memory_allocated()

    def measured(self, policy: Policy) -> tuple[int, float]:
        """The peak and the seconds of a warm step."""
        handle = apply(self.model, policy)
        self.step()
        self.step()
        begin = self._idle()
        peak = self.peak(self.step)
        seconds = (self._idle() - begin) / 1e9
        handle.remove()
        return peak, seconds

    def _idle(self) -> int:
        torch.accelerator.synchronize()
        return tide.now()

    @property
    def state(self) -> list[Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def look_on(run: Run, steps: int = TIMED_STEPS + 1) -> StepProfiler:
    profiler = StepProfiler(run.model, optimizers=[run.optimizer])
    for _ in range(steps):
        with profiler.step():
            run.step()
    return profiler


def tight(run: Run, share: float) -> int:
    """A capacity of what is there after a step and that share of what a step adds."""
    run.step()
    collect_garbage()
    there = torch.accelerator.memory_allocated()
    needed = run.peak(run.step) - there
    return there + int(share * needed)


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=SLOW), True])
def test_a_step_measured_where_it_would_not_fit_predicts_peak_and_time(autocast: bool) -> None:
    run = Run(autocast=autocast, batch=16)
    capacity = tight(run, 0.5)
    torch.accelerator.empty_cache()
    tide.configure(capacity=capacity)
    with pytest.raises(torch.OutOfMemoryError):
        run.step()
    run.optimizer.zero_grad(set_to_none=True)
    profiler = look_on(run)
    assert profiler.complete
    trace = profiler.trace()
    device = profile_device(torch.device("tide"), kernels_of(trace))
    assert device.capacity == pytest.approx(capacity, abs=1 << 21)
    tide.configure(capacity=ROOMY)
    for name, policy in POLICIES.items():
        peak, seconds = run.measured(policy)
        predicted = simulate(trace, policy, device, even_pipeline(LAYERS))
        assert predicted.peak == pytest.approx(peak, rel=1e-2), name
        assert predicted.seconds == pytest.approx(seconds, rel=2e-2), name


@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_measured_is_what_a_capture_shows(autocast: bool) -> None:
    run = Run(autocast=autocast)
    captured = capture(run.model, run.loss)
    found = look_on(run).trace()
    assert found.notes == ()
    assert replace(found, optimizer=captured.optimizer, optimizer_name="") == _with_states(captured, found)
    assert found.batch == {"samples": BATCH, "tokens": BATCH * LENGTH}


def _with_states(captured: Trace, found: Trace) -> Trace:
    """A capture of real parameters knows no optimizer."""

    def part(one: Part, other: Part) -> Part:
        return replace(one, static=one.static._replace(optimizer=other.static.optimizer))

    parts = tuple(part(one, other) for one, other in zip(captured.parts, found.parts, strict=True))
    before, after = part(captured.before, found.before), part(captured.after, found.after)
    return replace(captured, parts=parts, before=before, after=after)


def test_the_trace_has_the_first_micro_batch_and_the_optimizers_step() -> None:
    one, several = (look_on(Run(micro_batches=count)).trace() for count in (1, 3))
    assert several == one
    assert [kernel.kind for kernel in one.optimizer.kernels]
    assert one.optimizer.kernels[0].seconds
    assert sum(one.parts[0].static.optimizer) > 2 * sum(one.parts[0].static.parameters)


def zeroed_in_place(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)
    run.loss().backward()
    run.optimizer.step()


def cleared_after_forward(run: Run) -> None:
    logits = run.model(run.tokens)  # which lives until the end
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), run.tokens[:, 1:].flatten())
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()


def clipped(run: Run) -> None:
    for _ in range(2):
        run.loss().backward()
        float(run.model.layers["0"].attention_norm.weight.grad.square().sum())  # logging
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()


def test_what_runs_between_backward_and_the_optimizers_step_is_the_optimizers() -> None:
    def kinds(step: Callable[[Run], None]) -> list[str]:
        run = Run()
        profiler = StepProfiler(run.model, optimizers=[run.optimizer])
        for _ in range(2):
            with profiler.step():
                step(run)
        trace = profiler.trace()
        assert [kernel.kind for kernel in trace.after.kernels].count("aten::pow") == 0
        return [kernel.kind for kernel in trace.optimizer.kernels]

    with_clipping, without = kinds(clipped), kinds(Run.step)
    assert with_clipping[-len(without) :] == without
    assert any("norm" in kind for kind in with_clipping)
    assert with_clipping.count("aten::pow") == 1  # what was logged after the first micro-batch is not there


@pytest.mark.parametrize("step", [zeroed_in_place, cleared_after_forward])
def test_gradients_that_stay_are_part_of_the_peak(step: Callable[[Run], None]) -> None:
    run = Run()
    profiler = StepProfiler(run.model, optimizers=[run.optimizer])
    for _ in range(2):
        with profiler.step():
            step(run)
    policy = POLICIES["keep"]
    predicted = simulate(profiler.trace(), policy, profile_device(torch.device("tide")), even_pipeline(LAYERS))
    peak = run.peak(lambda: step(run))
    assert predicted.peak == pytest.approx(peak, rel=1e-2)


def trained(name: str, autocast: bool, *, watched: bool) -> tuple[list[Tensor], StepProfiler]:
    """Losses and parameters of a few steps of one of the parity models, with dropout."""
    tide.reset()
    model = parity_models.build(name, dropout=True).to("tide")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    profiler = StepProfiler(model, optimizers=[optimizer], layers=parity_models.LAYERS.get(name))
    torch.manual_seed(1)
    found: list[Tensor] = []

    def step(batches: Tensor) -> None:
        for tokens in batches:
            with torch.autocast("tide", torch.bfloat16, enabled=autocast):
                loss = model(tokens)
            loss.backward()
            found.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        draw = torch.Generator().manual_seed(number)
        batches = torch.randint(parity_models.VOCABULARY, (2, 4, 8), generator=draw).to("tide")
        if watched:
            with profiler.step():
                step(batches)
        else:
            step(batches)
    return [*found, *(parameter.detach().cpu() for parameter in model.parameters())], profiler


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        ("reference", False),
        ("mixtral", True),
        *(pytest.param(name, True, marks=SLOW) for name in ("reference", "reference_moe", "llama", "gpt2")),
        *(pytest.param(name, False, marks=SLOW) for name in ("reference_moe", "llama", "gpt2", "mixtral")),
    ],
)
def test_profiling_changes_no_bit_of_the_training(name: str, autocast: bool) -> None:
    plain, _ = trained(name, autocast, watched=False)
    watched, profiler = trained(name, autocast, watched=True)
    assert all(map(torch.equal, plain, watched))
    trace = profiler.trace()
    owned = [pack for place in trace.layers for pack in trace.parts[place].packs if pack.source == "operator"]
    assert all(pack.owner for pack in owned)
    assert owned


def test_experts_that_get_other_tokens_in_every_step_are_noted_and_their_tensors_known() -> None:
    _, profiler = trained("mixtral", False, watched=True)
    trace = profiler.trace()
    assert any("not all run the same kernels" in note for note in trace.notes)
    for place in trace.layers:
        unknown = [pack for pack in trace.parts[place].packs if pack.source == "root" and "experts" in pack.operator]
        assert not unknown


def test_profiling_leaves_nothing_on_the_model() -> None:
    run, resize = Run(), torch.UntypedStorage.resize_
    look_on(run)
    assert torch.UntypedStorage.resize_ is resize
    for module in run.model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not run.optimizer._optimizer_step_pre_hooks
    assert gc.isenabled()


def test_a_failed_step_is_not_recorded() -> None:
    run = Run()
    profiler = look_on(run, 2)

    def fails() -> None:
        with profiler.step():
            run.loss().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(profiler.recorded) == 1
    run.optimizer.zero_grad()
    with profiler.step():
        run.step()
    assert len(profiler.recorded) == 2
    assert profiler.trace().notes == ()


def test_a_trace_before_anything_was_recorded_is_refused() -> None:
    with pytest.raises(TraceError, match="run more inside step"):
        look_on(Run(), 1).trace()


class Rewriting(nn.Module):
    """Saves views of one storage, writes into what is not saved, and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            first, second = layer(x).chunk(2, dim=-1)
            scratch = torch.zeros_like(x)
            scratch[:, :4] += first
            x = torch.cat([first * second, (second * second).t().contiguous().t()], dim=-1) + scratch * x
        return x


def test_views_of_one_storage_are_reloaded_bitwise() -> None:
    def gradients(watch: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Rewriting()
        x = torch.randn(4, 8)
        found = []
        for _ in range(3):
            with watch(model):
                model(x).square().sum().backward()
            found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return found

    class Plain:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    watched: dict[nn.Module, StepProfiler] = {}

    def watch(model: nn.Module) -> Any:
        return watched.setdefault(model, StepProfiler(model)).step()

    plain = gradients(lambda model: Plain())
    assert all(map(torch.equal, plain, gradients(watch)))
    (profiler,) = watched.values()
    assert len(profiler.recorded) == 2
