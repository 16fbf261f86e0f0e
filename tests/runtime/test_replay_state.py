"""A replay is the call that ran: with its settings, its arguments, its module and its random numbers as they were."""

from __future__ import annotations

import os
import random
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import tide  # noqa: F401
from lowtide._torch_private.settings import PRECISIONS, SETTINGS
from lowtide.errors import RebuildError
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime import outside
from lowtide.runtime.ambient import ambient, precision, restored
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits
from lowtide.runtime.module_state import Attributes
from lowtide.runtime.randomness import HostRandom, draws_nothing

LAYERS, WIDTH = 3, 16
OPERATORS = LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),))
DECISIONS = {"operators": OPERATORS, "layers": LayerPolicy(Recompute()), "swap": LayerPolicy(Swap(1))}
under_each = pytest.mark.parametrize("decision", DECISIONS.values(), ids=DECISIONS)
recomputed = pytest.mark.parametrize("decision", [OPERATORS, LayerPolicy(Recompute())], ids=["operators", "layers"])


class Layer(nn.Module):
    def __init__(self, leaf: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up, self.leaf, self.down = nn.Linear(WIDTH, WIDTH), leaf(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.leaf(self.up(x)))


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


Around = Callable[[], AbstractContextManager[Any]]


def run(
    build: Callable[[], nn.Module],
    decision: LayerPolicy | None,
    *,
    around: Around | None = None,
    before: Callable[[nn.Module, int], None] | None = None,
    between: Callable[[nn.Module], None] | None = None,
    device: str = "cpu",
    order: int = 1,
) -> tuple[list[Tensor], int]:
    """Three steps of two forwards each, ``around`` around the forwards only.

    Every gradient and the buffers after each, and how often something was recomputed or swapped.
    """
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = build().to(device)
    policy = Policy((decision,) * LAYERS, origin="solver") if decision is not None else None
    handle = apply(model, policy, layers="layers", limits=Limits(minimum_bytes=1)) if policy is not None else None
    values: list[Tensor] = []
    for step in range(3):
        losses: list[Tensor] = []
        for half in range(2):
            if before is not None:
                before(model, 2 * step + half)
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2 * step + half)).to(device)
            if around is None:
                losses.append(_loss(model(x)))
            else:
                with around():
                    losses.append(_loss(model(x)))
            if between is not None:
                between(model)
        for loss in losses[::order]:
            loss.backward()
        values += [one.grad.cpu().clone() for one in model.parameters() if one.grad is not None]
        values += [one.cpu().clone() for one in model.buffers()]
        model.zero_grad()
    done = 0
    if handle is not None:
        done = sum(line.recomputes + line.swaps for line in handle.ledger.lines.values())
        handle.receipt()
        handle.remove()
    return values, done


def _loss(output: Any) -> Tensor:
    return (output if isinstance(output, Tensor) else output.x).square().mean()


def exact(build: Callable[[], nn.Module], decision: LayerPolicy, **how: Any) -> None:
    expected, _ = run(build, None, **how)
    found, done = run(build, decision, **how)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert done


def stack(leaf: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Model(lambda: Layer(leaf))


# The settings of torch.


def other_value(value: Any) -> Any:
    """A value of a setting that it does not have now."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, tuple):
        return tuple(not one for one in value)
    if isinstance(value, list):
        return value[::-1]
    return {"highest": "medium"}.get(value, "ieee")


@pytest.mark.parametrize("name", [*SETTINGS, *PRECISIONS])
def test_every_setting_is_restored_for_a_replay_and_then_put_back(name: str) -> None:
    setting = (SETTINGS | PRECISIONS)[name]
    before = setting.get()
    everything = [one.get() for one in PRECISIONS.values()]
    try:
        setting.set(other_value(before))
    except RuntimeError:
        pytest.skip("cannot be changed on this machine")
    try:
        changed = setting.get()
        if changed == before:
            pytest.skip("cannot be changed in this build")
        was = ambient(precision())
        setting.set(before)
        (context,) = restored(was)
        with context:
            assert setting.get() == changed
            assert restored(was) == []
        assert setting.get() == before
    finally:
        for one, value in zip(PRECISIONS.values(), everything, strict=True):
            one.set(value)
        setting.set(before)


def test_a_call_without_use_for_precisions_has_its_other_settings_restored() -> None:
    was = ambient(())
    torch.use_deterministic_algorithms(True)
    try:
        (context,) = restored(was)
        with context:
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_equal_surroundings_are_one_object() -> None:
    assert ambient(precision()) is ambient(precision())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.view(1, 8, 2, WIDTH // 2).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)[0])


@under_each
def test_attention_kernels_chosen_around_forward_only(decision: LayerPolicy) -> None:
    exact(lambda: Model(Attention), decision, around=lambda: sdpa_kernel(SDPBackend.MATH))


class Fills(nn.Module):
    """Makes a tensor where, and of the dtype, that is the default."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight) * (1 + torch.rand(())).to(x)


@recomputed
def test_default_device_around_forward_only(decision: LayerPolicy) -> None:
    exact(stack(Fills), decision, around=lambda: torch.device("tide"), device="tide")


@recomputed
def test_default_dtype_around_forward_only(decision: LayerPolicy) -> None:
    @contextmanager
    def doubled() -> Iterator[None]:
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    exact(stack(Fills), decision, around=doubled)


class Rounds(TorchDispatchMode):
    """A user's mode that rounds what some kernels give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.gelu.default, torch.ops.aten.tanh.default):
            result.copy_(result.to(torch.bfloat16))
        return result


class Halves(TorchFunctionMode):
    """A user's mode that makes another function of one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.tanh else result


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c(torch.tanh(functional.gelu(self.a(x)) * self.b(x)))


@under_each
@pytest.mark.parametrize("mode", [Rounds, Halves])
def test_a_mode_of_the_user_around_forward_only(decision: LayerPolicy, mode: Around) -> None:
    exact(lambda: Model(Gated), decision, around=mode)


# Arguments.


def test_arguments_that_are_one_tensor_are_one_tensor_when_they_are_replayed() -> None:
    encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True, dropout=0.1)
    exact(lambda: Model(lambda: Batched(encoder)), OPERATORS)


