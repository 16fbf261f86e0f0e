"""Seconds of a kernel: measured where they are, else by what bounds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cost.device import Device
from lowtide.cost.devices import DEVICES
from lowtide.cost.kernel import copy_seconds, fingerprint, kernel_seconds
from lowtide.trace.trace import Kernel

PLAIN = Device(
    name="plain", capacity=1 << 30, flops={"float32": 1e12, "bfloat16": 4e12}, memory_bandwidth=1e9, link_out=1e8,
    link_in=2e8, interconnect=1e9, network=1e8, kernel_latency=1e-6, copy_latency=2e-6, collective_latency=3e-6,
    devices_per_node=4,
)  # fmt: skip


def test_a_kernel_takes_the_longer_of_its_computation_and_its_traffic() -> None:
    assert kernel_seconds(PLAIN, Kernel("aten::mm", flops=10**12, touched=10)) == pytest.approx(1 + 1e-6)
    assert kernel_seconds(PLAIN, Kernel("aten::mm", flops=10, touched=10**9)) == pytest.approx(1 + 1e-6)
    assert kernel_seconds(PLAIN, Kernel("aten::mm", dtype="bfloat16", flops=10**12)) == pytest.approx(0.25 + 1e-6)
    assert kernel_seconds(PLAIN, Kernel("aten::mm", dtype="float16", flops=10**12)) == pytest.approx(0.25 + 1e-6)


def test_a_kinds_own_efficiency_comes_before_its_classs() -> None:
    device = replace(PLAIN, efficiency={"matmul": 0.5, "aten::bmm": 0.25, "memory": 0.1})
    assert kernel_seconds(device, Kernel("aten::mm", flops=10**12)) == pytest.approx(2 + 1e-6)
    assert kernel_seconds(device, Kernel("aten::bmm", flops=10**12)) == pytest.approx(4 + 1e-6)
    assert kernel_seconds(device, Kernel("aten::add", touched=10**9)) == pytest.approx(10 + 1e-6)


def test_what_was_measured_comes_before_what_is_estimated() -> None:
    kernel = Kernel("aten::mm", dtype="bfloat16", shape="bf16[2,3],bf16[3,4]", flops=48)
    device = replace(PLAIN, measured={fingerprint(kernel): 0.5})
    assert kernel_seconds(device, kernel) == 0.5
    assert kernel_seconds(device, kernel._replace(seconds=0.25)) == 0.25


@pytest.mark.parametrize("kind", ["aten::view", "aten::t", "aten::detach", "aten::empty", "aten::_unsafe_view"])
def test_views_and_allocations_are_free(kind: str) -> None:
    assert kernel_seconds(PLAIN, Kernel(kind, touched=10**9)) == 0


def test_copies_take_their_own_links() -> None:
    device = replace(PLAIN, efficiency={"link_in": 0.5})
    assert copy_seconds(device, 10**8, "out") == pytest.approx(1 + 2e-6)
    assert copy_seconds(device, 10**8, "in") == pytest.approx(1 + 2e-6)


def collective(kind: str, ranks: int, message: int = 10**9, stride: int = 1) -> float:
    return kernel_seconds(PLAIN, Kernel(f"c10d::{kind}", ranks=ranks, message=message, stride=stride))


def test_a_ring_sends_all_but_its_own_part_and_an_all_reduce_does_it_twice() -> None:
    assert collective("_allgather_base_", 4) == pytest.approx(0.75 + 9e-6)
    assert collective("_reduce_scatter_base_", 4) == pytest.approx(0.75 + 9e-6)
    assert collective("allreduce_", 4) == pytest.approx(2 * (0.75 + 9e-6))
    assert collective("alltoall_base_", 4) == pytest.approx(0.75 + 9e-6)
    assert collective("broadcast_", 4) == pytest.approx(1 + 9e-6)
    assert collective("allreduce_", 1) == pytest.approx(1e-6)


def test_a_group_of_several_nodes_is_bound_by_the_network() -> None:
    assert collective("allgather_", 8) == pytest.approx(7 / 8 / 0.4 + 21e-6)
    assert collective("alltoall_", 8) == pytest.approx(0.5 / 0.1 + 21e-6)


def test_a_send_is_one_step_over_the_link_that_the_group_has() -> None:
    assert collective("send", 4) == pytest.approx(1 + 3e-6)
    assert collective("recv_", 8) == pytest.approx(10 + 3e-6)


def test_a_group_whose_ranks_are_apart_uses_the_network() -> None:
    """A node has four devices: ranks 0, 4, 8, 12 are on four nodes; 0, 2, 4, 6 on two."""
    assert collective("allgather_", 4, stride=4) == pytest.approx(0.75 / 0.1 + 9e-6)
    assert collective("allgather_", 4, stride=2) == pytest.approx(0.75 / 0.2 + 9e-6)
    assert collective("allgather_", 2, stride=2) == pytest.approx(0.5 / 1 + 3e-6)
    assert collective("alltoall_", 4, stride=4) == pytest.approx(0.75 / 0.1 + 9e-6)
    assert collective("alltoall_", 4, stride=2) == pytest.approx(0.5 / 0.1 + 9e-6)
    assert collective("send", 2, stride=8) == pytest.approx(10 + 3e-6)


def test_functional_collectives_are_the_same_ones() -> None:
    for name in ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_to_all_single"):
        same = {"all_gather_into_tensor": "allgather_", "all_reduce": "allreduce_"}.get(name, "_reduce_scatter_base_")
        found = kernel_seconds(PLAIN, Kernel(f"_c10d_functional::{name}", ranks=4, message=10**9))
        assert found == pytest.approx(collective(same, 4))


@given(
    device=st.sampled_from(list(DEVICES.values())),
    kind=st.sampled_from(["aten::mm", "aten::add", "aten::_scaled_dot_product_flash_attention_for_cpu"]),
    flops=st.integers(0, 10**15),
    touched=st.integers(0, 10**12),
)
def test_more_work_never_takes_less_time_and_never_less_than_the_peak_allows(
    device: Device, kind: str, flops: int, touched: int
) -> None:
    kernel = Kernel(kind, dtype="bfloat16", flops=flops, touched=touched)
    seconds = kernel_seconds(device, kernel)
    assert seconds >= max(flops / device.flops["bfloat16"], touched / device.memory_bandwidth)
    assert kernel_seconds(device, kernel._replace(flops=2 * flops, touched=2 * touched)) >= seconds
