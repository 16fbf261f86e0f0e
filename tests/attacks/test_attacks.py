"""No attack finds anything: its program runs exactly as without lowtide, or is refused with a typed error."""

from __future__ import annotations

import pytest

from attacks.catalogue import AT_RANDOM, ATTACKS
from attacks.outcome import WRONG
from attacks.runner import Runner

pytestmark = pytest.mark.xdist_group("attacks")  # one process imports everything once
SOUND = [name for name in ATTACKS if name not in AT_RANDOM]
OFTEN = 12
"""One attack in so many runs with the other tests, on one device and in two forms; all in all forms are slow."""


def test_there_are_many_attacks_and_each_says_what_it_tries() -> None:
    assert len(ATTACKS) >= 120
    assert all(len(attack.tries) > 10 for attack in ATTACKS.values())


@pytest.mark.parametrize("name", SOUND[::OFTEN])
def test_an_attack_is_exact_or_refused(name: str) -> None:
    outcome = Runner(quick=True).run(name)
    assert outcome.kind not in WRONG, "\n".join(map(str, outcome.findings))


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_an_attack_is_exact_or_refused_in_every_form(name: str) -> None:
    outcome = Runner().run(name)
    assert outcome.kind not in WRONG, "\n".join(map(str, outcome.findings))