class Batched(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x[None])
        return output[0]


@dataclass
class State:
    x: Tensor
    count: int = 0


class Carrying(nn.Module):
    """A layer that is given an object and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.leaf, self.down = nn.Linear(WIDTH, WIDTH), CarryingLeaf(), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        residual, state.x = state.x, self.up(state.x)
        state = self.leaf(state)
        state.x = residual + self.down(state.x)
        return state


class CarryingLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, state: State) -> State:
        state.count += 1
        state.x = functional.gelu(state.x * self.weight * state.count)
        return state


class CarryingModel(Model):
    def __init__(self) -> None:
        super().__init__(Carrying)

    def forward(self, x: Tensor) -> State:
        state = State(self.first(x))
        for layer in self.layers:
            state = layer(state)
        return state


@recomputed
def test_an_object_that_layers_change(decision: LayerPolicy) -> None:
    exact(CarryingModel, decision)


class Appending(nn.Module):
    """A layer that is given the outputs of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.down(functional.gelu(self.up(torch.stack(features).mean(0))))


class AppendingModel(Model):
    def __init__(self) -> None:
        super().__init__(Appending)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.first(x)]
        for layer in self.layers:
            features.append(layer(features))
        return torch.stack(features).sum(0)


@recomputed
def test_a_list_that_is_appended_to_afterwards(decision: LayerPolicy) -> None:
    exact(AppendingModel, decision)


def test_a_tensor_in_an_object_that_is_written_to_afterwards_is_refused() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
            return x + self.down(functional.gelu(self.up(x)) + shared["shift"])

    class Shifted(Model):
        def __init__(self) -> None:
            super().__init__(Shift)

        def forward(self, x: Tensor) -> Tensor:
            shared = {"shift": torch.zeros(WIDTH)}
            for layer in self.layers:
                x = layer(x, shared)
                shared["shift"].add_(1.0)
            return x

    with pytest.raises(
        RebuildError, match=r"in one of its arguments was changed in place .*version 3; expected version 2"
    ):
        run(Shifted, LayerPolicy(Recompute()))


BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CACHED = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "eager llama": lambda: transformers.LlamaConfig(**BASE, attn_implementation="eager"),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **BASE, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
}


@pytest.mark.parametrize("name", CACHED)
@recomputed
def test_a_cache_of_keys_and_values_grows_once(name: str, decision: LayerPolicy) -> None:
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    found: list[list[Tensor]] = []
    for applied in (False, True):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CACHED[name]()).train()
        assert model.config.use_cache
        handle = apply(model, Policy((decision,) * 2, origin="solver")) if applied else None
        values: list[Tensor] = []
        for _ in range(2):
            output = model(tokens, attention_mask=mask, labels=tokens)
            assert output.past_key_values.get_seq_length() == 12
            output.loss.backward()
            assert output.past_key_values.get_seq_length() == 12
            values += [one.grad.clone() for one in model.parameters() if one.grad is not None]
            model.zero_grad()
        found.append(values)
        if handle is not None:
            handle.remove()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# Modules.


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.count = [0]
        self.space = types.SimpleNamespace(shift=0.0)
        self.generators = {"noise": torch.Generator().manual_seed(1)}
        self.rng = numpy.random.default_rng(0)
        self.factor = 1.0


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.count[0] += 1
        self.last = self.count[0]
        return functional.gelu(x * self.weight) * (1 + 0.1 * self.count[0])


