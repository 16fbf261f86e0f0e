"""What the devices of a node share: the links to the host, and its memory."""

from __future__ import annotations

from dataclasses import replace

from lowtide.cost.device import Device
from lowtide.planner.pipeline import Pipeline
from lowtide.trace.layout import Layout
from lowtide.trace.trace import Trace

__all__ = ["in_node", "sharing_note"]


def in_node(device: Device, trace: Trace, pipeline: Pipeline) -> Device:
    """The device with the rates to and from the host that it has in the run of a Trace.

    All ranks of a node are taken to swap the same at the same time.
    """
    return device.in_run(_ranks(trace, pipeline))


def sharing_note(device: Device, trace: Trace, pipeline: Pipeline) -> str:
    """What was assumed of the links, in a sentence; empty where each device has what it has alone."""
    here = min(_ranks(trace, pipeline), device.devices_per_node)
    shared = in_node(device, trace, pipeline)
    if (shared.link_out, shared.link_in) == (device.link_out, device.link_in):
        return ""
    return (
        f"the {here} devices of a node are taken to swap at the same time: each then has"
        f" {shared.link_out / 1e9:.4g} GB/s to the host and {shared.link_in / 1e9:.4g} GB/s back, alone it would have"
        f" {device.link_out / 1e9:.4g} and {device.link_in / 1e9:.4g}"
    )


def _ranks(trace: Trace, pipeline: Pipeline) -> int:
    layout = trace.layout or Layout()
    return replace(layout, pipeline=max(1, pipeline.stages)).world
