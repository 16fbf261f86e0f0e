"""What swapping may take, read from a file of either layout."""

from __future__ import annotations

import pytest

from lowtide.config.check import check_text
from lowtide.config.swap_limits import SwapLimits
from lowtide.operators.names import layer_operators

GRAPH = "model: {model_config: {num_layers: 2}}\nswap_config: {swap: true, %s}\n"
NEWER = "training: {}\nparallelism: {}\nmodel: {num_layers: 2}\nswap: {enable: true, layer_swap: [{layers: [0]}], %s}\n"
DISK = "layer_swap: [{backward_prefetch: 1, layers: true, tier: disk}], "


@pytest.mark.parametrize("text", [GRAPH, NEWER])
def test_limits_are_read_in_both_layouts(text: str) -> None:
    check = check_text(text % "limits: {host_bytes: 64GiB, in_flight_bytes: 1000000}", layer_operators)
    assert check.ok
    assert check.limits == SwapLimits(host_bytes=64 << 30, in_flight_bytes=1_000_000)
    assert not check.problems.warnings


def test_a_disk_limit_without_a_disk_tier_has_no_effect_and_says_so() -> None:
    limits = "limits: {disk_bytes: 1TiB, disk_directory: /scratch}"
    said = [one.message for one in check_text(GRAPH % limits, layer_operators).problems.warnings]
    assert said == [f"`{key}` has no effect: no entry has tier: disk" for key in ("disk_bytes", "disk_directory")]
    check = check_text(GRAPH % (DISK + limits), layer_operators)
    assert not check.problems.warnings
    assert check.limits.given() == {"disk_bytes": 1 << 40, "disk_directory": "/scratch"}


def test_limits_without_swap_have_no_effect_and_say_so() -> None:
    text = (GRAPH % "limits: {host_bytes: 1GiB}").replace("swap: true", "swap: false")
    assert "nothing is swapped" in check_text(text, layer_operators).problems.warnings[0].message
    assert not check_text(text + "adapt: {budget: auto}\n", layer_operators).problems.warnings


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{host_byte: 1GiB}", "`limits` has no `host_byte`"),
        ("{host_bytes: many}", "`host_bytes` is a size"),
        ("{host_bytes: true}", "`host_bytes` is a size"),
        ("{disk_directory: 3}", "`disk_directory` is a path"),
        ("[1GiB]", "`limits` is a mapping of host_bytes"),
    ],
)
def test_wrong_limits_are_errors_with_their_place(written: str, said: str) -> None:
    check = check_text(GRAPH % f"limits: {written}", layer_operators)
    (problem,) = check.problems.errors
    assert said in problem.message
    assert problem.line == 2
