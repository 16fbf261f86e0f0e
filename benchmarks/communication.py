"""Train under every setting of communication in every layout, by ``lowtide train`` on gloo: no hang, no other loss.

    python benchmarks/communication.py --json

Each run is what each rank of ``lowtide train --nproc N`` does, in processes of its own over gloo on loopback: they are
forked from one that has imported everything, since importing torch takes longer than the run. A run that does not end
in its time has hung: its ranks are killed and their places printed. Losses are compared, step by step, with those of
the same layout without the setting. Nightly: some twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch imports it in the first step, which takes seconds: once in the parent is enough
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import lowtide.train.main  # noqa: F401  for the ranks
from lowtide.cli.main import app

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from stamp import stamped
from support.layout_cases import MODELS, SHARD, TENSOR, Layout, data

STEPS, TIMES, QUICK_STEPS = 20, 10, 6
PATIENCE = 300
"""Seconds that a run may take; the longest takes some fifteen, and machines are busy at times."""
TOLERANCE = 1e-6

EXPERTS = {"parallel_config.expert_parallel": 2}
SEQUENCE = {"parallel_config.use_seq_parallel": True}
LONG = {"model.model_config.seq_length": 256, "model.model_config.num_layers": 2}
"""So that an adaptive run has something to decide."""
LAYOUTS = (
    Layout("tp2", 2, {**data(1, 4), **TENSOR}, only="llama"),
    Layout("tp2 + sequence", 2, {**data(1, 4), **TENSOR, **SEQUENCE}, only="llama"),
    Layout("fsdp2", 2, {**data(2, 4), **SHARD}, only="llama"),
    Layout("tp2 x fsdp2", 4, {**data(2, 4), **SHARD, **TENSOR}, only="llama"),
    Layout("ep2", 2, {**data(2, 4), **EXPERTS}, only="deepseek"),
    Layout("ep2 x fsdp2", 4, {**data(4, 2), **SHARD, **EXPERTS}, only="deepseek"),
    Layout("tp2 + sequence, long", 2, {**data(1, 4), **TENSOR, **SEQUENCE, **LONG}, only="llama"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "select_comm_recompute": {"recompute_config": {"select_comm_recompute": True}},
    "mp_comm_recompute: false": {"recompute_config": {"recompute": True, "mp_comm_recompute": False}},
    "parallel_optimizer_comm_recompute": {"recompute_config": {"parallel_optimizer_comm_recompute": True}},
    "recompute_slice_activation": {"recompute_config": {"recompute": True, "recompute_slice_activation": True}},
    "select_recompute '.*'": {"recompute_config": {"select_recompute": {".*": True}}},
}
EXCLUDING: dict[str, dict[str, Any]] = {
    "mp_comm_recompute: false, with an exclude": {
        "recompute_config": {
            "recompute": True,
            "mp_comm_recompute": False,
            "select_recompute_exclude": {r"feed_forward\.mul": True},
        }
    },
}
ADAPTING: dict[str, dict[str, Any]] = {
    f"adapt within {budget}": {"adapt": {"budget": budget, "profiling_step": 4, "verbosity": "quiet"}}
    for budget in ("4MiB", "3MiB")
}


def settings_of(layout: Layout) -> dict[str, dict[str, Any]]:
    """The settings that a layout is tried with, by name."""
    if "seq_length" in str(layout.settings):
        return ADAPTING
    return {**SETTINGS, **(EXCLUDING if layout.name == "tp2 + sequence" else {})}


class Run(NamedTuple):
    """What became of a run."""

    losses: list[float]
    """Of each step; empty if it hung or failed."""
    hung: bool
    error: str
    seconds: float


def run(layout: Layout, settings: dict[str, Any], steps: int, place: Path) -> Run:
    """Train once; every rank is a child of this process."""
    place.mkdir(parents=True)
    assert layout.only is not None
    (place / "run.yaml").write_text(MODELS[layout.only])
    values = {**layout.settings, **settings, "runner_config.stop_step": steps, "output_dir": str(place / "output")}
    # One batch of the layout's in each step: gradients are accumulated by the tests of layouts.
    values["runner_config.gradient_accumulation_steps"] = 1
    given = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    begin, port = time.perf_counter(), _free_port()
    children = [_fork(rank, layout.processes, port, place, given) for rank in range(layout.processes)]
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (done := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(done[1])
        failed = any(codes.values())
        if time.perf_counter() - begin > PATIENCE or failed:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGUSR1 if not failed else signal.SIGKILL)  # its stacks first
                    time.sleep(0.5)
                    os.kill(child, signal.SIGKILL)
                    codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            break
        time.sleep(0.02)
    seconds = time.perf_counter() - begin
    if any(codes.values()):
        said = "\n".join((place / f"rank_{rank}.txt").read_text()[-6000:] for rank in range(layout.processes))
        return Run([], hung=seconds > PATIENCE, error=said, seconds=seconds)
    lines = [json.loads(line) for line in (place / "output" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), lines
    return Run([line["loss"] for line in lines], hung=False, error="", seconds=seconds)


def _fork(rank: int, ranks: int, port: int, place: Path, given: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (place / f"rank_{rank}.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            arguments = ["train", str(place / "run.yaml"), "--watchdog", "0", *given]
            try:
                app(arguments, standalone_mode=False)
                code = 0
            except BaseException as error:
                code = getattr(error, "exit_code", getattr(error, "code", 1))
                if code:
                    import traceback

                    traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(int(code or 0))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, once, layouts of two processes")
    parser.add_argument("--times", type=int, default=TIMES, metavar="N", help=f"how often each; default {TIMES}")
    parser.add_argument("--layout", metavar="NAME", help="one layout only, such as 'tp2 + sequence'")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True, width=130)
    steps, times = (QUICK_STEPS, 1) if arguments.quick else (STEPS, arguments.times)
    layouts = [one for one in LAYOUTS if arguments.layout in (None, one.name)]
    layouts = [one for one in layouts if one.processes == 2] if arguments.quick else layouts
    cases = [(layout, name) for layout in layouts for name in settings_of(layout)]
    table = Table("layout", "setting", "runs", "hung", "failed", "largest difference of the loss", "bitwise", "s a run")
    counts = {"runs": 0, "hung": 0, "failed": 0, "wrong_loss": 0, "bitwise": 0}
    inexact: list[str] = []
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, Progress(console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("runs", total=len(cases) * times)
        plain: dict[str, Run] = {}
        for layout, name in cases:
            if layout.name not in plain:
                plain[layout.name] = run(layout, {}, steps, Path(temporary) / f"{layout.name} plain")
                if plain[layout.name].error:
                    console.print(plain[layout.name].error, markup=False)
                    return 1
            settings = settings_of(layout)[name]
            expected, found = plain[layout.name].losses, []
            for number in range(times):
                found.append(run(layout, settings, steps, Path(temporary) / f"{layout.name} {len(found)} {hash(name)}"))
                bar.advance(task)
                if found[-1].error:
                    what = "hung" if found[-1].hung else "failed"
                    console.print(f"{layout.name}, {name}, run {number} {what}\n{found[-1].error}", markup=False)
            whole = [one for one in found if one.losses]
            worst = max((abs(a - b) for one in whole for a, b in zip(one.losses, expected, strict=True)), default=0.0)
            wrong = sum(any(abs(a - b) > TOLERANCE for a, b in zip(one.losses, expected, strict=True)) for one in whole)
            exact = sum(one.losses == expected for one in whole)
            hung = sum(one.hung for one in found)
            failed = len(found) - len(whole) - hung
            for key, count in zip(counts, (len(found), hung, failed, wrong, exact), strict=True):
                counts[key] += count
            if exact < len(whole):
                inexact.append(f"{layout.name}, {name}")
            seconds = sum(one.seconds for one in found) / len(found)
            row = (str(len(found)), str(hung), str(failed), f"{worst:.1e}", f"{exact} of {len(whole)}")
            table.add_row(layout.name, name, *row, f"{seconds:.1f}")
            console.print(f"{layout.name}, {name}: {len(found)} runs, {hung} hung, {failed} failed", style="dim")
    console.print(table)
    seconds = round(time.perf_counter() - begin)
    console.print(f"{counts['runs']} runs of {steps} steps in {seconds} s", highlight=False)
    if arguments.json:
        print(json.dumps(stamped({**counts, "steps": steps, "not_bitwise": inexact, "seconds": seconds})))
    return 1 if counts["hung"] or counts["failed"] or counts["wrong_loss"] else 0


if __name__ == "__main__":
    sys.exit(main())
