"""What the devices of a node share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.cost.device import Device
from lowtide.cost.devices import find_device
from lowtide.planner.make import make_plan
from lowtide.planner.node import in_node, sharing_note
from lowtide.planner.pipeline import Pipeline, even_pipeline
from lowtide.planner.simulate import simulate
from lowtide.policy import LayerPolicy, Policy, Swap
from lowtide.trace.layout import Layout
from support.hand_made_traces import DEVICE, llama_trace

TRACE = llama_trace(4)
EVERYTHING = Policy((LayerPolicy(default=Swap(prefetch=2)),) * 4)
SWITCHED = replace(DEVICE, link_sharing=2)
"""Two devices share a link."""


def copies(device: Device, ranks: int) -> float:
    """The seconds of all copies out, where so many ranks run."""
    trace = replace(TRACE, layout=Layout(shard=ranks))
    stage = simulate(trace, EVERYTHING, device, details=True).stages[0]
    return sum(span.seconds - device.copy_latency for span in stage.spans if span.kind == "copy out")


def test_two_devices_on_one_link_have_half_of_it_each() -> None:
    assert copies(SWITCHED, 1) == copies(DEVICE, 8)
    assert copies(SWITCHED, 2) == pytest.approx(2 * copies(DEVICE, 2))
    assert copies(SWITCHED, 16) == pytest.approx(copies(SWITCHED, 2))


def test_the_hosts_memory_is_shared_by_the_devices_of_a_node_and_not_by_those_of_others() -> None:
    device = replace(DEVICE, host_bandwidth=4 * DEVICE.link_out)
    assert copies(device, 4) == pytest.approx(copies(DEVICE, 4))
    assert copies(device, 8) == pytest.approx(2 * copies(DEVICE, 8))
    assert copies(device, 64) == pytest.approx(copies(device, 8))


def test_the_smaller_share_counts() -> None:
    device = replace(SWITCHED, host_bandwidth=1.6 * DEVICE.link_out)
    assert device.in_run(2).link_out == pytest.approx(DEVICE.link_out / 2)
    assert device.in_run(8).link_in == pytest.approx(DEVICE.link_in / 5)


def test_pipeline_stages_of_a_node_swap_together_too() -> None:
    pipeline = even_pipeline(4, 2)
    assert in_node(SWITCHED, TRACE, pipeline).link_out == DEVICE.link_out / 2
    assert in_node(SWITCHED, TRACE, Pipeline()).link_out == DEVICE.link_out


def test_what_is_shared_is_shared_once() -> None:
    once = SWITCHED.in_run(8)
    assert once.in_run(8) is once
    assert DEVICE.in_run(8) is DEVICE


def test_a_plan_with_swaps_says_what_each_device_has_of_the_link() -> None:
    trace = replace(TRACE, layout=Layout(shard=8))
    budget = simulate(trace, Policy((LayerPolicy(),) * 4), DEVICE).reserved - (200 << 20)
    alone, shared = (make_plan(trace, budget, device, recompute=False) for device in (DEVICE, SWITCHED))
    assert shared.simulation.seconds > alone.simulation.seconds
    assert shared.bound is not None
    assert alone.bound is not None
    assert alone.bound <= shared.bound <= shared.simulation.seconds
    note = sharing_note(SWITCHED, trace, Pipeline())
    assert "the 8 devices of a node are taken to swap at the same time: each then has 12.5 GB/s" in note
    assert note in shared.notes
    assert not any("swap at the same time" in one for one in alone.notes)


def test_a_gb200_has_its_share_of_a_chip_to_chip_link_and_an_h100_all_of_its_own() -> None:
    gb200, h100 = find_device("gb200"), find_device("h100")
    assert gb200.in_run(1).link_out == 450e9
    assert gb200.in_run(72).link_out == 225e9
    assert h100.in_run(8).link_out == h100.link_out
