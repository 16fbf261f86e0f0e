import pytest
import torch
from llama import Shape, train
from reference import RMSNorm

import tide


@pytest.mark.parametrize("autocast", [False, True])
def test_training_is_bitwise_the_same_in_both_modes(autocast):
    losses, parameters = train(Shape(), "tide", autocast=autocast)
    tide.configure(mode="async")
    again, same_parameters = train(Shape(), "tide", autocast=autocast)
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(parameters, same_parameters, strict=True))
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("autocast", [False, True])
def test_losses_are_those_of_the_cpu(autocast, monkeypatch):
    shape = Shape(key_heads=4 if autocast else 2)
    losses, _ = train(shape, "tide", autocast=autocast)
    if autocast:  # see reference.py
        monkeypatch.setattr(torch.nn, "RMSNorm", RMSNorm)
    expected, _ = train(shape, "cpu", autocast=autocast)
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"autocast {autocast}: largest difference of five losses to the CPU {difference:.1e}")
    assert difference < 1e-5


@pytest.mark.parametrize("mode", ["virtual", "async"])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoint_with_dropout_is_bitwise(autocast, mode):
    tide.configure(mode=mode)
    plain = train(Shape(dropout=0.1), "tide", autocast=autocast)
    recomputed = train(Shape(dropout=0.1, checkpointed=True), "tide", autocast=autocast)
    assert plain[0] == recomputed[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], recomputed[1], strict=True))
    assert plain[0] != train(Shape(), "tide", autocast=autocast)[0]  # dropout did something


def test_checkpoint_without_the_random_state_is_not_bitwise(monkeypatch):
    plain = train(Shape(dropout=0.1), "tide")
    monkeypatch.setattr(torch.tide, "set_rng_state", lambda *arguments: None)
    assert train(Shape(dropout=0.1, checkpointed=True), "tide")[0] != plain[0]


def test_checkpoint_lowers_the_peak():
    shape = Shape(width=128, hidden=512, sequence=64, batch=8)
    peaks = []
    for checkpointed in (False, True):
        torch.accelerator.reset_peak_memory_stats()
        train(Shape(**{**shape.__dict__, "checkpointed": checkpointed}), "tide", steps=2)
        peaks.append(torch.accelerator.max_memory_allocated())
    assert peaks[1] < 0.7 * peaks[0]
