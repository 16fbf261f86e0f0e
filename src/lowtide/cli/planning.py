"""What ``lowtide plan`` and ``lowtide explain`` share: the options that say what to plan, and the planning itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer

if TYPE_CHECKING:
    from lowtide.cli.traced import LayoutOptions, Traced, Training
    from lowtide.cost.device import Device
    from lowtide.planner.plan import Option, Plan
    from lowtide.trace.optimizers import OptimizerName
    from lowtide.train.run import DataType
    from lowtide.train.search import Asked, Searched

__all__ = [
    "Inputs",
    "Planned",
    "Prepared",
    "given_text",
    "plan_inputs",
    "planning",
    "prepare_inputs",
    "prepare_search",
    "search_layouts",
    "searches",
    "takes_inputs",
]

LAYOUT = "The layout"
TRAINING = "How it is trained"
ALLOWED = "What may be used"


class Schedule(StrEnum):
    """The schedules of a pipeline."""

    gpipe = "gpipe"
    one_forward_one_backward = "1f1b"
    interleaved = "interleaved"
    zero_bubble = "zero_bubble"
    zero_bubble_v = "zero_bubble_v"
    dualpipe_v = "dualpipe_v"


class Dtype(StrEnum):
    """The types of numbers, as people call them."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Optimizer(StrEnum):
    """The optimizers."""

    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"
    momentum = "momentum"
    none = "none"


_DTYPES: dict[Dtype, DataType] = {Dtype.fp32: "float32", Dtype.bf16: "bfloat16", Dtype.fp16: "float16"}


