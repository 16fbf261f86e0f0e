"""What an attack comes to: the program run without lowtide and with it, and compared."""

from __future__ import annotations

import gc
import re
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from attacks.harness import Attack, Found, Side, Value, seed
from attacks.surroundings import Memory, Surroundings, settled, shape_of
from attacks.treatments import TREATMENTS
from lowtide.errors import LowtideError

__all__ = ["KINDS", "WRONG", "Finding", "Outcome", "examine"]

KINDS = ("exact", "refused", "left_behind", "leaked", "crashed", "silently_wrong", "hung")
"""From best to worst."""
WRONG = KINDS[2:]
CAPACITY = 4 << 30


@dataclass(frozen=True)
class Finding:
    """What one treatment on one device came to."""

    where: str
    kind: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True)
class Outcome:
    """What an attack came to: the worst of its findings."""

    name: str
    tries: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def kind(self) -> str:
        return max((finding.kind for finding in self.findings), key=KINDS.index, default="exact")

    @property
    def text(self) -> str:
        """Where it is worst, and what was found there."""
        worst = [finding for finding in self.findings if finding.kind == self.kind]
        if self.kind == "exact":
            return ""
        more = f" (and {len(worst) - 1} more)" if len(worst) > 1 else ""
        return f"{worst[0].where}: {worst[0].text}{more}"


@dataclass
class Seen:
    """What one run of a program showed."""

    values: dict[str, Value] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    kind: str = ""
    """Of the error: refused, crashed or what the program itself found."""
    changed: list[str] = field(default_factory=list)
    grown: dict[str, int] = field(default_factory=dict)
    races: list[str] = field(default_factory=list)


def examine(chosen: Attack, *, quick: bool = False) -> Outcome:
    """Run an attack in this process, which nothing else should have trained in.

    ``quick``: on the first device only, and under its first two treatments.
    """
    warnings.filterwarnings("ignore")
    begin = time.perf_counter()
    devices, treatments = chosen.devices, chosen.treatments
    if quick:
        devices, treatments = devices[:1], treatments[:2]
    found = tuple(finding for device in devices for finding in _on_device(chosen, device, treatments))
    return Outcome(chosen.name, chosen.tries, found, time.perf_counter() - begin)


def _on_device(chosen: Attack, device: str, treatments: tuple[str, ...]) -> Iterator[Finding]:
    observe(chosen, device, None)  # what torch makes once, it makes here
    gc.freeze()  # and is not looked at again
    plain = observe(chosen, device, None)
    if plain.kind:
        yield Finding(f"{device}, without lowtide", "crashed", plain.error)
        return
    for name in treatments:
        seen = observe(chosen, device, name)
        if leaked(plain, seen):  # what torch made for once is there by now; a leak leaks in every run
            plain, seen = observe(chosen, device, None), observe(chosen, device, name)
        yield compared(f"{device}, {name}", plain, seen)
        if seen.changed:  # what follows would run in what was left
            return


def observe(chosen: Attack, device: str, treatment: str | None) -> Seen:
    """Run the program once, and see what it leaves."""
    seed()
    _clean(device)
    place = torch.device(device)
    around, memory = Surroundings.now(), Memory.now(place)
    seen = _run(chosen, device, treatment)
    gc.collect()
    settled(lambda: not around.changed(Surroundings.now()) and not memory.grown(Memory.now(place)))
    seen.changed = around.changed(Surroundings.now())
    seen.grown = memory.grown(Memory.now(place))
    if device == "tide":
        import tide

        seen.races = [str(race) for race in tide.races()]
    return seen


def _run(chosen: Attack, device: str, treatment: str | None) -> Seen:
    side = Side(device, TREATMENTS[treatment] if treatment is not None else None)
    seen = Seen()
    try:
        with side:
            seed(1)
            chosen.program(side)
        side.record_states()
        seen.values = side.values
    except Exception as error:
        # As text: an exception holds every frame that it came through, and their tensors.
        seen.kind, seen.error = _kind_of(error, chosen), _text_of(error)
    seen.shape = shape_of(side.models, side.optimizers)
    return seen


def _kind_of(error: Exception, chosen: Attack) -> str:
    if isinstance(error, Found):
        return error.kind
    documented = any(re.search(pattern, str(error)) for pattern in chosen.documented)
    return "refused" if isinstance(error, LowtideError) or documented else "crashed"


def _text_of(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, LowtideError | Found):
        return text
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text[:400]} ({'/'.join(last.filename.split('/')[-3:])}:{last.lineno})"


def _clean(device: str) -> None:
    if device != "tide":
        return
    import tide

    gc.collect()
    tide.faults.disarm()
    tide.reset()
    tide.configure(preset="h100", capacity=CAPACITY)
    tide.clear_races()


def compared(where: str, plain: Seen, seen: Seen) -> Finding:
    """The worst that one treatment shows beside the run without lowtide."""
    findings = [Finding(where, seen.kind, seen.error)] if seen.kind else []
    if not seen.kind:
        different = sorted(
            name
            for name in plain.values.keys() | seen.values.keys()
            if name not in seen.values or name not in plain.values or plain.values[name] != seen.values[name]
        )
        if different:
            text = f"{len(different)} of {len(plain.values)} values differ, such as {', '.join(different[:3])}"
            findings.append(Finding(where, "silently_wrong", text))
    if seen.races:
        findings.append(Finding(where, "silently_wrong", f"{len(seen.races)} races: {seen.races[0][:300]}"))
    left = [one for one in seen.changed if one not in plain.changed]
    left += [
        f"{name} {part}: {_differing(found, expected[part])}"
        for name, expected in plain.shape.items()
        for part, found in seen.shape.get(name, {}).items()
        if found != expected[part]
    ]
    if left:
        findings.append(Finding(where, "left_behind", "; ".join(left[:3])))
    if more := leaked(plain, seen):
        findings.append(Finding(where, "leaked", more))
    if not findings:
        return Finding(where, "exact")
    worst = max(findings, key=lambda finding: KINDS.index(finding.kind))
    return Finding(where, worst.kind, " | ".join(finding.text for finding in findings))


def leaked(plain: Seen, seen: Seen) -> str:
    """What there is more of after a run than after the same without lowtide, in words."""
    if seen.kind:  # torch's own checkpoint never frees a graph whose recomputation failed
        return ""
    more = {name: count - plain.grown.get(name, 0) for name, count in seen.grown.items()}
    return "; ".join(f"{count} more {name}" for name, count in more.items() if count > 0)


def _differing(found: Any, expected: Any) -> str:
    if isinstance(found, frozenset):
        return f"more {sorted(found - expected)}, missing {sorted(expected - found)}"
    return f"{found} instead of {expected}"
