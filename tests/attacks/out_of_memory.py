"""Devices that are full, errors that mean it under another name, and errors that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attacks.harness import TIDE, Attack, Found, Run, Side, attack
from attacks.parts import WIDTH, Block, Net, without_dropout
from attacks.treatments import ADAPTED

__all__: list[str] = []

MESSAGES = {
    "cuda": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cudnn": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "npu": "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.96 GiB total capacity)",
    "hip": "HIP out of memory. Tried to allocate 20.00 MiB",
    "xpu": "XPU out of memory. Tried to allocate 20.00 MiB",
}
"""What backends say, in a plain RuntimeError, where the device has no room."""
OTHERS = {
    "shapes": "shapes (3,) and (4,) do not fit",
    "driver": "CUDA error: out of memory",  # which may be pinned memory, or an operator long ago
    "host": "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes",
}
"""What does not mean that."""


def raising_once(side: Side, error: Callable[[], Exception], *, in_backward: bool) -> None:
    """Train; in the eighth step a layer raises in the first attempt."""
    model = without_dropout(Net()).to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)

    def fail(*_: Any) -> None:
        raise error()

    for step in range(10):
        begun: list[int] = []

        def one(step: int = step, begun: list[int] = begun) -> None:
            begun.append(1)
            optimizer.zero_grad()
            layer: Any = model.layers[1]
            hook = None
            if side.treated and step == 7 and len(begun) == 1:
                hook = layer.down.weight.register_hook(fail) if in_backward else layer.register_forward_pre_hook(fail)
            try:
                loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
                loss.backward()
            finally:
                if hook is not None:
                    hook.remove()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)


def message(name: str, in_backward: bool) -> Attack:
    def program(side: Side) -> None:
        raising_once(side, lambda: RuntimeError(MESSAGES[name]), in_backward=in_backward)

    where = "backward" if in_backward else "forward"
    return attack(
        f"out of memory as {MESSAGES[name][:40]!r} in {where}: the step is repeated", name=f"message_{name}_{where}",
        treatments=("adapt steps",), devices=TIDE,
    )(program)  # fmt: skip


IN_FORWARD = tuple(message(name, False) for name in MESSAGES)
IN_BACKWARD = tuple(message(name, True) for name in ("cuda", "cublas", "npu"))


def other_error(name: str) -> Attack:
    def program(side: Side) -> None:
        if not side.treated:
            return
        try:
            raising_once(side, lambda: RuntimeError(OTHERS[name]), in_backward=False)
        except RuntimeError as error:
            if str(error) != OTHERS[name]:
                raise Found("crashed", f"another error: {error}") from error
        else:
            raise Found("silently_wrong", "the error was swallowed")
        finally:  # there is nothing to compare it with
            side.values.clear()
            side.models.clear()
            side.optimizers.clear()

    return attack(
        f"{OTHERS[name][:40]!r} reaches the user as it is, and the step is not repeated", name=f"other_error_{name}",
        treatments=ADAPTED, devices=TIDE,
    )(program)  # fmt: skip


OTHER_ERRORS = tuple(other_error(name) for name in OTHERS)


# Devices that are too small.


def rehearsed(side: Side, program: Callable[[Side], None]) -> int:
    """The most that the program allocates by itself."""
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    with Side(side.device.type, None) as other:
        program(other)
    return int(torch.accelerator.max_memory_reserved())


def plain_loop(side: Side, run: Callable[..., Run], steps: int = 10, **settings: Any) -> None:
    torch.manual_seed(4)
    model = Net(lambda: Block(64), 4, 64).to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begun = run(model, optimizer, **settings)
    for step in range(steps):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            loss = model(side.batch(step, 32, 32, 64)).square().mean()
            loss.backward()
            optimizer.step()
            side.record(f"loss {step}", loss)

        begun.step(one)


def tight(share: float) -> Attack:
    def program(side: Side) -> None:
        peak = rehearsed(side, lambda other: plain_loop(other, other.start, 3))
        if side.treated:
            import tide

            torch.accelerator.empty_cache()
            tide.configure(capacity=int(peak * share))
        plain_loop(side, side.start)

    return attack(
        f"a device with {share:.0%} of what the loop needs", name=f"tight_{share * 100:.0f}", treatments=ADAPTED,
        devices=TIDE,
    )(program)  # fmt: skip


TIGHT = tuple(tight(share) for share in (0.9, 0.75, 0.6, 0.5))


class Encoder(nn.Module):
    """torch's own pre-norm encoder, where queries, keys and values are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def budgeted(share: float) -> Attack:
    def loop(side: Side, steps: int, **settings: Any) -> None:
        torch.manual_seed(4)
        model = Encoder().to(side.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = side.start(model, optimizer, **settings)
        for step in range(steps):

            def one(step: int = step) -> None:
                optimizer.zero_grad()
                loss = model(side.batch(step, 8, 32, 64)).square().mean()
                loss.backward()
                optimizer.step()
                side.record(f"loss {step}", loss)

            run.step(one)

    def program(side: Side) -> None:
        peak = rehearsed(side, lambda other: loop(other, 3))
        loop(side, 8, **({"budget": int(peak * share), "swap": False} if side.treated else {}))

    return attack(
        f"nn.TransformerEncoder within {share:.0%} of its memory: `q is k is v` was lost at the switch",
        name=f"encoder_budget_{share * 100:.0f}", treatments=ADAPTED, devices=TIDE,
    )(program)  # fmt: skip


BUDGETED = tuple(budgeted(share) for share in (0.9, 0.6, 0.4))


@attack("remove() while there is no room for what the rescue sent away: exact, or a typed error and a second remove()",
        devices=TIDE, treatments=("adapt steps",))  # fmt: skip
def removed_without_room(side: Side) -> None:
    from lowtide.errors import LowtideError

    peak = rehearsed(side, lambda other: plain_loop(other, other.start, 3))
    if side.treated:
        import tide

        torch.accelerator.empty_cache()
        tide.configure(capacity=int(peak * 0.7))
    plain_loop(side, side.start)
    if not side.treated:
        return
    import tide

    torch.accelerator.empty_cache()
    tide.configure(capacity=int(torch.accelerator.memory_allocated()) + 4096)
    try:
        for run in side.adaptives:
            run.remove()
    except LowtideError:
        pass
    finally:
        tide.configure(capacity=4 << 30)


def failing_batch_norm(side: Side, number: int) -> None:
    """Batch norms, and an allocation that fails after one of them has written."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH)
            self.second = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(self.norm(self.first(x)).relu())

    model = Net(Layer).to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = side.start(model, optimizer)
    for step in range(10):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            if step == 8:
                run.fail_allocation(number)
            loss = model(side.batch(step, 64, WIDTH)).square().mean()
            loss.backward()
            run.heal()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)


def written(number: int) -> Attack:
    return attack(
        "an operator had written when memory was missing: the internal exception Repeat reached the user",
        name=f"written_before_{number}", treatments=ADAPTED, devices=TIDE,
    )(lambda side: failing_batch_norm(side, number))  # fmt: skip


WRITTEN = tuple(written(number) for number in (3, 6, 9, 13, 18))


@attack("batch norm, autocast, a scaler, a schedule, clipping and shrinking memory at once", devices=TIDE,
        treatments=("adapt steps",), seconds=120)  # fmt: skip
def everything_at_once(side: Side) -> None:
    import random

    draw = random.Random(5)
    model = Net(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(16), Block())).to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    scaler = torch.amp.GradScaler(side.device.type, init_scale=256.0, growth_interval=5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, 40, cycle_momentum=False)
    run = side.start(model, optimizer)
    for step in range(24):
        sizes = [draw.choice((8, 16, 24)) for _ in range(2)]
        number, hit = draw.randint(1, 150), draw.random() < 0.5

        def one(step: int = step, sizes: Any = sizes, number: int = number, hit: bool = hit) -> None:
            if hit and step > 7:
                run.fail_allocation(number)
            optimizer.zero_grad(set_to_none=True)
            for part, size in enumerate(sizes):
                with torch.autocast(side.device.type, torch.bfloat16):
                    loss = model(side.batch(10 * step + part, size, 16, WIDTH)).float().square().mean() / 2
                scaler.scale(loss).backward()
                side.record(f"loss {step}.{part}", loss)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.heal()
            scaler.step(optimizer)

        run.step(one)
        scaler.update()
        schedule.step()
