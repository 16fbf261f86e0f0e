"""What property tests draw from: names, patterns, decisions, policies, catalogues."""

from __future__ import annotations

from hypothesis import strategies as st

from lowtide.policy import (
    Catalogue,
    CollectiveRule,
    Communication,
    Decision,
    Keep,
    LayerPolicy,
    Operator,
    Pattern,
    Policy,
    Recompute,
    Rule,
    Swap,
)

PARTS = ["add", "attention", "mul", "wq", "norm", "silu"]

names = st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map(".".join)
segments = st.sampled_from([*PARTS, ".*", "w[qk]", "(mul|silu)", "m.*"])
patterns = st.one_of(
    st.lists(segments, min_size=1, max_size=3).map(lambda parts: Pattern("\\.".join(parts))),
    st.sampled_from(["attention.*", "mul", "attention\\.wq", ".*norm"]).map(lambda text: Pattern(text, "path")),
)
swaps = st.builds(
    Swap,
    prefetch=st.integers(1, 30),
    tier=st.sampled_from(["host", "disk"]),
    unit=st.sampled_from(["operators", "layers"]),
)
decisions: st.SearchStrategy[Decision] = st.one_of(st.just(Keep()), st.just(Recompute()), swaps)
rules = st.builds(Rule, patterns, decisions, st.booleans(), st.booleans())
collective_rules = st.builds(CollectiveRule, patterns, st.booleans(), st.booleans())
layer_policies = st.builds(
    LayerPolicy,
    default=decisions,
    rules=st.lists(rules, max_size=4).map(tuple),
    boundary=st.one_of(st.just(Keep()), swaps),
    collectives=st.lists(collective_rules, max_size=2).map(tuple),
)


@st.composite
def policies(draw: st.DrawFn, num_layers: int | None = None) -> Policy:
    """Any Policy, with some layers alike."""
    kinds = draw(st.lists(layer_policies, min_size=1, max_size=3))
    count = draw(st.integers(0, 6)) if num_layers is None else num_layers
    layers = [draw(st.sampled_from(kinds)) for _ in range(count)]
    return Policy(
        tuple(layers),
        origin=draw(st.sampled_from(["file", "solver"])),
        fingerprint=draw(st.one_of(st.none(), st.text(max_size=8))),
        communication=draw(st.builds(Communication, st.booleans(), st.booleans(), st.booleans())),
    )


@st.composite
def layers(draw: st.DrawFn) -> tuple[Operator, ...]:
    """The operators of one layer; a name is never both an operator and a module."""
    found = draw(st.lists(names, unique=True, max_size=6))
    chosen = [name for name in found if not any(other.startswith(f"{name}.") for other in found)]
    readers = st.lists(st.sampled_from(chosen), max_size=2).map(tuple) if chosen else st.just(())
    return tuple(Operator(name, draw(readers)) for name in chosen)


@st.composite
def catalogues(draw: st.DrawFn) -> Catalogue:
    """Any model: a few kinds of layers, in any order."""
    kinds = draw(st.lists(layers(), min_size=1, max_size=3))
    order = draw(st.lists(st.sampled_from(range(len(kinds))), max_size=5))
    return Catalogue(tuple(kinds[index] for index in order))
