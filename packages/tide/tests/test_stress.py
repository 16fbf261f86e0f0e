"""Four threads at once: allocations, kernels, copies, out-of-memory, armed faults."""

import faulthandler
import gc
import os
import random
import threading
import time

import pytest
import torch

import tide
from tide import faults

SECONDS = float(os.environ.get("TIDE_STRESS_SECONDS", "20"))


class Worker(threading.Thread):
    def __init__(self, seed: int, until: float) -> None:
        super().__init__()
        self.choices = random.Random(seed)
        self.until = until
        self.rounds = self.failures = self.wrong = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            compute, copies = torch.Stream("tide"), torch.Stream("tide")
            while time.monotonic() < self.until:
                self.rounds += 1
                try:
                    with compute:
                        self.round(compute, copies)
                except torch.OutOfMemoryError:
                    self.failures += 1
                except RuntimeError as error:
                    if "a fault armed by the test" not in str(error) and "pin" not in str(error):
                        raise
                    self.failures += 1
                if self.choices.random() < 0.02:
                    self.arm()
        except BaseException as error:
            self.error = error

    def arm(self) -> None:
        number = self.choices.randint(1, 20)
        self.choices.choice([faults.fail_allocation, faults.fail_copy, faults.reorder_copy])(number)

    def round(self, compute: torch.Stream, copies: torch.Stream) -> None:
        value = float(self.choices.randint(1, 9))
        size = self.choices.choice([100, 5000, 300_000, 1_500_000])
        x = torch.full((size,), value, device="tide")
        y = (x * 2 + 1).neg_()
        host = torch.empty(size, pin_memory=True)
        copies.wait_stream(compute)
        with copies:
            host.copy_(y, non_blocking=True)
        if self.choices.random() < 0.5:
            y.record_stream(copies)
            del y
        else:
            compute.wait_stream(copies)
            del y
        z = torch.zeros(size, device="tide")  # takes the block if it may
        done = torch.Event("tide")
        done.record(copies)
        done.synchronize()
        expected = -(2 * value + 1)
        self.wrong += int(not bool((host == expected).all()))
        z.copy_(host, non_blocking=True)
        self.wrong += int((z + x).sum().item() != size * (expected + value))
        if self.choices.random() < 0.01:
            torch.accelerator.empty_cache()


@pytest.mark.parametrize("mode", ["virtual", "async"])
def test_four_threads_find_no_wrong_value_no_leak_and_no_hang(mode):
    tide.configure(mode=mode, capacity=200 * 2**20, pinned_capacity=64 * 2**20)
    faulthandler.dump_traceback_later(SECONDS + 60, exit=True)  # a hang is a failure
    until = time.monotonic() + SECONDS / 2
    workers = [Worker(seed, until) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    faulthandler.cancel_dump_traceback_later()
    torch.accelerator.synchronize()
    gc.collect()
    rounds = sum(worker.rounds for worker in workers)
    failures = sum(worker.failures for worker in workers)
    print(f"{mode}: {rounds} rounds, {failures} failures met, {SECONDS / 2:.0f} s, 4 threads")
    assert [worker.error for worker in workers] == [None] * 4
    assert sum(worker.wrong for worker in workers) == 0
    assert failures > 0
    del workers
    gc.collect()
    assert torch.accelerator.memory_allocated() == 0
    assert tide.pinned_memory_stats()["allocated"] == 0
    assert tide.races() == []
