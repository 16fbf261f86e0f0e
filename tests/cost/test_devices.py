"""The device table, and how a device is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.cost.device import Device
from lowtide.cost.devices import DEVICES, EFFICIENCY, find_device
from lowtide.errors import PlanError


def test_every_device_that_the_command_promises_is_there_and_says_what_it_assumes() -> None:
    assert set(DEVICES) == {"a100", "h100", "h200", "b200", "mi300x", "910b", "910c", "gaudi", "cpu"}
    for device in DEVICES.values():
        assert set(device.efficiency) == set(EFFICIENCY)
        assert any("assumption" in note for note in device.notes)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_figures_are_in_a_sane_order(device: Device) -> None:
    assert device.flops["float64"] <= device.flops["float32"] <= device.flops["bfloat16"]
    assert device.network <= device.interconnect <= device.memory_bandwidth
    assert device.link_out < device.memory_bandwidth
    assert device.host_memory >= device.capacity
    assert all(0 < share <= 1 for share in device.efficiency.values())


def test_a_device_is_found_by_name_or_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    find_device("H100").save(file)
    assert find_device(file) == find_device("h100")


def test_an_unknown_device_names_the_nearest_and_all_others() -> None:
    with pytest.raises(PlanError, match=r"no device 'h10'.*did you mean h100.*mi300x.*lowtide calibrate"):
        find_device("h10")


def test_a_device_file_that_is_missing_says_so() -> None:
    with pytest.raises(PlanError, match=r"nowhere\.json: No such file"):
        find_device("nowhere.json")