class Shifts(Base):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight + self.space.shift) * self.factor


class Python(Base):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight) * random.gauss(1.0, 0.1)


class Numpy(Base):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight) * float(numpy.random.randn())


class NumpyGenerator(Base):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight) * self.rng.random()


class Generator(Base):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight + torch.randn(WIDTH, generator=self.generators["noise"]))


@recomputed
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("leaf", [Counts, Python, Numpy, NumpyGenerator, Generator])
def test_state_that_a_layer_changes_while_it_runs(decision: LayerPolicy, leaf: type[Base], order: int) -> None:
    exact(stack(leaf), decision, order=order)


@recomputed
def test_attributes_that_are_changed_before_backward(decision: LayerPolicy) -> None:
    def before(model: nn.Module, number: int) -> None:
        for one in model.modules():
            if isinstance(one, Base):
                one.space.shift, one.factor = 0.1 * number, 1.0 + number

    exact(stack(Shifts), decision, before=before)


class ToDevice(Base):
    """Given tensors of the host, and draws on the device."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(functional.gelu(x.to("tide") * self.weight), 0.3)


class FromHost(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.leaf(self.up(x).cpu()))


@recomputed
def test_random_numbers_of_a_device_that_no_argument_is_on(decision: LayerPolicy) -> None:
    exact(lambda: Model(lambda: FromHost(ToDevice)), decision, device="tide")


def test_a_parameter_that_is_written_to_before_backward_is_refused() -> None:
    def between(model: nn.Module) -> None:
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(0.5)

    with pytest.raises(RebuildError, match="a tensor of its module, was changed in place after it ran"):
        run(stack(Shifts), LayerPolicy(Recompute()), between=between)


class Annealed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("large", torch.zeros(1 << 15))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight + self.shift + self.large[:WIDTH])


def test_buffers_that_are_changed_before_backward_in_whole_layers() -> None:
    def before(model: nn.Module, number: int) -> None:
        for one in model.modules():
            if isinstance(one, Annealed):
                one.shift.fill_(0.1 * number)
                if number > 2:
                    one.large.add_(0.01)

    for order in (1, -1):
        exact(stack(Annealed), LayerPolicy(Recompute()), before=before, order=order)


class Replacing(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean(0)
        return functional.gelu(x * self.scale)


def test_buffers_that_are_replaced_in_every_run_of_whole_layers() -> None:
    for order in (1, -1):
        exact(stack(Replacing), LayerPolicy(Recompute()), order=order)


def test_norms_that_are_unfrozen_after_some_steps_in_whole_layers() -> None:
    def before(model: nn.Module, number: int) -> None:
        for one in model.modules():
            if isinstance(one, nn.BatchNorm1d):
                one.train(number > 3)  # in the last step; torch itself is wrong if it is between two forwards

    for order in (1, -1):
        exact(stack(lambda: nn.BatchNorm1d(WIDTH)), LayerPolicy(Recompute()), before=before, order=order)


def test_a_replay_that_gives_another_form_is_refused_and_both_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sized(Base):
        def forward(self, x: Tensor) -> Tensor:
            rows = int(os.environ["ROWS"])  # where nobody looks
            return functional.gelu(x * self.weight)[:rows].sum(0, keepdim=True).expand_as(x[:rows]) + 0.0

    class Summed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.leaf(self.up(x))).sum(0)

    with pytest.raises(RebuildError, match=r"shape \(8, 16\), stride \(16, 1\).* replayed it gave shape \(4, 16\)"):
        run(
            lambda: Model(lambda: Summed(Sized)),
            OPERATORS,
            before=lambda *_: monkeypatch.setenv("ROWS", "8"),
            between=lambda _: monkeypatch.setenv("ROWS", "4"),
        )


# What is looked at instead of asked for.


def test_every_draw_of_python_and_numpy_is_noticed() -> None:
    draws: list[Callable[[], Any]] = [
        random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1), lambda: random.shuffle([1, 2, 3]),
        numpy.random.rand, numpy.random.randn, numpy.random.randn, lambda: numpy.random.permutation(4),
    ]  # fmt: skip
    for draw in draws:
        was = HostRandom()
        first = random.getstate(), str(numpy.random.get_state())
        draw()
        after = random.getstate(), str(numpy.random.get_state())
        assert after != first
        undo = was.put_back()
        assert (random.getstate(), str(numpy.random.get_state())) == first
        draw()
        assert (random.getstate(), str(numpy.random.get_state())) == after
        undo()
        assert (random.getstate(), str(numpy.random.get_state())) == after


class FunctionalNorm(nn.Module):
    """Running statistics without a module of torch's, as several libraries of image models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.batch_norm(self.up(x), self.mean, self.variance, training=self.training)
        return x + self.down(functional.gelu(hidden))


