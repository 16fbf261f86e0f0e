"""Random Policies inside torch.compile: exactness, bytes, graphs, host time, and torch's own memory budget as the peer.

    python benchmarks/compiled.py --json
    python benchmarks/compiled.py --json --quick
    python benchmarks/compiled.py --json --only budget

``cases``: ten models of two layers (Llama, GPT-2, experts as in Mixtral, DeepSeek, ViT, T5, Gemma, BERT, our own
reference, one like nanochat), compiled layer by layer and as a whole, with ``aot_eager`` and Inductor, in float32
and under bfloat16 autocast, each with random decisions for its operators. Every loss and gradient of two steps is
compared with those of the same compiled model without a Policy. ``saved_bytes_ratio`` is the most that compiled layers
hold for backward over what they may: what the compiler holds undecided, less what is recomputed, and what that is
rebuilt from. ``recompiles_per_switch`` is how many graphs are compiled, for each graph of the model, when another
Policy is applied; ``switch_seconds_*`` what the first step with it takes longer than the next, by backend and way, for
two small layers.

``host``: the time of a small compiled layer with a decision that changes nothing in its graph, less that of the same
layer without one, on the real clock, in several processes.

``budget``: torch's ``activation_memory_budget`` at 0.25, 0.5 and 0.75 on a Llama layer stack; for each, the Policy that
``lowtide.plan`` makes for the memory that a step of torch's split reserves when it is simulated, from a Trace of the
layers that torch compiles with that budget; CPU time of a step, interleaved, ours over torch's.

FlexAttention has no backward on the CPU and is not among the models. This benchmark is nightly: its cases take most of
an hour on two cores. With ``--log FILE`` each cell is written there when it has run, and those that the same commit has
written there are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import lowtide
from lowtide.operators.layers import find_layers
from lowtide.policy import LayerPolicy, Policy, Recompute, Rule
from lowtide.trace.capture import capture
from lowtide.trace.trace import Trace
from stamp import stamped
from support.compiled_cases import BACKENDS, CELLS, MODELS, Cell, NanoChat, Outcome, run_cell

POLICIES = {"aot_eager": 8, "inductor": 3}
QUICK = [Cell("nanochat", "aot_eager", "fp32", way) for way in ("layer", "model")]
BUDGETS = (0.25, 0.5, 0.75)
SCALE = 16
"""The plans are for so many times the batch: an allocator's pages are large for what this one holds."""
EXPANDABLE: Any = {"expandable_segments": True}


