import gc

import pytest
import torch
from llama import Shape, build, step

import tide

MIB = 2**20


def allocated() -> int:
    return torch.accelerator.memory_allocated()


def reserved() -> int:
    return torch.accelerator.memory_reserved()


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="tide")


def copy_stream() -> torch.Stream:
    return torch.Stream("tide")


def test_requests_round_and_segments_grow_like_cudas():
    for request, held, segment in [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (9 * MIB, 9 * MIB, 20 * MIB),
        # A rest of at most 1 MiB of a large segment is not split off.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
    ]:
        torch.accelerator.empty_cache()
        x = block(request)
        assert (allocated(), reserved()) == (held, segment), request
        del x
        assert (allocated(), reserved()) == (0, segment), request


def test_a_freed_block_is_reused_at_once_on_its_stream():
    x = block(4096)
    address = x.data_ptr()
    del x
    assert block(4096).data_ptr() == address
    other = copy_stream()
    with other:
        assert block(4096).data_ptr() != address
    assert torch.accelerator.memory_stats()["segment.all.current"] == 2


def test_best_fit_splits_and_merges():
    a, b, c = block(600), block(2048), block(600)
    hole = b.data_ptr()
    del b
    d = block(700)
    assert d.data_ptr() == hole  # the rest of the hole stays free
    e = block(1024)
    assert e.data_ptr() == hole + 1024
    del a, c, d, e
    stats = torch.accelerator.memory_stats()
    assert stats["inactive_split.all.current"] == 0
    assert stats["allocation.all.allocated"] == 5
    assert block(2 * MIB - 512).data_ptr() > 0
    assert torch.accelerator.memory_stats()["num_device_alloc"] == 2


def test_peak_and_counts_are_reported_and_reset():
    x = block(5000)
    y = block(3000)
    del x
    assert torch.accelerator.max_memory_allocated() == 5120 + 3072
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 3072
    assert torch.accelerator.memory_stats()["allocated_bytes.all.freed"] == 5120
    assert torch.accelerator.max_memory_reserved() == 2 * MIB
    free, total = torch.accelerator.get_memory_info()
    assert total - free == 2 * MIB
    del y


def test_capacity_is_hard_and_the_message_says_how_full_it_is():
    tide.configure(capacity=64 * MIB)
    x = block(40 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as error:
        block(30 * MIB)
    text = str(error.value)
    assert "Tried to allocate 30.00 MiB" in text
    assert "total capacity of 64.00 MiB of which 24.00 MiB is free" in text
    assert "40.00 MiB is allocated by PyTorch" in text
    assert torch.accelerator.memory_stats()["num_ooms"] == 1
    del x
    block(60 * MIB)


def test_cached_segments_are_given_back_before_raising():
    tide.configure(capacity=64 * MIB)
    block(40 * MIB)
    assert reserved() == 40 * MIB
    x = block(50 * MIB)
    assert reserved() == 50 * MIB
    stats = torch.accelerator.memory_stats()
    assert stats["num_alloc_retries"] == 1 and stats["num_ooms"] == 0
    del x


def test_a_recorded_use_holds_a_freed_block_until_the_host_has_passed_it():
    side = copy_stream()
    x = block(32 * MIB)
    address = x.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)
    x.record_stream(side)
    busy_until = tide.idle_at(side)
    assert busy_until > tide.now()
    del x
    assert allocated() == 0
    assert block(32 * MIB).data_ptr() != address
    tide.advance(busy_until - tide.now())
    held = block(32 * MIB), block(32 * MIB)
    assert address in (t.data_ptr() for t in held)


def test_out_of_memory_waits_for_recorded_uses():
    tide.configure(capacity=40 * MIB)
    side = copy_stream()
    x = block(32 * MIB)
    address = x.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)
    x.record_stream(side)
    del x
    busy_until = tide.idle_at(side)
    assert block(32 * MIB).data_ptr() == address
    assert tide.now() >= busy_until
    assert torch.accelerator.memory_stats()["num_sync_all_streams"] == 1


def test_freed_blocks_are_poisoned():
    x = torch.zeros(1000, device="tide")
    del x
    assert torch.empty(1000, device="tide").isnan().all().item()
    tide.configure(poison=False)
    x = torch.zeros(1000, device="tide")
    del x
    assert (torch.empty(1000, device="tide") == 0).all().item()


def test_pinned_memory_is_cached_capped_and_counted():
    tide.configure(pinned_capacity=MIB)
    x = torch.empty(3 * 2**17, dtype=torch.uint8, pin_memory=True)
    assert x.is_pinned() and not torch.empty(4).is_pinned()
    assert tide.pinned_memory_stats()["allocated"] == MIB // 2
    address = x.data_ptr()
    del x
    stats = tide.pinned_memory_stats()
    assert (stats["allocated"], stats["reserved"], stats["peak"]) == (0, MIB // 2, MIB // 2)
    held = torch.empty(MIB // 2, dtype=torch.uint8, pin_memory=True)
    assert held.data_ptr() == address
    torch.empty(MIB // 2, dtype=torch.uint8).pin_memory()
    with pytest.raises(RuntimeError, match="could not pin 1048576 bytes"):
        torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    del held
    torch.empty(MIB, dtype=torch.uint8, pin_memory=True)


def test_a_pinned_block_in_flight_is_not_reused():
    tide.configure(preset="h100")
    x = torch.ones(MIB, device="tide")
    host = torch.empty(MIB, pin_memory=True)
    address = host.data_ptr()
    host.copy_(x, non_blocking=True)
    del host
    other = torch.empty(MIB, pin_memory=True)
    assert other.data_ptr() != address
    torch.accelerator.synchronize()
    assert torch.empty(MIB, pin_memory=True).data_ptr() == address


SHAPE = Shape(width=128, hidden=512, sequence=128, batch=8, vocabulary=512)


def prepare():
    model, tokens = build(SHAPE, "tide")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer, tokens, autocast=True)  # optimizer state and caches exist from here on
    gc.collect()
    return model, tokens, optimizer


def test_a_step_at_three_quarters_of_its_peak_runs_out_of_memory_and_leaks_nothing():
    model, tokens, optimizer = prepare()
    before = allocated()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    step(model, optimizer, tokens, autocast=True)
    peak = torch.accelerator.max_memory_reserved()
    assert allocated() == before
    torch.accelerator.empty_cache()
    tide.configure(capacity=peak * 3 // 4)
    with pytest.raises(torch.OutOfMemoryError):
        step(model, optimizer, tokens, autocast=True)
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    assert allocated() == before
    tide.configure(capacity=peak + 20 * MIB)
    step(model, optimizer, tokens, autocast=True)


def test_a_step_fits_into_exactly_its_own_peak():
    model, tokens, optimizer = prepare()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    step(model, optimizer, tokens, autocast=True)
    peak = torch.accelerator.max_memory_reserved()
    torch.accelerator.empty_cache()
    tide.configure(capacity=peak)
    step(model, optimizer, tokens, autocast=True)
    tide.configure(capacity=peak)
