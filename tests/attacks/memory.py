"""Memory that must come back: dropped graphs, many runs, long runs."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from attacks.harness import TIDE, Found, Side, attack
from attacks.parts import WIDTH, Net, stack
from attacks.treatments import APPLIED, EVERY, TREATMENTS
from lowtide.runtime.limits import Limits

__all__: list[str] = []


class Diverging(nn.Module):
    """Takes another way in evaluation than in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.training:
            y = self.dropout(y)
        return x + torch.tanh(self.second(torch.softmax(y, -1)))


def held(device: torch.device) -> int:
    gc.collect()
    return int(torch.accelerator.memory_allocated()) if device.type == "tide" else 0


def grows(figures: list[Any]) -> None:
    if figures[-1] > figures[2]:
        raise Found("leaked", f"{figures[-1] - figures[2]} more after {len(figures) - 3} steps")


@attack("a forward in evaluation mode whose graph is dropped: its outputs were held for ever", treatments=EVERY,
        devices=TIDE)  # fmt: skip
def dropped_graph(side: Side) -> None:
    model = stack(Diverging).to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = side.start(model, optimizer)
    figures = []
    for step in range(10):

        def one(step: int = step) -> None:
            model.train()
            optimizer.zero_grad()
            loss = model(side.batch(step, 64, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            side.record(f"loss {step}", loss)
            model.eval()
            model(side.batch(step, 64, WIDTH))  # with gradients, and never used

        run.step(one)
        optimizer.zero_grad()
        if step != 6:  # where an adaptive run begins with its plan
            figures.append(held(side.device))
    if side.treatment is not None and not side.treatment.adapt:
        grows(figures)


@attack("every graph is dropped before its backward", treatments=APPLIED, devices=TIDE)
def only_forwards(side: Side) -> None:
    model = stack().to(side.device)
    side.start(model)
    model(side.batch(0, 64, WIDTH)).sum().backward()
    model.zero_grad()
    figures = []
    for step in range(10):
        side.record(f"loss {step}", model(side.batch(step, 64, WIDTH)).square().mean())
        figures.append(held(side.device))
    grows(figures)


@attack("applied and removed forty times: objects, files, threads and bytes", treatments=("swap",), devices=TIDE)
def many_handles(side: Side) -> None:
    model = stack().to(side.device)
    side.models.append(model)
    figures: list[tuple[int, ...]] = []
    for turn in range(40):
        if side.treated:
            policy = TREATMENTS[APPLIED[turn % len(APPLIED)]].policy(3)
            handle = lowtide.apply(model, policy, limits=Limits(minimum_bytes=1))
            for _ in range(2):
                model(side.batch(turn, 8, 16, WIDTH)).square().mean().backward()
            model.zero_grad()
            handle.remove()
            del handle
        if turn % 8 == 7:
            bytes_held = held(side.device)
            files, objects = len(os.listdir("/proc/self/fd")), len(gc.get_objects())
            figures.append((bytes_held, threading.active_count(), files, objects // 2000))
    if figures[-1] > figures[1]:
        raise Found("leaked", f"bytes, threads, files, objects: {figures}")


@attack("a long run with changing lengths, and no receipt is asked for: bytes and objects must not grow", devices=TIDE,
        treatments=("swap", "operators", "disk"))  # fmt: skip
def long_run(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = side.start(model, optimizer)
    figures = []
    for step in range(60):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            loss = model(side.batch(step, 8, (16, 12, 16, 7)[step % 4], WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)
        if step % 12 == 11:
            optimizer.zero_grad()
            figures.append((held(side.device), len(gc.get_objects()) // 500))
    grows_in_any(figures)


def grows_in_any(figures: list[tuple[int, ...]]) -> None:
    if any(last > early for last, early in zip(figures[-1], figures[1], strict=True)):
        raise Found("leaked", f"from {figures[1]} to {figures[-1]}")


@attack("a long adaptive run in which allocations fail: events, objects and bytes stay bounded", devices=TIDE,
        treatments=("adapt steps",))  # fmt: skip
def long_adaptive_run(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    figures = []
    for step in range(80):

        def one(step: int = step) -> None:
            if step > 8 and step % 7 == 0:
                run.fail_allocation(1 + step % 60)
            optimizer.zero_grad()
            loss = model(side.batch(step, 16, 16, WIDTH)).square().mean()
            loss.backward()
            run.heal()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)
        if step % 20 == 19:
            optimizer.zero_grad()
            figures.append((held(side.device),))
    grows_in_any(figures)


@attack("a handle that is forgotten, with its model", treatments=APPLIED, devices=TIDE)
def forgotten_handle(side: Side) -> None:
    model = Net().to(side.device)
    if side.treatment is not None:
        lowtide.apply(model, side.treatment.policy(3), limits=Limits(minimum_bytes=1))
    for step in range(3):
        loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
        loss.backward()
        side.record(f"loss {step}", loss)
