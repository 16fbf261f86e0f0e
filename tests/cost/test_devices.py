"""The device table, and how a device is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.cost.device import Device, Reserve
from lowtide.cost.devices import DEVICES, EFFICIENCY, device_by_product, find_device
from lowtide.cost.kernels import family_of
from lowtide.errors import PlanError


def test_every_device_that_the_command_promises_is_there_and_says_what_it_assumes() -> None:
    assert set(DEVICES) == {
        *("a100-40", "a100", "h100", "h200", "b200", "gb200", "l40s", "rtx4090", "rtx5090"),
        *("mi300x", "mi355x", "910b", "910c", "gaudi", "cpu"),
    }
    for device in DEVICES.values():
        assert device.source
        assert set(device.efficiency) == set(EFFICIENCY)
        assert any("assumption" in note for note in device.notes)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_figures_are_in_a_sane_order(device: Device) -> None:
    assert device.flops["float64"] <= device.flops["float32"] <= device.flops["bfloat16"]
    assert device.network <= device.interconnect <= device.memory_bandwidth
    assert device.link_out < device.memory_bandwidth
    assert device.host_memory >= device.capacity
    assert 0 < device.host_bandwidth / device.devices_per_node <= device.memory_bandwidth
    assert device.devices_per_node % device.link_sharing == 0
    assert all(0 < share <= 1 for share in device.efficiency.values())


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_most_of_the_memory_is_for_tensors(device: Device) -> None:
    assert device.budget == device.capacity - device.reserve.driver - device.reserve.workspace
    assert 0.9 * device.capacity < device.budget < device.capacity
    with_groups = device.reserve.total(4, 1)
    assert with_groups == device.reserve.total(3) + device.reserve.all_to_all
    assert device.reserve.total() <= with_groups < 0.25 * device.capacity


def test_a_devices_file_has_its_reserve_and_one_from_before_gets_what_is_assumed() -> None:
    device = replace(find_device("h100"), reserve=Reserve(driver=1, communication=2, all_to_all=3, workspace=4))
    value = json.loads(json.dumps(device.as_json()))
    assert Device.from_json(value) == device
    assert Device.from_json({**value, "reserve": {"driver": 7}}).reserve == Reserve(driver=7)
    del value["reserve"]
    assert Device.from_json(value) == replace(device, reserve=Reserve())
    with pytest.raises(PlanError, match=r"not a device: .*'drivers'"):
        Device.from_json({**value, "reserve": {"drivers": 7}})


@pytest.mark.parametrize("name", ["l40s", "rtx4090", "rtx5090"])
def test_devices_without_a_fabric_of_their_own_reach_each_other_over_pcie(name: str) -> None:
    device = DEVICES[name]
    assert device.interconnect == device.link_out == device.link_in


def test_the_kernels_of_every_device_are_known() -> None:
    assert {name: family_of(name) for name in DEVICES if family_of(name) == "other"} == {}


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


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("AMD Instinct MI355X", "mi355x"),
        ("Ascend910_9382", "910c"),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Ascend910B2", "910b"),
        ("NVIDIA RTX A5000", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_a_device_is_known_by_what_its_driver_calls_it(product: str, name: str | None) -> None:
    found = device_by_product(product)
    assert (found.name if found is not None else None) == name


def test_a_backend_is_no_device_of_the_table() -> None:
    with pytest.raises(PlanError, match="'cuda' says which backend, not which device: give one of a100, a100-40, h100"):
        find_device("cuda")
