"""Kill a training job at random moments, resume it, and compare with an undisturbed run.

    python benchmarks/crash.py --json
    python benchmarks/crash.py --quick

``lowtide train`` runs on two ranks under FSDP2 and saves a checkpoint every few steps, at each start either
synchronously or asynchronously. SIGKILL hits the whole job or one rank (the other follows a moment later), at a random
moment or, for a fifth of the kills, while an uncommitted checkpoint is on the disk. A quarter of the kills are SIGTERM,
to one rank or to both, on which the job saves and stops; half of these are followed by a second SIGTERM or by SIGKILL
while that save is under way. The job is started again until its run is finished.

Counted are: committed checkpoints that a resume did not reach (``lost_committed``: a rank had reported that it was
committed); starts that could not load, and committed directories that a separate process could not load
(``unloadable``); losses, norms and states that are not bit by bit those of the undisturbed run
(``resume_not_bitwise``); and runs whose samples, each step counted once, are not exactly those of the undisturbed run
(``samples_duplicated_or_skipped``); and runs whose ``metrics.jsonl`` is not that of the undisturbed run
(``metrics_wrong``); and jobs that were asked to stop, were left alone, and did not save and end with the exit code for
it (``stops_failed``).

SIGKILL leaves the operating system up: what it has taken over it still writes. A power cut is not tried here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from crash_job import RANKS, Job, inspect, start
from lowtide.train.commit import checkpoints_in
from lowtide.train.stop import STOPPED
from stamp import stamped

KILLS, QUICK = 200, 20
EPOCHS, QUICK_EPOCHS = 5, 2
PATIENCE = 120.0  # seconds without an end: the job hangs


@dataclass
class Attempt:
    """One start of the job and how it ended."""

    job: Job
    target: str
    """What the kill aimed at: a random moment, a save, or a stop at a random moment."""
    killed: float | None = None
    """When; None if the run was finished before."""
    one_rank: bool = False
    stopped: bool = False
    """Whether it was asked to stop, and has saved and ended."""
    interrupted: bool = False
    """Whether it was asked to stop and killed while it saved."""
    during_save: bool = False
    """Whether an uncommitted checkpoint was left."""
    lines: list[list[dict[str, Any]]] = field(default_factory=list)
    """What each rank said."""
    steps: list[int] = field(default_factory=list)
    """The steps of the checkpoints that were committed when it had ended."""
    metrics: list[Any] = field(default_factory=list)
    """Steps and losses in the run's ``metrics.jsonl``, when it is finished."""
    contents: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What a separate process found in each of them, where one looked."""


@dataclass
class Findings:
    """What is wrong; nothing should be."""

    lost_committed: list[str] = field(default_factory=list)
    unloadable: list[str] = field(default_factory=list)
    resume_not_bitwise: list[str] = field(default_factory=list)
    samples_duplicated_or_skipped: list[str] = field(default_factory=list)
    metrics_wrong: list[str] = field(default_factory=list)
    stops_failed: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} kills instead of {KILLS}")
    parser.add_argument("--kills", type=int, metavar="NUMBER", help="as many kills")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="NUMBER", help="no new run after so long")
    parser.add_argument("--seed", type=int, default=0, metavar="NUMBER", help="other moments")
    arguments = parser.parse_args()
    kills = arguments.kills or (QUICK if arguments.quick else KILLS)
    epochs = QUICK_EPOCHS if kills <= QUICK else EPOCHS
    console, begin, dice = Console(stderr=True, width=120), time.perf_counter(), random.Random(arguments.seed)
    directory = Path(tempfile.mkdtemp(prefix="lowtide-crash-"))
    try:
        reference = undisturbed_run(directory, epochs)
        runs: list[list[Attempt]] = []
        findings = Findings()
        while (left := kills - sum(one.killed is not None for run in runs for one in run)) > 0:
            if time.perf_counter() - begin > 60 * arguments.minutes:
                break
            number = len(runs)
            saves = sum(one.during_save for run in runs for one in run)
            run = disturbed(directory / f"run_{number}", epochs, left, kills // 5 - saves, dice, findings)
            compare(f"run {number}", run, reference, findings)
            runs.append(run)
            console.print(f"run {number}: {len(run)} starts", highlight=False)
            shutil.rmtree(directory / f"run_{number}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    attempts = [one for run in runs for one in run]
    figures = {
        "kills": sum(one.killed is not None for one in attempts),
        **{name: len(found) for name, found in vars(findings).items()},
        "kills_during_saves": sum(one.during_save for one in attempts),
        "kills_during_asynchronous_saves": sum(one.during_save and one.job.asynchronous for one in attempts),
        "kills_of_one_rank": sum(one.one_rank for one in attempts),
        "stops": sum(one.stopped for one in attempts),
        "stops_interrupted": sum(one.interrupted for one in attempts),
        "runs": len(runs),
        "seconds": round(time.perf_counter() - begin),
    }
    table = Table("what", "count")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    for found in vars(findings).values():
        for line in found[:10]:
            console.print(line, style="red", markup=False, highlight=False)
    if arguments.json:
        print(json.dumps(stamped(figures)))
    return 1 if any(vars(findings).values()) else 0


def undisturbed_run(directory: Path, epochs: int) -> Attempt:
    """The job, undisturbed."""
    job = Job(directory / "reference", directory / "reference_run", False, epochs)
    processes = start(job, free_port(), reference=True)
    if not finished(processes, time.time() + PATIENCE):
        raise SystemExit("the undisturbed run does not end")
    lines = [list(said(job, rank)) for rank in range(RANKS)]
    if any("done" not in line[-1] for line in lines):
        raise SystemExit(f"the undisturbed run failed: {[line[-1] for line in lines]}")
    return Attempt(job, "none", lines=lines, metrics=metrics_of(job))


def disturbed(
    directory: Path, epochs: int, kills: int, saves: int, dice: random.Random, findings: Findings
) -> list[Attempt]:
    """One run with at most so many kills, until it is finished; ``saves`` of them should still hit a save."""
    attempts: list[Attempt] = []
    while not attempts or attempts[-1].killed is not None:
        job = Job(directory / f"attempt_{len(attempts)}", directory / "run", dice.random() < 0.5, epochs)
        target = "save" if saves > 0 and dice.random() < 0.4 else "stop" if dice.random() < 0.3 else "moment"
        attempt = Attempt(job, target)
        before = uncommitted(job.checkpoints)
        processes = start(job, free_port())
        done = not kills or not wait_for_moment(attempt, processes, before, dice)
        if done:
            if not finished(processes, time.time() + PATIENCE):
                raise SystemExit("a run that was not killed does not end")
        elif target == "stop" and stop(attempt, processes, dice, findings):
            kills -= 1
        elif target != "stop":
            kill(attempt, processes, dice)
            kills -= 1
        if attempt.killed is not None:
            attempt.during_save = bool(uncommitted(job.checkpoints) - before)
            saves -= attempt.during_save
        attempt.lines = [list(said(job, rank)) for rank in range(RANKS)]
        attempt.metrics = metrics_of(job)
        attempt.steps = [marker.step for _, marker in checkpoints_in(job.checkpoints)]
        if attempt.killed is None or attempt.during_save or dice.random() < 0.3:
            attempt.contents = contents_of(job)
        attempts.append(attempt)
    return attempts


def contents_of(job: Job) -> dict[str, dict[str, Any]]:
    """What is in each committed checkpoint, by a process of its own."""
    report = job.directory / "contents.json"
    os.waitpid(inspect(job, report), 0)
    if not report.exists():
        return {"all": {"step": 0, "error": "the process that loads them failed"}}
    found: dict[str, dict[str, Any]] = json.loads(report.read_text())
    return found


def wait_for_moment(attempt: Attempt, processes: list[int], before: set[str], dice: random.Random) -> bool:
    """Wait for the moment to kill; False if the run was finished before it came.

    Moments are counted in what the job does, so that they fall the same way on a busy machine: for a random moment the
    lines that rank 0 has said, and none at all while it starts; for a save the checkpoints begun.
    """
    lines = dice.choice([0, dice.randint(1, 16), dice.randint(1, 16), dice.randint(1, 16)])
    saves, delay = dice.randint(1, 3), dice.uniform(0, 1.0 if not lines else 0.1)
    seen, ranks = set(before), range(RANKS)
    while not finished(processes, time.time() + 0.001, reap=False):
        if attempt.target == "stop" and not all((attempt.job.directory / f"rank_{n}.jsonl").exists() for n in ranks):
            continue  # Python is still starting, and SIGTERM would end it
        if attempt.target != "save":
            if sum(1 for _ in said(attempt.job, 0)) >= lines:
                return not finished(processes, time.time() + delay, reap=False)
        elif begun := uncommitted(attempt.job.checkpoints) - seen:
            seen |= begun
            saves -= 1
            if not saves:
                time.sleep(dice.uniform(0, 0.03))
                return True
    return False


def kill(attempt: Attempt, processes: list[int], dice: random.Random) -> None:
    """Kill the whole job, or one rank and a moment later the other, as torchrun would."""
    attempt.one_rank = dice.random() < 0.3
    attempt.killed = time.time()
    for process in dice.sample(processes, len(processes)):
        os.kill(process, signal.SIGKILL)
        if attempt.one_rank:
            time.sleep(dice.uniform(0, 0.2))
    for process in processes:
        os.waitpid(process, 0)


def stop(attempt: Attempt, processes: list[int], dice: random.Random, findings: Findings) -> bool:
    """Ask the job to stop, and for one in two of them lose patience while it saves; False if it was finished before."""
    impatient = dice.random() < 0.5
    begun = set(os.listdir(attempt.job.checkpoints)) if attempt.job.checkpoints.is_dir() else set()
    asked = processes if impatient else dice.sample(processes, dice.randint(1, len(processes)))
    attempt.killed, attempt.one_rank = time.time(), len(asked) == 1
    for process in asked:
        os.kill(process, signal.SIGTERM)
    if impatient:
        while not finished(processes, time.time() + 0.001, reap=False):
            if uncommitted(attempt.job.checkpoints) - begun:
                time.sleep(dice.uniform(0, 0.03))
                attempt.interrupted = True
                number = dice.choice([signal.SIGTERM, signal.SIGKILL])
                for process in processes:
                    os.kill(process, number)
                break
    if not finished(processes, time.time() + PATIENCE, reap=False):
        raise SystemExit("a run that was asked to stop does not end")
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    attempt.stopped = codes == [STOPPED] * RANKS
    attempt.interrupted = attempt.interrupted and not attempt.stopped
    if codes == [0] * RANKS:
        attempt.killed = None
    elif not attempt.stopped and not attempt.interrupted:
        findings.stops_failed.append(f"{attempt.job.directory}: exit codes {codes}")
    return attempt.killed is not None


def finished(processes: list[int], until: float, *, reap: bool = True) -> bool:
    """Whether all processes end before ``until``; they stay known to the system unless they are reaped."""
    flags = os.WEXITED | (0 if reap else os.WNOWAIT)
    for process in processes:
        while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.time() > until:
                return False
            time.sleep(0.0005)
    if reap:
        for process in processes:
            os.waitid(os.P_PID, process, flags)
    return True


def metrics_of(job: Job) -> list[Any]:
    """What the runner's own file says of each step, the time it took left out; a line may be cut off."""
    lines = job.metrics.read_text().splitlines(keepends=True) if job.metrics.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    return [[step["step"], step["loss"], step["global_norm"], step["samples"]] for step in steps]


