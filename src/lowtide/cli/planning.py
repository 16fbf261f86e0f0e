"""What ``lowtide plan`` and ``lowtide explain`` share: the options that say what to plan, and the planning itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer

if TYPE_CHECKING:
    from lowtide.cli.traced import Layout, Traced
    from lowtide.cost.device import Device
    from lowtide.planner.plan import Option, Plan

__all__ = ["Inputs", "Planned", "given_text", "plan_inputs", "takes_inputs"]

LAYOUT = "The layout"
ALLOWED = "What may be used"


class Schedule(StrEnum):
    """The schedules of a pipeline."""

    gpipe = "gpipe"
    one_forward_one_backward = "1f1b"
    interleaved = "interleaved"
    zero_bubble = "zero_bubble"
    zero_bubble_v = "zero_bubble_v"
    dualpipe_v = "dualpipe_v"


def _count(name: str, text: str) -> Any:
    return typer.Option(name, min=1, metavar="N", help=text, show_default=False, rich_help_panel=LAYOUT)


class Inputs(NamedTuple):
    """What to plan: an argument and options of a command."""

    source: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|MODEL|TRACE",
            help="A training file, a built-in shape such as llama3-8b, a directory with config.json, module:function,"
            " or a Trace.",
            show_default=False,
        ),
    ]
    budget: Annotated[
        str,
        typer.Option(
            "--budget", metavar="SIZE", help="Memory of a device that the run may reserve: 60GiB.", show_default=False
        ),
    ]
    device: Annotated[
        str, typer.Option("--device", metavar="NAME|FILE", help="A known device, or what `lowtide calibrate` wrote.")
    ] = "h100"
    data: Annotated[int | None, _count("--dp", "Data-parallel ranks; they share the parameters.")] = None
    replicate: Annotated[
        bool,
        typer.Option("--replicate", help="Each data-parallel rank has all parameters.", rich_help_panel=LAYOUT),
    ] = False
    tensor: Annotated[int | None, _count("--tp", "Tensor-parallel ranks.")] = None
    pipeline: Annotated[int | None, _count("--pp", "Pipeline stages.")] = None
    chunks: Annotated[int | None, _count("--vpp", "Virtual stages of each stage.")] = None
    expert: Annotated[int | None, _count("--ep", "Expert-parallel ranks.")] = None
    micro_batches: Annotated[int | None, _count("--micro-batches", "Micro-batches of a step, for each rank.")] = None
    sequence: Annotated[int | None, _count("--seq", "Tokens of a sample.")] = None
    samples: Annotated[int | None, _count("--micro-batch-size", "Samples of a micro-batch.")] = None
    schedule: Annotated[
        Schedule | None,
        typer.Option(
            "--schedule",
            help="The pipeline's schedule; 1f1b, or interleaved with --vpp, unless given.",
            show_default=False,
            rich_help_panel=LAYOUT,
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="Memory of a node's host that swapped tensors may take; the device table's unless given.",
            show_default=False,
            rich_help_panel=ALLOWED,
        ),
    ] = None
    no_swap: Annotated[bool, typer.Option("--no-swap", help="Swap nothing.", rich_help_panel=ALLOWED)] = False
    no_recompute: Annotated[
        bool, typer.Option("--no-recompute", help="Recompute nothing.", rich_help_panel=ALLOWED)
    ] = False

    @property
    def layout(self) -> Layout:
        """How the model is sharded."""
        from lowtide.cli.traced import Layout

        return Layout(
            data=self.data,
            tensor=self.tensor,
            pipeline=self.pipeline,
            chunks=self.chunks,
            expert=self.expert,
            micro_batches=self.micro_batches,
            sequence=self.sequence,
            samples=self.samples,
            schedule=self.schedule.value if self.schedule is not None else None,
            replicate=self.replicate,
        )


def takes_inputs(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :class:`Inputs`, in place of its first parameter."""
    shared = get_type_hints(Inputs, include_extras=True)
    own = get_type_hints(command, include_extras=True)
    _, *rest = inspect.signature(command).parameters.values()

    def run(**given: Any) -> None:
        inputs = Inputs(**{name: given.pop(name) for name in Inputs._fields})
        command(inputs, **given)

    def parameter(name: str, default: Any, hint: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)

    empty = inspect.Parameter.empty
    parameters = [parameter(name, Inputs._field_defaults.get(name, empty), hint) for name, hint in shared.items()]
    parameters += [parameter(one.name, one.default, own[one.name]) for one in rest]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


class Planned(NamedTuple):
    """What was planned, and for what."""

    traced: Traced
    device: Device
    plan: Plan


def plan_inputs(inputs: Inputs) -> Planned:
    """Trace what is given and plan it; prints the error and exits with 1 if that fails."""
    import gc

    from rich.console import Console

    from lowtide.cli.traced import trace_of
    from lowtide.cost.devices import find_device
    from lowtide.cost.imagined import device_kernels
    from lowtide.cost.kernels import family_of
    from lowtide.errors import LowtideError
    from lowtide.planner.make import make_plan
    from lowtide.units import parse_bytes

    gc.enable()  # the entry point turned it off for commands that end at once
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    try:
        budget = parse_bytes(inputs.budget)  # what is quick to refuse is refused first
        host_memory = parse_bytes(inputs.host_memory) if inputs.host_memory is not None else None
        device = find_device(inputs.device)
        with console.status(f"reading {inputs.source}") as status:  # shown on a terminal only
            with device_kernels(family_of(device.name)):
                traced = trace_of(inputs.source, inputs.layout, status.update)
            plan = make_plan(
                traced.trace,
                budget,
                device,
                traced.pipeline,
                swap=not inputs.no_swap,
                recompute=not inputs.no_recompute,
                host_memory=host_memory,
                progress=status.update,
            )
            status.update("simulating what the file says")
            plan = _with_own(plan, traced, device, console.print)
    except LowtideError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    return Planned(traced, device, plan)


def _with_own(plan: Plan, traced: Traced, device: Device, say: Callable[[str], None]) -> Plan:
    """The plan with what the file asks for itself among the options."""
    from dataclasses import replace

    from lowtide.errors import PolicyError

    if traced.policy is None:
        return plan
    try:
        own = _own_option(plan, traced, device)
    except PolicyError as error:
        say(f"note: the file's own settings are not compared: {error}")
        return plan
    return replace(plan, options=(own, *plan.options))


def _own_option(plan: Plan, traced: Traced, device: Device) -> Option:
    from lowtide.planner.plan import Option
    from lowtide.planner.simulate import simulate

    assert traced.policy is not None
    simulation = simulate(traced.trace, traced.policy, device, traced.pipeline)
    fits = simulation.reserved <= plan.budget
    return Option(name="what the file says", policy=traced.policy, simulation=simulation, fits=fits)


def given_text(source: str) -> str | None:
    """The text of a training file, for the difference; None for anything else."""
    path = Path(source)
    return path.read_text(encoding="utf-8") if path.suffix in (".yaml", ".yml") and path.is_file() else None
