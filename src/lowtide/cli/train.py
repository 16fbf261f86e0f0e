"""``lowtide train``: train what a file says, on one process or many."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from lowtide.cli.check import parse_overrides

if TYPE_CHECKING:
    from lowtide.config.check import Check
    from lowtide.train.launch import Launch
    from lowtide.train.options import TrainOptions

__all__ = ["train"]

Values: TypeAlias = dict[tuple[str | int, ...], Any]

RUN = "The run"
PROCESSES = "Processes"
NODES = "Several nodes"
WORDS = "As in MindSpore Transformers"
SWAP = "What swapping may take, on each rank"
ADAPTIVE = "The adaptive mode, as in MindSpeed"


class Tracker(StrEnum):
    """Who draws the curves."""

    tensorboard = "tensorboard"
    wandb = "wandb"


File = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Add or replace a value of the file, such as runner_config.batch_size=2.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|CHECKPOINT",
        help="Continue from the newest committed checkpoint of the run directory, or from the one given. "
        "Without it, a run that is in the directory with the same settings is continued.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Start from the beginning; an earlier run in the directory is moved to its earlier/.",
        rich_help_panel=RUN,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Build everything without memory, print the plan of the run, stop.", rich_help_panel=RUN
    ),
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        "--log-dir",
        help="Where rank N writes worker_N.log; logs in the run directory unless given.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
Watchdog = Annotated[
    float | None,
    typer.Option(
        "--watchdog",
        metavar="SECONDS",
        min=0,
        help="Say where each rank is stuck after so long without progress, half of --timeout unless given; 0: never.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
Track = Annotated[
    list[Tracker] | None,
    typer.Option(
        "--track",
        help="Also send each step's numbers there; may be given twice.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        help="Whose peak MFU is measured against, as in lowtide plan; the device that is here unless given.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
StopSignal = Annotated[
    str,
    typer.Option(
        "--stop-signal",
        metavar="NAME",
        help="The signal on which the run saves and stops, as on SIGTERM; none for SIGTERM alone.",
        rich_help_panel=RUN,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.", rich_help_panel=RUN)]
Processes = Annotated[
    str | None,
    typer.Option(
        "--nproc",
        metavar="N|auto",
        help="Start N processes on this node; auto for one on each accelerator.",
        show_default=False,
        rich_help_panel=PROCESSES,
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        min=0,
        help="Start all processes again so often after one failed; they continue from the newest checkpoint.",
        rich_help_panel=PROCESSES,
    ),
]
Nodes = Annotated[int, typer.Option("--nnodes", min=1, help="Nodes of the job.", rich_help_panel=NODES)]
NodeRank = Annotated[int, typer.Option("--node-rank", min=0, help="This node's place, from 0.", rich_help_panel=NODES)]
MasterAddress = Annotated[
    str | None,
    typer.Option("--master-addr", help="The first node's address.", show_default=False, rich_help_panel=NODES),
]
MasterPort = Annotated[
    int | None,
    typer.Option(
        "--master-port",
        min=1,
        max=65535,
        help="A free port on the first node.",
        show_default=False,
        rich_help_panel=NODES,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=1,
        help="How long to wait for other ranks, at the start and in a collective.",
        rich_help_panel=NODES,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="The same as CONFIG.", show_default=False, rich_help_panel=WORDS),
]
RunMode = Annotated[
    str | None,
    typer.Option("--run_mode", help="train or finetune.", show_default=False, rich_help_panel=WORDS),
]
UseParallel = Annotated[
    str | None,
    typer.Option(
        "--use_parallel",
        metavar="True|False",
        help="Whether the run is distributed.",
        show_default=False,
        rich_help_panel=WORDS,
    ),
]
Accumulation = Annotated[
    int | None,
    typer.Option(
        "--gradient_accumulation_steps",
        metavar="N",
        min=1,
        help="Micro-steps averaged into one step, over what the file says.",
        show_default=False,
        rich_help_panel=WORDS,
    ),
]
HostBytes = Annotated[
    str | None,
    typer.Option(
        "--swap-host-bytes",
        metavar="SIZE",
        help="Host memory, such as 64GiB, over what the file says; half of the machine's, shared by its ranks, unless"
        " given.",
        show_default=False,
        rich_help_panel=SWAP,
    ),
]
DiskBytes = Annotated[
    str | None,
    typer.Option(
        "--swap-disk-bytes",
        metavar="SIZE",
        help="Space on disk, for entries with tier: disk; 1TiB unless given.",
        show_default=False,
        rich_help_panel=SWAP,
    ),
]
InFlightBytes = Annotated[
    str | None,
    typer.Option(
        "--swap-in-flight-bytes",
        metavar="SIZE",
        help="Device memory of tensors on their way out or back; 2GiB unless given.",
        show_default=False,
        rich_help_panel=SWAP,
    ),
]
DiskDirectory = Annotated[
    str | None,
    typer.Option(
        "--swap-disk-directory",
        metavar="DIRECTORY",
        help="Where the disk tier has its file; the system's temporary directory unless given.",
        show_default=False,
        rich_help_panel=SWAP,
    ),
]
DeviceSize = Annotated[
    int | None,
    typer.Option(
        "--adaptive-recompute-device-size",
        metavar="MB",
        help="Device memory that the plan may fill; without the flag below, nothing is rescued.",
        show_default=False,
        rich_help_panel=ADAPTIVE,
    ),
]
ProfilingStep = Annotated[
    int | None,
    typer.Option(
        "--adaptive-recompute-profiling-step",
        metavar="N",
        help="Steps that are measured before the plan is made; 10 unless given.",
        show_default=False,
        rich_help_panel=ADAPTIVE,
    ),
]
DeviceSwap = Annotated[
    bool,
    typer.Option(
        "--adaptive-recompute-device-swap",
        help="Measure, plan and switch while training; offload tensors to the host on OOM.",
        rich_help_panel=ADAPTIVE,
    ),
]
LegacyModels = Annotated[
    bool,
    typer.Option("--use-legacy-models", help="No effect: every model may adapt.", rich_help_panel=ADAPTIVE),
]


def train(
    file: File = None,
    overrides: Set = None,
    resume: Resume = None,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    log_dir: LogDir = None,
    watchdog: Watchdog = None,
    track: Track = None,
    device: DeviceName = None,
    stop_signal: StopSignal = "USR1",
    as_json: AsJson = False,
    processes: Processes = None,
    max_restarts: MaxRestarts = 0,
    nodes: Nodes = 1,
    node_rank: NodeRank = 0,
    master_address: MasterAddress = None,
    master_port: MasterPort = None,
    timeout: Timeout = 1800.0,
    config: Config = None,
    run_mode: RunMode = None,
    use_parallel: UseParallel = None,
    accumulation: Accumulation = None,
    host_bytes: HostBytes = None,
    disk_bytes: DiskBytes = None,
    in_flight_bytes: InFlightBytes = None,
    disk_directory: DiskDirectory = None,
    device_size: DeviceSize = None,
    profiling_step: ProfilingStep = None,
    device_swap: DeviceSwap = False,
    legacy_models: LegacyModels = False,
) -> None:
    """Train what the file CONFIG says.

    Runs in this process, or on [bold]--nproc[/bold] processes of this node, or on several nodes when each is given the
    same command with its own [bold]--node-rank[/bold]. Under torchrun it is one rank:
    [bold]torchrun --nproc-per-node 8 -m lowtide train run.yaml[/bold]

    Everything is written to the run directory: the settings, the policy, metrics.jsonl with one object a step,
    receipts, checkpoints, and a log a rank. Exit code 0; 1 if the file cannot be used or the run failed; 85 if it was
    asked to stop and has saved.

    Example: [bold]lowtide train examples/yaml/train_swap_default.yaml --nproc 2 --log-dir output/msrun[/bold]
    """
    import gc

    if sys.platform == "win32":  # no locks of files, and no signals that end a group of processes
        raise typer.BadParameter("lowtide train runs on Linux; on Windows, run it in WSL, or train a loop of your own")
    from lowtide.errors import LowtideError
    from lowtide.train.launch import import_torch_quietly, launch, tie_to_launcher
    from lowtide.train.stop import StopRequest, stop_signals

    gc.enable()  # the entry point turned it off for commands that end at once
    tie_to_launcher()
    path = _one_file(file, config)
    try:
        adaptive = {"device_size": device_size, "profiling_step": profiling_step, "device_swap": device_swap or None}
        limits = {
            "host_bytes": host_bytes,
            "disk_bytes": disk_bytes,
            "in_flight_bytes": in_flight_bytes,
            "disk_directory": disk_directory,
        }
        values, check = _read(path, overrides or [], run_mode, use_parallel, accumulation, adaptive, limits)
        if nodes > 1:
            import_torch_quietly()
        if _rank() is None:  # once, before anything is started; a rank says it in its log
            check = _described(path, values)
        if legacy_models and _rank() in (None, "0"):
            typer.echo("note: --use-legacy-models has no effect: every model may adapt", err=True)
        options = _options(
            check,
            resume=resume,
            fresh=fresh,
            dry_run=dry_run,
            log_dir=log_dir,
            watchdog=watchdog,
            timeout=timeout,
            track=track,
            device=device,
            stop_signal=stop_signal,
            as_json=as_json,
        )
        signals = stop_signals(stop_signal)
        asked = {
            "nodes": nodes,
            "node_rank": node_rank,
            "master_address": master_address,
            "master_port": master_port,
            "timeout": timeout,
            "max_restarts": max_restarts,
            "log_dir": options.log_dir,
            "stop_signals": signals,
        }
        settings = None if dry_run else _launch(processes, asked, parallel=_says(use_parallel))
        if settings is None:
            _note_single(check, options)
            with StopRequest(() if dry_run else signals) as stop:
                from lowtide.train.main import train as run

                code = run(path, values, options, stop)
        else:
            from lowtide.train.run import read_run

            read_run(check, settings.processes * settings.nodes)  # what does not fit is said here, not by every rank
            code = launch("lowtide", _arguments(path, values, options), settings)
    except LowtideError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(code)


def _one_file(file: Path | None, config: Path | None) -> Path:
    if file is not None and config is not None:
        raise typer.BadParameter(f"the file is given twice, as {file} and with --config {config}; give it once")
    found = file or config
    if found is None:
        raise typer.BadParameter("which file? Give it as `lowtide train run.yaml`, or with --config")
    return found


def _read(
    file: Path,
    texts: list[str],
    run_mode: str | None,
    use_parallel: str | None,
    accumulation: int | None,
    adaptive: Mapping[str, int | None] | None = None,
    limits: Mapping[str, str | None] | None = None,
) -> tuple[Values, Check]:
    """Everything that the command line changes in the file, and the file with it; its errors end the command."""
    from lowtide.config.check import check_file
    from lowtide.operators.names import layer_operators

    values = parse_overrides(texts)
    if run_mode is not None:
        values["run_mode",] = run_mode
    if use_parallel is not None:
        values["use_parallel",] = _says(use_parallel)
    check = check_file(file, layer_operators, values)
    if accumulation is not None and check.settings is not None:
        if check.settings.layout == "2026":
            raise typer.BadParameter(
                "--gradient_accumulation_steps is of the older layout; this file has `training`, where the batch of a"
                " step is training.global_batch_size: pass --set training.global_batch_size=N"
            )
        values["runner_config", "gradient_accumulation_steps"] = accumulation
        check = check_file(file, layer_operators, values)
    flags = {name: value for name, value in (adaptive or {}).items() if value is not None}
    if flags:
        values |= _adaptive(flags, check)
        check = check_file(file, layer_operators, values)
    caps = {name: value for name, value in (limits or {}).items() if value is not None}
    if caps and check.settings is not None:
        section = "swap" if check.settings.layout == "2026" else "swap_config"
        values |= {(section, "limits", name): value for name, value in caps.items()}
        check = check_file(file, layer_operators, values)
    _end_if_wrong(check)
    return values, check


def _described(file: Path, values: Values) -> Check:
    """The file with its patterns matched against the model that it describes; its errors end the command."""
    from lowtide.train.described import check_described

    check = check_described(file, values)
    _end_if_wrong(check)
    return check


def _end_if_wrong(check: Check) -> None:
    if check.ok:
        return
    from lowtide.cli.console import make_console
    from lowtide.report.terminal import print_problems

    if _rank() in (None, "0"):  # once, not once a rank
        print_problems(check, make_console(stderr=True))
    raise typer.Exit(1)


def _adaptive(flags: Mapping[str, int], check: Check) -> Values:
    """The values of ``adapt`` that the flags set, in the spelling of the file: flags win over it."""
    from lowtide.config.schema.adapt import Adapt

    section = check.document.value.get("adapt") if isinstance(check.document.value, dict) else None
    written = section if isinstance(section, dict) else {}
    spelled = {Adapt.aliases.get(key, key): key for key in written}
    values: Values = {("adapt", spelled.get(name, name)): value for name, value in flags.items()}
    if "device_size" in flags and written.get("budget") is not None:
        values["adapt", "budget"] = None  # the other way to say what the plan may fill
    return values


def _options(
    check: Check,
    *,
    resume: str | None,
    fresh: bool,
    dry_run: bool,
    log_dir: Path | None,
    watchdog: float | None,
    timeout: float,
    track: list[Tracker] | None,
    device: str | None,
    stop_signal: str,
    as_json: bool,
) -> TrainOptions:
    from lowtide.cost.devices import find_device
    from lowtide.train.launch import launched
    from lowtide.train.logs import level_of
    from lowtide.train.options import TrainOptions, restarted

    assert check.settings is not None
    if resume is not None and fresh:
        raise typer.BadParameter("--resume continues a run and --fresh starts one; give one of them")
    level_of()  # a wrong GLOG_v is said here, once
    if device is not None:
        find_device(device)  # and so is a device that is not known
    run_directory = Path(check.settings.top_level.output_dir)
    return TrainOptions(
        run_directory=run_directory,
        log_dir=log_dir or run_directory / "logs",
        dry_run=dry_run,
        json=as_json,
        resume=resume,
        fresh=fresh,
        watchdog=watchdog,
        timeout=timeout,
        track=tuple(str(one) for one in track or ()),
        device=device,
        stop_signal=stop_signal,
        redirect=launched(),
        restarted=restarted(),
    )


def _launch(processes: str | None, asked: dict[str, Any], *, parallel: bool | None) -> Launch | None:
    """The processes to start; None where this process is a rank, or the only one."""
    if _rank() is not None or (processes is None and asked["nodes"] == 1):
        return None
    from lowtide.errors import LaunchError
    from lowtide.train.launch import Launch

    if processes == "auto" or processes is None:
        import torch

        count = max(1, torch.accelerator.device_count())
    elif processes.isdecimal() and int(processes) > 0:
        count = int(processes)
    else:
        raise typer.BadParameter(f"--nproc is {processes!r}; expected a number from 1, or auto")
    if parallel is False and count * asked["nodes"] > 1:
        raise LaunchError(
            f"--use_parallel False, and {count} processes on {asked['nodes']} nodes are asked for: give one of them"
        )
    return Launch(processes=count, **asked)


def _note_single(check: Check, options: TrainOptions) -> None:
    assert check.settings is not None
    if check.settings.top_level.use_parallel and _rank() is None and not options.dry_run:
        typer.echo("note: use_parallel is true, and this is one process; --nproc N starts more", err=True)


def _arguments(file: Path, values: Values, options: TrainOptions) -> list[str]:
    """The command line of one rank: the same run, without starting processes."""
    import json

    arguments = ["train", str(file), "--log-dir", str(options.log_dir), "--timeout", str(options.timeout)]
    arguments += ["--stop-signal", options.stop_signal]
    if options.device is not None:
        arguments += ["--device", options.device]
    for path, value in values.items():  # JSON is YAML, and keeps the type of each value
        arguments += ["--set", ".".join(map(str, path)) + "=" + json.dumps(value)]
    if options.resume is not None:
        arguments += ["--resume", options.resume]
    if options.watchdog is not None:
        arguments += ["--watchdog", str(options.watchdog)]
    for one in options.track:
        arguments += ["--track", one]
    for flag, wanted in (("--fresh", options.fresh), ("--dry-run", options.dry_run), ("--json", options.json)):
        arguments += [flag] if wanted else []
    return arguments


def _says(text: str | None) -> bool | None:
    """A truth value as Python and YAML write it."""
    if text is None:
        return None
    value = {"true": True, "false": False, "1": True, "0": False}.get(text.lower())
    if value is None:
        raise typer.BadParameter(f"--use_parallel is {text!r}; expected True or False")
    return value


def _rank() -> str | None:
    """This process's rank, where torchrun or the launcher started it."""
    import os

    return os.environ.get("RANK") if "WORLD_SIZE" in os.environ else None