class NormLeaf(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(functional.batch_norm(x, self.mean, self.variance, self.weight, training=self.training))


@under_each
@pytest.mark.parametrize("later", [False, True], ids=["always", "later"])
@pytest.mark.parametrize(
    "build", [lambda: Model(FunctionalNorm), stack(NormLeaf), stack(lambda: nn.BatchNorm1d(WIDTH))]
)
def test_running_statistics_are_updated_once(
    decision: LayerPolicy, build: Callable[[], nn.Module], later: bool
) -> None:
    def before(model: nn.Module, number: int) -> None:
        model.train(not later or number > 3)

    for order in (1, -1):
        exact(build, decision, before=before, order=order)


CALLS = [0]
NOISE = torch.Generator()
LOSSES: list[Tensor] = []


def global_noise(x: Tensor) -> Tensor:
    return x + torch.randn(WIDTH, generator=NOISE)


class Outside(Base):
    """Reads and writes variables that are none of its own."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        probabilities = torch.softmax(global_noise(x * self.weight), -1)
        LOSSES.append(probabilities.square().sum())
        return functional.gelu(probabilities) * CALLS[0]


@recomputed
def test_variables_that_a_module_names_outside_of_itself(decision: LayerPolicy) -> None:
    def build() -> nn.Module:
        NOISE.manual_seed(0)
        CALLS[0] = 0
        LOSSES.clear()
        return With(lambda: Layer(Outside))

    class With(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            losses = sum(LOSSES)
            LOSSES.clear()
            return x + losses

    exact(build, decision)


@recomputed
def test_variables_of_the_function_around_a_class(decision: LayerPolicy) -> None:
    def build() -> nn.Module:
        calls, scale = 0, [1.0]

        class Closed(Base):
            def forward(self, x: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                scale[0] += 0.1
                return functional.gelu(x * self.weight) * calls * scale[0]

        return stack(Closed)()

    exact(build, decision)


class Clamped(Base):
    """Writes through ``.data``, which no version counts."""

    def forward(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(x * self.weight, -1)
        probabilities.data.clamp_(min=0.05)
        return probabilities


class ClampedLayer(Layer):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.leaf(self.up(x))
        probabilities.data.clamp_(min=0.05)
        return x + self.down(probabilities)


@under_each
@pytest.mark.parametrize(
    "build", [stack(Clamped), lambda: Model(ClampedLayer), stack(lambda: nn.RReLU())], ids=["leaf", "layer", "rrelu"]
)
def test_writes_that_are_not_counted(decision: LayerPolicy, build: Callable[[], nn.Module]) -> None:
    expected, _ = run(build, None)
    found, _ = run(build, decision)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(found) == len(expected)


def test_an_attribute_that_is_gone_or_new_is_a_change() -> None:
    module = nn.Linear(2, 2)
    module.scale = None  # type: ignore[assignment]
    attributes = Attributes((module,), outside.Outside())
    assert attributes.unchanged()
    del module.scale
    assert not attributes.unchanged()
    module.offset = None  # type: ignore[assignment]
    assert not attributes.unchanged()
    attributes.put_back()
    assert attributes.unchanged()
    assert vars(module)["scale"] is None
    assert not hasattr(module, "offset")


def test_what_draws_no_random_numbers_is_known_by_itself_and_not_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    linear, dropout = nn.Linear(2, 2), nn.Dropout()
    assert draws_nothing(torch.mul, None, [x])
    assert draws_nothing(torch.Tensor.__mul__, None, [x])
    assert draws_nothing(nn.functional.silu, None, [x])
    assert draws_nothing(linear.forward, linear, [x])
    assert not draws_nothing(nn.functional.dropout, None, [x])
    assert not draws_nothing(dropout.forward, dropout, [x])
    assert not draws_nothing(torch.mul, None, [TwoTensor(x, x)])

    def silu(x: Tensor) -> Tensor:
        return x + torch.rand(2)

    activation = nn.SiLU()
    assert not draws_nothing(silu, None, [x])
    assert draws_nothing(activation.forward, activation, [x])
    monkeypatch.setattr(nn.functional, "silu", silu)
    assert not draws_nothing(activation.forward, activation, [x])
    monkeypatch.setattr(activation, "forward", silu)
    assert not draws_nothing(activation.forward, activation, [x])