def all_cases(quick: bool, log: Path | None, console: Console) -> list[Outcome]:
    """The outcomes of every cell, from two processes; those of this commit in ``log`` are taken from there."""
    commit = stamped({})["stamp"]["commit"]
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log is not None and log.exists() else []
    found = [Outcome(Cell(*cell), *rest) for of, cells in lines if of == commit for cell, *rest in cells]
    known = {one.cell for one in found}
    chosen = [cell for cell in (QUICK if quick else CELLS) if cell not in known]
    # A new process for each cell: what Dynamo and Inductor keep of a cell would slow the next ones down.
    pool = ProcessPoolExecutor(2, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with pool, Progress(console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task("cells", total=len(chosen))
        waiting = [pool.submit(run_cell, cell, 1 if quick else POLICIES[cell.backend]) for cell in chosen]
        for future in as_completed(waiting):
            found += future.result()
            if log is not None:
                with log.open("a") as file:
                    print(json.dumps([commit, future.result()]), file=file)
            shown.advance(task)
            if not console.is_terminal:
                console.print(_line(future.result()), markup=False, highlight=False)
    return found


def _line(outcomes: list[Outcome]) -> str:
    """What one cell found, for a log."""
    different = sum(bool(one.different) for one in outcomes)
    errors = sum(bool(one.error) for one in outcomes)
    return f"{' '.join(outcomes[0].cell)}: {len(outcomes)} Policies, {different} not bitwise, {errors} errors"


def figures_of(outcomes: list[Outcome]) -> dict[str, Any]:
    """The figures of all cases."""
    done = [one for one in outcomes if not one.error]
    inductor = [one for one in done if one.cell.backend == "inductor"]
    precise = [one for one in inductor if one.cell.precision == "fp32"]
    return {
        "cases": len(outcomes),
        "errors": len(outcomes) - len(done),
        "not_bitwise_aot_eager": sum(bool(one.different) for one in done if one.cell.backend == "aot_eager"),
        "inductor_cases": len(inductor),
        "inductor_not_bitwise": sum(bool(one.different) for one in inductor),
        "inductor_not_bitwise_fp32": sum(bool(one.different) for one in precise),
        "inductor_worst_relative": max((one.relative for one in inductor), default=0.0),
        "saved_bytes_ratio": max((one.held / one.bound for one in done if one.bound), default=0.0),
        "held_without_a_bound": sum(one.held for one in done if not one.bound),
        "graph_breaks_added": sum(max(one.breaks, 0) for one in done),
        "graphs_added": sum(max(one.graphs, 0) for one in done),
    }


def table_of(outcomes: list[Outcome]) -> Table:
    """By model and backend."""
    table = Table("model", "backend", "cases", "not bitwise", "worst difference", "bytes held of allowed", "errors")
    for model in MODELS:
        for backend in BACKENDS:
            found = [one for one in outcomes if (one.cell.model, one.cell.backend) == (model, backend)]
            if found:
                ratios = [one.held / one.bound for one in found if one.bound]
                table.add_row(
                    model,
                    backend,
                    str(len(found)),
                    str(sum(bool(one.different) for one in found)),
                    f"{max(one.relative for one in found):.1e}",
                    f"{max(ratios, default=0.0):.3f}",
                    str(sum(bool(one.error) for one in found)),
                )
    return table


def switches() -> dict[str, float]:
    """The most graphs that a switch to another Policy compiles, for each graph that the model has, and how long that
    takes in the median."""
    worst, figures = 0.0, dict[str, float]()
    for backend in BACKENDS:
        for way in ("layer", "model"):
            torch._dynamo.reset()
            counters = torch._dynamo.utils.counters
            counters.clear()
            model = NanoChat()
            compiled: Any = model
            if way == "layer":
                for block in model.blocks:
                    block.compile(backend=backend)
            else:
                compiled = torch.compile(model, backend=backend)
            tokens = torch.randint(0, 32, (2, 8))
            compiled(tokens).sum().backward()
            graphs = before = counters["stats"]["unique_graphs"]
            longer = []
            for names in (("up",), ("relu",), ("q", "up"), ("up",)):
                handle = lowtide.apply(model, _recompute(names), layers="blocks")
                taken = []
                for _ in range(2):
                    begin = time.perf_counter()
                    compiled(tokens).sum().backward()
                    taken.append(time.perf_counter() - begin)
                handle.remove()
                longer.append(taken[0] - taken[1])
                worst = max(worst, (counters["stats"]["unique_graphs"] - before) / graphs)
                before = counters["stats"]["unique_graphs"]
            figures[f"switch_seconds_{backend}_{way}"] = round(statistics.median(longer), 2)
    return {"recompiles_per_switch": worst} | figures


def _recompute(names: tuple[str, ...]) -> Policy:
    return Policy((LayerPolicy(rules=tuple(Rule(name, Recompute()) for name in names)),), "solver", any_depth=True)


class Small(nn.Module):
    """A layer with an activation that the compiler recomputes anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


COPIES = 6


def host_microseconds(processes: int) -> dict[str, float]:
    """What a call of a decided compiled layer takes longer than one of the same layer without a decision.

    Where code and tensors lie in memory makes two processes differ by a microsecond or two, so there are several, one
    after the other; the standard error of their mean is the noise.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        found = [pool.submit(_plain_and_decided).result() for _ in range(processes)]
    added = [1e6 * (decided - plain) for plain, decided in found]
    return {
        "host_us": 1e6 * statistics.mean(plain for plain, _ in found),
        "host_us_added": statistics.mean(added),
        "host_us_noise": statistics.stdev(added) / math.sqrt(processes),
        "host_us_processes": processes,
    }


def _plain_and_decided() -> tuple[float, float]:
    """Seconds of a call: of several layers of each kind, in turn, the fastest round of each."""
    torch._dynamo.reset()
    torch.set_num_threads(1)
    layers: list[nn.Module] = []
    for number in range(2 * COPIES):
        torch.manual_seed(0)
        model = nn.ModuleList([Small()])
        model[0].compile()
        if number % 2:
            lowtide.apply(model, _recompute(("act",)), layers="")
        layers.append(model[0])
    x = torch.randn(4, 8)
    for layer in layers * 3:
        layer(x).sum().backward()
    seconds = [float("inf")] * len(layers)
    order = random.Random(0)
    for _ in range(200):
        for index in order.sample(range(len(layers)), len(layers)):
            layer = layers[index]
            begin = time.perf_counter()
            for _ in range(20):
                layer(x)
            seconds[index] = min(seconds[index], (time.perf_counter() - begin) / 20)
    return statistics.mean(seconds[::2]), statistics.mean(seconds[1::2])


class Stack(nn.Module):
    """Llama layers, large enough for their products to count."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, use_cache=False, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, labels=tokens).loss
        return loss


LAYERS, WIDTH, HEADS, LENGTH = 4, 256, 4, 256


def _stack() -> tuple[Stack, Tensor]:
    """The model, and a batch."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return Stack(LAYERS, WIDTH, HEADS), tokens


def _splitting_with(budget: float | None) -> AbstractContextManager[None]:
    """torch's own budget while graphs are compiled."""
    if budget is None:
        return nullcontext()
    patched: AbstractContextManager[None] = torch._functorch.config.patch(activation_memory_budget=budget)
    return patched


def traced(budget: float) -> Trace:
    """The Trace of the compiled layers, as torch splits them with that budget."""
    torch._dynamo.reset()
    model, tokens = _stack()
    many = tokens.repeat(SCALE, 1)
    for layer in find_layers(model, None).modules:
        layer.compile()
    with _splitting_with(budget):
        return capture(model, lambda: model(many), rounds=0).without_seconds()


def train(pipe: Connection, budget: float | None, policy: Policy | None) -> None:
    """A process in which a model with compiled layers trains: sends the bytes that they hold for backward, then, each
    time it is asked to, the CPU time of a step."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, tokens = _stack()
    for layer in find_layers(model, None).modules:
        layer.compile()
    if policy is not None:
        lowtide.apply(model, policy)
    with _splitting_with(budget):  # as long as it runs: a graph that is compiled again must be split like the first
        pipe.send(_saved_bytes(lambda: model(tokens), model))
        for _ in range(3):
            model(tokens).backward()
        while pipe.recv():
            begin = time.process_time()
            model(tokens).backward()
            pipe.send(time.process_time() - begin)


def against_torch(rounds: int, console: Console) -> dict[str, Any]:
    """Our step's CPU time over that of torch's own budget, at the bytes that torch's holds.

    Each model is in a process of its own, since compiled functions of one process share their graphs, and all take
    turns, a step each.
    """
    warnings.simplefilter("ignore")
    trace = traced(1.0)
    found: dict[str, Any] = {}
    for budget in BUDGETS:
        simulated = lowtide.plan(traced(budget), budget=1 << 40, device="cpu", swap=False, **EXPANDABLE).simulation
        plan = lowtide.plan(trace, budget=simulated.reserved, device="cpu", swap=False, must_fit=False, **EXPANDABLE)
        with ExitStack() as stack:
            models = {
                "ours": stack.enter_context(_training(None, plan.policy)),
                "theirs": stack.enter_context(_training(budget, None)),
                "plain": stack.enter_context(_training(None, None)),
            }
            held = {name: pipe.recv() for name, pipe in models.items()}
            ratios, alone = [], []
            for _ in range(rounds):
                seconds = {}
                for name, pipe in models.items():
                    pipe.send(True)
                    seconds[name] = pipe.recv()
                ratios.append(seconds["ours"] / seconds["theirs"])
                alone.append({name: seconds[name] / seconds["plain"] for name in ("ours", "theirs")})
            for pipe in models.values():
                pipe.send(False)
        found[str(budget)] = {
            "torch_bytes": held["theirs"],
            "our_bytes": held["ours"],
            "all_bytes": held["plain"],
            "simulated_over_torch": plan.simulation.seconds / simulated.seconds,
            "fits": plan.feasible,
            "plan_budget": plan.budget,
            "policy": str(plan.policy),
            "ours_over_torch": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4),
            "ours_over_undecided": statistics.median(one["ours"] for one in alone),
            "torch_over_undecided": statistics.median(one["theirs"] for one in alone),
        }
        console.print(f"activation_memory_budget {budget}: {found[str(budget)]}", markup=False, highlight=False)
    mean = statistics.mean(one["ours_over_torch"] for one in found.values())
    return {"budget_vs_torch": mean, "budgets": found}


@contextmanager
def _training(budget: float | None, policy: Policy | None) -> Iterator[Connection]:
    """The pipe to a process that trains."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=train, args=(theirs, budget, policy), daemon=True)
    process.start()
    theirs.close()  # so that what is read from a process that died raises
    yield ours
    process.join()


def _saved_bytes(run: Callable[[], Tensor], model: nn.Module) -> int:
    """What the layers save for backward that is not a parameter, each storage once, in a run after the first."""
    run()
    own = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *model.buffers()]}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    del loss
    return sum(seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="two cells and short rounds, under a minute")
    parser.add_argument("--only", choices=("cases", "host", "budget"), help="one of the three parts")
    parser.add_argument("--log", type=Path, help="where cells are written when they have run, to go on from")
    options = parser.parse_args()
    if options.quick and options.log is not None:
        parser.error("--log is for all cells: leave out --quick, which runs two with fewer Policies")
    console = Console(stderr=True)
    figures: dict[str, Any] = {}
    if options.only in (None, "cases"):
        outcomes = all_cases(options.quick, options.log, console)
        console.print(table_of(outcomes))
        for one in outcomes:
            if one.error or (one.different and one.cell.backend == "aot_eager"):
                console.print(str(one), markup=False, highlight=False, style="red")
        figures |= figures_of(outcomes) | switches()
    if options.only in (None, "host"):
        figures |= host_microseconds(2 if options.quick else 24)
    if options.only == "budget" or (options.only is None and not options.quick):
        figures |= against_torch(30, console)
    if options.json:
        print(json.dumps(stamped(figures)))


if __name__ == "__main__":
    main()
