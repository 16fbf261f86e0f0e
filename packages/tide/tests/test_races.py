import random

import pytest
import torch
from llama import Shape, train
from offload import WAITS, offload

import tide


def side() -> torch.Stream:
    return torch.Stream("tide")


@pytest.mark.parametrize("missing", WAITS)
def test_a_missing_wait_is_reported_on_every_schedule(missing, expect_races):
    for seed in range(25):
        tide.clear_races()
        offload(random.Random(seed), missing)
        assert expect_races(), f"{missing}: nothing reported on schedule {seed}"


def test_the_correct_program_has_no_report_over_200_schedules():
    for seed in range(200):
        assert offload(random.Random(seed)) == 0
        assert tide.races() == [], seed


def test_a_report_names_both_accesses_with_stacks(expect_races):
    x = torch.zeros(8, device="tide")
    with side():
        x.add_(1)
    (race,) = expect_races()
    # add_ reads and writes what zero_ wrote: one pair of actions, one report.
    assert race.kind == "read after write"
    assert (race.first.what, race.first.agent) == ("aten::zero_", "stream 0")
    assert race.second.what == "aten::add"
    for access in (race.first, race.second):
        assert any(file.endswith("test_races.py") for file, _, _ in access.stack)
    assert race.first.stack[0][1] < race.second.stack[0][1]  # lines of this function
    with pytest.raises(tide.RaceError, match=r"test_races\.py"):
        tide.check_races()
    tide.clear_races()
    tide.check_races()


def test_a_report_from_backward_names_the_node(expect_races):
    x = torch.ones(8, device="tide", requires_grad=True)
    y = x.exp()
    with side():  # backward of exp runs on its forward's stream, this gradient is made elsewhere
        gradient = torch.ones(8, device="tide")
    y.backward(gradient)
    assert any("ExpBackward" in race.second.node for race in expect_races())


def test_streams_are_ordered_by_events_stream_waits_and_the_host():
    main, other = torch.accelerator.current_stream(), side()
    x = torch.zeros(8, device="tide")
    event = torch.Event("tide")
    event.record()
    other.wait_event(event)
    with other:
        x.add_(1)
    main.wait_stream(other)
    x.add_(1)
    torch.accelerator.synchronize()
    with side():
        x.add_(1)
        last = torch.Event("tide")
        last.record()
    while not last.query():
        pass
    x.add_(1)
    assert x[0].item() == 4


def test_two_reads_do_not_race():
    x = torch.zeros(8, device="tide")
    torch.accelerator.synchronize()
    with side():
        x + 1
    x + 1


def test_disjoint_parts_do_not_race_and_overlapping_ones_do(expect_races):
    x = torch.zeros(16, 16, device="tide")
    torch.accelerator.synchronize()
    with side():
        x[:, :8].add_(1)  # columns: the byte ranges interleave
    x[:, 8:].add_(1)
    assert expect_races() == []
    with side():
        x[:, 7:9].add_(1)
    assert len(expect_races()) == 2  # with both


def test_no_wait_before_copy_out_delivers_poison(expect_races):
    x = torch.full((100,), 3.0, device="tide")
    host = torch.zeros(100, pin_memory=True)
    with side():
        host.copy_(x, non_blocking=True)
    torch.accelerator.synchronize()
    assert host.isnan().all()
    assert expect_races()[0].kind == "read after write"


def test_no_wait_after_copy_back_finds_the_old_bytes(expect_races):
    host = torch.full((100,), 3.0).pin_memory()
    x = torch.zeros(100, device="tide")
    torch.accelerator.synchronize()
    with side():
        x.copy_(host, non_blocking=True)
    assert (x + 0).tolist() == [0.0] * 100
    assert expect_races()[0].kind == "read after write"


def test_freed_without_waiting_for_the_copy_delivers_poison(expect_races):
    x = torch.full((100,), 3.0, device="tide")
    address = x.data_ptr()
    host = torch.zeros(100, pin_memory=True)
    copying = side()
    copying.wait_stream(torch.accelerator.current_stream())
    with copying:
        host.copy_(x, non_blocking=True)
    del x
    y = torch.zeros(100, device="tide")
    assert y.data_ptr() == address
    torch.accelerator.synchronize()
    assert host.isnan().all()
    report = expect_races()[0]
    assert (report.kind, report.second.what) == ("write after read", "allocate")


def test_copy_back_into_memory_freed_too_early_damages_its_next_owner(expect_races):
    host = torch.full((100,), 3.0).pin_memory()
    x = torch.empty(100, device="tide")
    copying = side()
    copying.wait_stream(torch.accelerator.current_stream())
    with copying:
        x.copy_(host, non_blocking=True)
    del x
    y = torch.zeros(100, device="tide")
    torch.accelerator.synchronize()
    assert (y == 3).all()
    assert expect_races()[0].second.what == "allocate"


def test_copy_back_into_a_buffer_still_in_use(expect_races):
    host = torch.full((100,), 3.0).pin_memory()
    x = torch.ones(100, device="tide")
    torch.accelerator.synchronize()
    x * 2
    with side():
        x.copy_(host, non_blocking=True)
    (race,) = expect_races()
    assert (race.kind, race.second.what) == ("write after read", "copy host to device")


def test_reading_pinned_memory_before_the_copy_has_ended(expect_races):
    x = torch.full((100,), 3.0, device="tide")
    host = torch.zeros(100).pin_memory()
    host.copy_(x, non_blocking=True)
    assert host.sum().item() == 0  # still the old bytes
    (race,) = expect_races()
    assert (race.kind, race.second.agent) == ("read after write", "host")
    assert race.second.what == "host read by aten::sum"
    torch.accelerator.synchronize()
    tide.clear_races()
    assert host.sum().item() == 300
    assert expect_races() == []


def test_writing_pinned_memory_before_the_copy_has_ended(expect_races):
    host = torch.zeros(100).pin_memory()
    x = torch.empty(100, device="tide")
    x.copy_(host, non_blocking=True)
    host.view(10, 10)[2:].add_(1)
    (race,) = expect_races()
    assert (race.kind, race.second.what) == ("write after read", "host write by aten::add_")


def test_looking_at_pinned_memory_without_reading_it_is_no_access():
    x = torch.full((100,), 3.0, device="tide")
    host = torch.zeros(100).pin_memory()
    host.copy_(x, non_blocking=True)
    assert host.view(10, 10).t().is_pinned() and host.detach().shape == (100,)
    torch.empty_like(host)
    torch.accelerator.synchronize()


def test_a_recorded_use_orders_the_next_owner():
    x = torch.ones(100, device="tide")
    other = side()
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        x.add_(1)
    x.record_stream(other)
    address = x.data_ptr()
    del x
    tide.advance(10**9)
    assert torch.ones(100, device="tide").data_ptr() == address


def test_training_with_checkpoint_has_no_report():
    train(Shape(dropout=0.1, checkpointed=True), "tide", steps=2, autocast=True)
    assert tide.races() == []


def test_detection_can_be_turned_off():
    tide.configure(races=False)
    x = torch.zeros(8, device="tide")
    with side():
        x.add_(1)
    assert tide.races() == []