def _trained(name: str, metavar: str | None, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False, rich_help_panel=TRAINING)


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
        str | None,
        typer.Option(
            "--budget",
            metavar="SIZE",
            help="Memory of a device that the run may reserve: 60GiB; what it has less --reserve unless given.",
            show_default=False,
        ),
    ] = None
    reserve: Annotated[
        str | None,
        typer.Option(
            "--reserve",
            metavar="SIZE",
            help="Memory of a device that is not for tensors: 3GiB; what `lowtide devices` assumes of the driver,"
            " process groups and workspaces unless given.",
            show_default=False,
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME|FILE",
            help="One of `lowtide devices`, what `lowtide calibrate` wrote, or cuda, xpu … for the one that is here.",
        ),
    ] = "h100"
    expandable_segments: Annotated[
        bool,
        typer.Option(
            "--expandable-segments",
            help="The run has PYTORCH_ALLOC_CONF=expandable_segments:True, which reserves less.",
        ),
    ] = False
    dtype: Annotated[Dtype | None, _trained("--dtype", None, "What parameters are stored in.")] = None
    autocast: Annotated[Dtype | None, _trained("--autocast", None, "What matrix products are computed in.")] = None
    optimizer: Annotated[Optimizer | None, _trained("--optimizer", None, "adamw unless given.")] = None
    lora: Annotated[
        int | None,
        typer.Option(
            "--lora",
            min=1,
            metavar="RANK",
            help="Train adapters of this rank only; needs peft.",
            show_default=False,
            rich_help_panel=TRAINING,
        ),
    ] = None
    layers: Annotated[str | None, _trained("--layers", "MODULE", "The module that holds the layers.")] = None
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="The layers are compiled, one by one, by torch.compile; a training file may say so itself.",
            rich_help_panel=TRAINING,
        ),
    ] = False
    data: Annotated[int | None, _count("--dp", "Data-parallel ranks; they share the parameters.")] = None
    replicate: Annotated[
        bool,
        typer.Option("--replicate", help="Each data-parallel rank has all parameters.", rich_help_panel=LAYOUT),
    ] = False
    tensor: Annotated[int | None, _count("--tp", "Tensor-parallel ranks.")] = None
    pipeline: Annotated[int | None, _count("--pp", "Pipeline stages.")] = None
    chunks: Annotated[int | None, _count("--vpp", "Virtual stages of each stage.")] = None
    context: Annotated[int | None, _count("--cp", "Context-parallel ranks, with some tokens each of a sample.")] = None
    expert: Annotated[int | None, _count("--ep", "Expert-parallel ranks.")] = None
    micro_batches: Annotated[int | None, _count("--micro-batches", "Micro-batches of a step, for each rank.")] = None
    expert_skew: Annotated[
        float,
        typer.Option(
            "--expert-skew",
            min=1.0,
            metavar="X",
            help="How many times an even share of the tokens the experts of the fullest rank get.",
            rich_help_panel=LAYOUT,
        ),
    ] = 1.0
    devices: Annotated[
        int | None, _count("--devices", "Search layouts of this many devices, with the best Policy of each.")
    ] = None
    global_batch: Annotated[int | None, _count("--global-batch", "Samples of a step, for such a search.")] = None
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
    def layout(self) -> LayoutOptions:
        """How the model is sharded."""
        from lowtide.cli.traced import LayoutOptions

        return LayoutOptions(
            data=self.data,
            tensor=self.tensor,
            pipeline=self.pipeline,
            chunks=self.chunks,
            expert=self.expert,
            context=self.context,
            micro_batches=self.micro_batches,
            sequence=self.sequence,
            samples=self.samples,
            schedule=self.schedule.value if self.schedule is not None else None,
            replicate=self.replicate,
            expert_skew=self.expert_skew,
        )

    @property
    def training(self) -> Training:
        """How the model is trained."""
        from lowtide.cli.traced import Training

        optimizer: OptimizerName | None = self.optimizer.value if self.optimizer is not None else None
        return Training(
            dtype=_DTYPES[self.dtype] if self.dtype is not None else None,
            autocast=_DTYPES[self.autocast] if self.autocast is not None else None,
            optimizer=optimizer,
            lora=self.lora,
            layers=self.layers,
            compiled=self.compiled,
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
    searched: Searched | None = None
    """What the layout was chosen from, where it was searched for."""


def plan_inputs(inputs: Inputs, files: Sequence[Path | None] = (), *, page: Path | None = None) -> Planned:
    """Trace what is given and plan it; prints the error and exits with 1 if that fails.

    What is wrong with the arguments, or with the directories of ``files`` and of a ``page`` that are written later, is
    found before torch is imported.
    """
    from lowtide.cli.console import make_console

    console = make_console(stderr=True)
    with planning(files, page=page):
        if searches(inputs):
            with console.status("searching layouts") as status:  # shown on a terminal only
                return search_layouts(inputs, status.update)
        prepared = prepare_inputs(inputs)
        with console.status(f"reading {inputs.source}") as status:
            traced, device = prepared.trace(status.update)
            plan = prepared.plan(traced, device, status.update)
            status.update("simulating what the file says")
            plan = _with_own(plan, traced, device, console.print)
    return Planned(traced, device, plan)


@contextmanager
def planning(files: Sequence[Path | None] = (), *, page: Path | None = None) -> Iterator[None]:
    """Around what is planned: an error is printed in one line, with exit code 1."""
    import gc
    import os

    from lowtide.errors import LowtideError

    gc.enable()  # the entry point turned it off for commands that end at once
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        _check_directories([*files, page])
        if page is not None:
            from lowtide.report.frame import require_plotly

            require_plotly()
        yield
    except LowtideError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


class Prepared(NamedTuple):
    """What is to be planned, read and checked; torch is not imported yet."""

    inputs: Inputs
    budget: int | None
    reserve: int | None
    host_memory: int | None
    device: Device | None
    """None for the one that is here."""
    tracer: Callable[[Callable[[str], None]], Traced]

    def trace(self, progress: Callable[[str], None]) -> tuple[Traced, Device]:
        """Trace it, with the kernels that the device has."""
        from dataclasses import replace

        from lowtide.cost.imagined import device_kernels  # imports torch
        from lowtide.cost.kernels import family_of

        device = self.device
        if device is None:
            from lowtide.cost.present import present_device

            device = present_device(self.inputs.device)
        device = replace(device, expandable_segments=device.expandable_segments or self.inputs.expandable_segments)
        with device_kernels(family_of(device.name)):
            return self.tracer(progress), device

    def plan(self, traced: Traced, device: Device, progress: Callable[[str], None], budget: int | None = None) -> Plan:
        """Plan it, for its own budget unless another is given."""
        from lowtide.planner.budget import budget_of
        from lowtide.planner.make import make_plan

        budget = budget or self.budget
        return make_plan(
            traced.trace,
            budget_of(device, traced.trace, traced.pipeline, budget=budget, reserve=self.reserve),
            device,
            traced.pipeline,
            swap=not self.inputs.no_swap,
            recompute=not self.inputs.no_recompute,
            host_memory=self.host_memory,
            progress=progress,
        )


def prepare_inputs(inputs: Inputs) -> Prepared:
    """Read and check what is to be planned."""
    from lowtide.cli.traced import prepare
    from lowtide.cost.devices import find_device, is_torch_device
    from lowtide.planner.budget import check_given
    from lowtide.units import parse_budget, parse_bytes

    budget = parse_budget(inputs.budget) if inputs.budget is not None else None
    reserve = parse_budget(inputs.reserve, "reserve") if inputs.reserve is not None else None
    check_given(budget, reserve)
    host_memory = parse_bytes(inputs.host_memory) if inputs.host_memory is not None else None
    device = None if is_torch_device(inputs.device) else find_device(inputs.device)
    return Prepared(
        inputs, budget, reserve, host_memory, device, prepare(inputs.source, inputs.layout, inputs.training)
    )


def searches(inputs: Inputs) -> bool:
    """Whether the layout is to be searched for."""
    return inputs.devices is not None or inputs.global_batch is not None


def prepare_search(inputs: Inputs) -> Asked:
    """Read and check what a search is for."""
    from dataclasses import replace

    from lowtide.cli.traced import SEQUENCE
    from lowtide.cost.devices import find_device
    from lowtide.errors import PlanError
    from lowtide.models.known import find_shape
    from lowtide.train.run import Precision
    from lowtide.train.search import Asked
    from lowtide.units import parse_budget

    if inputs.devices is None or inputs.global_batch is None:
        raise PlanError("a search for a layout needs both --devices and --global-batch")
    fixed: dict[str, object] = {
        "--dp": inputs.data,
        "--tp": inputs.tensor,
        "--pp": inputs.pipeline,
        "--vpp": inputs.chunks,
    }
    fixed |= {"--cp": inputs.context, "--ep": inputs.expert}
    fixed |= {"--micro-batches": inputs.micro_batches, "--micro-batch-size": inputs.samples}
    fixed |= {"--schedule": inputs.schedule, "--replicate": inputs.replicate or None, "--optimizer": inputs.optimizer}
    fixed |= {"--compile": inputs.compiled or None}
    fixed |= {"--lora": inputs.lora, "--layers": inputs.layers, "--host-memory": inputs.host_memory}
    given = [name for name, value in fixed.items() if value is not None]
    if given:
        raise PlanError(f"a search for a layout does not take {', '.join(given)}: leave out that, or --devices")
    shape, device = find_shape(inputs.source), find_device(inputs.device)
    device = replace(device, expandable_segments=device.expandable_segments or inputs.expandable_segments)
    sequence = inputs.sequence or SEQUENCE
    training = inputs.training
    return Asked(
        name=inputs.source,
        shape=replace(shape, max_position_embeddings=max(sequence, shape.max_position_embeddings)),
        device=device,
        budget=parse_budget(inputs.budget) if inputs.budget is not None else None,
        reserve=parse_budget(inputs.reserve, "reserve") if inputs.reserve is not None else None,
        devices=inputs.devices,
        global_batch=inputs.global_batch,
        sequence=sequence,
        precision=Precision(parameters=training.dtype or "float32", compute=training.autocast or "bfloat16"),
        expert_skew=inputs.expert_skew,
        swap=not inputs.no_swap,
        recompute=not inputs.no_recompute,
    )


def search_layouts(inputs: Inputs, progress: Callable[[str], None]) -> Planned:
    """The plan of the fastest layout of so many devices."""
    from dataclasses import replace

    from lowtide.cli.traced import Traced
    from lowtide.errors import PlanError
    from lowtide.train.search import search, traced_rank

    asked = prepare_search(inputs)
    searched = search(asked, progress=progress)
    if not searched.found:
        why = "; ".join(f"{count}: {why}" for why, count in searched.reasons.items())
        raise PlanError(f"{inputs.source} has no layout that fits {inputs.devices} devices: {why}")
    best = searched.found[0]
    trace = traced_rank(asked, best.candidate)
    traced = Traced(replace(trace, pipeline=best.plan.pipeline), best.plan.pipeline, None)
    return Planned(traced, asked.device, best.plan, searched)


def _check_directories(files: Sequence[Path | None]) -> None:
    from lowtide.errors import PlanError

    for file in files:
        if file is not None and not file.parent.is_dir():
            raise PlanError(f"{file}: there is no directory {file.parent}")


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