def free_port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def uncommitted(checkpoints: Path) -> set[str]:
    """The checkpoints that have no marker."""
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    return {name for name in names if not (checkpoints / name / "committed.json").exists()}


def said(job: Job, rank: int) -> Iterator[dict[str, Any]]:
    """The lines of a rank; the last may be cut off."""
    path = job.directory / f"rank_{rank}.jsonl"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            yield json.loads(line)


def compare(name: str, run: list[Attempt], undisturbed: Attempt, findings: Findings) -> None:
    """Compare a run that was killed and resumed with the one that was not."""
    reference = undisturbed.lines
    if run[-1].metrics != undisturbed.metrics:
        findings.metrics_wrong.append(f"{name}: {len(run[-1].metrics)} of {len(undisturbed.metrics)} steps")
    wanted = [{line["step"]: line for line in lines if "step" in line} for lines in reference]
    digests = {line["state"]: line["digest"] for line in reference[0] if "state" in line}
    done = reference[0][-1]["done"]
    committed = 0
    history: list[dict[int, list[int]]] = [{} for _ in range(RANKS)]
    for number, attempt in enumerate(run):
        where = f"{name}, start {number}"
        for rank, lines in enumerate(attempt.lines):
            for line in lines:
                if "resumed" in line:
                    if line["resumed"] < committed:
                        findings.lost_committed.append(f"{where}: resumed {line['resumed']}, committed {committed}")
                    if line["resumed"] and line["resumed"] not in digests:
                        findings.resume_not_bitwise.append(f"{where}: resumed from step {line['resumed']}")
                    history[rank] = {step: ids for step, ids in history[rank].items() if step <= line["resumed"]}
                elif "step" in line:
                    if line != wanted[rank][line["step"]]:
                        findings.resume_not_bitwise.append(f"{where}, rank {rank}: {line}")
                    if line["step"] in history[rank]:
                        findings.samples_duplicated_or_skipped.append(f"{where}: step {line['step']} twice")
                    history[rank][line["step"]] = line["sample_ids"]
                elif "done" in line and line["done"] != done:
                    findings.resume_not_bitwise.append(f"{where}: the state at the end")
                elif "error" in line and (attempt.killed is None or line["time"] < attempt.killed):
                    findings.unloadable.append(f"{where}, rank {rank}: {line['error']}")
        for checkpoint, content in attempt.contents.items():
            if "error" in content:
                findings.unloadable.append(f"{where}: {checkpoint}: {content['error']}")
            elif content["digest"] != digests[content["step"]]:
                findings.resume_not_bitwise.append(f"{where}: {checkpoint} holds another state")
        reported = [line["committed"] for lines in attempt.lines for line in lines if "committed" in line]
        committed = max([committed, *reported])
        if max(attempt.steps, default=0) < committed:
            findings.lost_committed.append(f"{where}: step {committed} is not on the disk")
    for rank in range(RANKS):
        found = [one for step in sorted(history[rank]) for one in history[rank][step]]
        exact = [one for step in sorted(wanted[rank]) for one in wanted[rank][step]["sample_ids"]]
        if found != exact:
            findings.samples_duplicated_or_skipped.append(f"{name}, rank {rank}: {len(found)} of {len(exact)} samples")


if __name__ == "__main__":
    sys.exit(main())
