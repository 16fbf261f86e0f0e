"""Rates and efficiencies are found from times alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cost.device import Device
from lowtide.cost.fit import Sample, fit
from lowtide.cost.kernel import kernel_seconds
from lowtide.trace.trace import Kernel

KINDS = ("aten::mm", "aten::bmm", "aten::mul", "aten::exp", "aten::_scaled_dot_product_flash_attention")
LATENCY = 2e-6
PLAIN = Device(
    name="plain", capacity=1, flops={}, memory_bandwidth=1.0, link_out=1.0, link_in=1.0, interconnect=1.0, network=1.0,
    kernel_latency=LATENCY,
)  # fmt: skip

rates = st.floats(1e9, 1e13)
shares = st.floats(0.1, 1.0)


def samples(single: float, half: float, bandwidth: float, efficiency: dict[str, float]) -> list[Sample]:
    """What kernels of a thin and of a thick form take on such a device."""
    found = []
    for kind, share in efficiency.items():
        for dtype, rate in (("float32", single), ("bfloat16", half)):
            for work, touched in ((10**6, 10**10), (10**14, 10**7)):
                flops = 0 if kind in ("aten::mul", "aten::exp") else work
                seconds = LATENCY + max(flops / rate, touched / bandwidth) / share
                found.append(Sample(kind, dtype, flops, touched, seconds))
    return found


@given(single=rates, half=rates, bandwidth=rates, efficiency=st.fixed_dictionaries(dict.fromkeys(KINDS, shares)))
def test_a_device_with_hidden_efficiencies_is_found_by_its_times(
    single: float, half: float, bandwidth: float, efficiency: dict[str, float]
) -> None:
    given = samples(single, half, bandwidth, efficiency)
    found = fit(given, LATENCY)
    assert found is not None
    device = replace(PLAIN, flops=found.flops, memory_bandwidth=found.memory_bandwidth, efficiency=found.efficiency)
    for one in given:
        kernel = Kernel(one.kind, dtype=one.dtype, flops=one.flops, touched=one.touched)
        assert kernel_seconds(device, kernel) == pytest.approx(one.seconds, rel=1e-3)
    unseen = Kernel("aten::bmm", dtype="bfloat16", flops=10**13, touched=10**9)
    expected = LATENCY + max(1e13 / half, 1e9 / bandwidth) / efficiency["aten::bmm"]
    assert kernel_seconds(device, unseen) == pytest.approx(expected, rel=1e-3)


def test_nothing_to_explain_is_nothing() -> None:
    assert fit([], LATENCY) is None
    assert fit([Sample("aten::mul", "float32", 0, 10, LATENCY)], LATENCY) is None


def test_a_kind_that_was_not_measured_takes_its_class() -> None:
    found = fit(samples(1e12, 1e12, 1e12, {"aten::mul": 1.0, "aten::exp": 0.5}), LATENCY)
    assert found is not None
    assert found.efficiency["memory"] == pytest.approx(0.75)
