from __future__ import annotations

import base64
import json
import re
import sys
import zlib
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from lowtide.errors import ReportError
from lowtide.planner.plan import Plan, PlannedOperator
from lowtide.policy import Keep, Policy
from lowtide.report.page import make_page
from lowtide.report.run import Run, SettingRow
from lowtide.report.tables import sections_of
from support.plan_cases import llama_plan

SECTIONS = ("memory", "options", "grid", "stages", "peak", "use", "honesty")
RUN = Run(
    settings=(SettingRow("feed_forward", "swap(6)", "0-3", 10, 20, 0.1, 0.2, 0.3, ("a <b> note",)),),
    without_effect=("nothing has no effect",),
    steps=30,
    seconds=2.0,
    peak=22 << 30,
    memory=((0.0, 13 << 30), (1.0, 22 << 30), (2.0, 13 << 30)),
)


def test_what_was_assumed_for_the_budget_and_the_links_is_on_the_page() -> None:
    notes = ("The budget is the 79.1 GiB of h100 less 1 GiB", "The 8 devices of a node are taken to swap")
    page = make_page(replace(llama_plan(), notes=notes))
    assumed = page[page.index("<h3>Assumed</h3>") :]
    assert all(note in assumed for note in notes)


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def figures(page: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(unpacked(page, "figures"))
    return value


def unpacked(page: str, name: str) -> str:
    """What the page's script unpacks: zlib's bytes, in base 85 without the characters that HTML has a meaning for."""
    found = re.findall(rf'<script type="text/plain" id="{name}">([^<>&`]*)</script>', page)
    assert len(found) == 1
    return zlib.decompress(base64.b85decode(found[0].translate(str.maketrans("[],.", "<>&`")))).decode()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return llama_plan()


def test_a_page_has_every_section_and_every_chart_has_its_data(plan: Plan) -> None:
    page = make_page(plan)
    for name in SECTIONS:
        assert f'id="{name}"' in page
    drawn = re.findall(r'data-figure="(\w+)"', page)
    assert sorted(drawn) == sorted(figures(page))
    assert len(set(drawn)) == 6


def test_a_page_asks_no_other_host_for_anything(plan: Plan) -> None:
    page = make_page(plan, RUN)
    own = re.sub(r'<script type="text/plain".*?</script>', "", page) + unpacked(page, "figures")
    assert "http" not in own
    assert not re.search(r"(src|href)\s*=", own)
    assert "url(" not in own
    assert "@import" not in own


def test_plotly_is_there_exactly_once(plan: Plan) -> None:
    assert unpacked(make_page(plan), "plotly") == get_plotlyjs()


def test_tags_are_closed_in_their_order(plan: Plan) -> None:
    class Checker(HTMLParser):
        open: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    Checker.open = []
    checker = Checker()
    checker.feed(without_scripts(make_page(plan, RUN, given="recompute_config: {}\n")))
    assert checker.open == []


def test_names_are_escaped_everywhere(plan: Plan) -> None:
    name = "<script>alert(1)</script>"
    stage = plan.simulation.stages[0]
    assert stage.peak_at is not None
    evil = replace(
        stage,
        memory=tuple(moment._replace(operator=name) for moment in stage.memory),
        spans=tuple(span._replace(operator=name) for span in stage.spans),
        shares=tuple(share._replace(operator=name) for share in stage.shares),
        peak_at=stage.peak_at._replace(operator=name),
    )
    plan = replace(
        plan,
        model=name,
        device=name,
        notes=(name,),
        yaml=f"recompute_config: {name}",
        options=tuple(replace(one, name=f"{one.name} {name}", how=name) for one in plan.options),
        operators=((PlannedOperator(name, 1, Keep()),),) * 32,
        simulation=replace(plan.simulation, stages=(evil,)),
    )
    row = RUN.settings[0]._replace(setting=name, action=name, notes=(name,))
    page = make_page(plan, RUN._replace(settings=(row,), without_effect=(name,)), given=f"swap_config: {name}")
    assert name not in page
    assert "alert(1)" in page


def test_the_headline_of_a_plan_that_does_not_fit_says_so() -> None:
    page = make_page(llama_plan(8, feasible=False))
    heading = re.search(r"<h1.*?</h1>", page)
    assert heading is not None
    assert 'class="no"' in heading[0]
    assert "does not fit" in heading[0]


def test_planned_and_measured_are_shown_side_by_side_with_the_error(plan: Plan) -> None:
    page = make_page(plan, RUN)
    names = [trace["name"] for trace in figures(page)["memory"][0]["data"]]
    assert names == ["planned", "peak", "measured"]
    assert "The peak was predicted as 22.14 GiB and measured as 22 GiB: +0.6%." in page
    assert "The step was predicted as 1.928 s and measured as 2 s: -3.6%." in page
    assert 'id="run"' in page


def test_a_page_without_measurements_says_that_nothing_was_measured(plan: Plan) -> None:
    assert "Nothing on this page was measured on a device." in make_page(plan)


def test_a_run_alone_has_a_page_too() -> None:
    page = make_page(run=RUN)
    assert "22\N{NO-BREAK SPACE}GiB at the peak" in page
    assert "a &lt;b&gt; note" in page
    assert "there is no plan to compare it with" in page
    assert set(figures(page)) == {"memory"}
    with pytest.raises(ReportError, match="neither"):
        make_page()


def test_the_hover_names_layer_and_operator_and_the_peak_is_drawn(plan: Plan) -> None:
    line = figures(make_page(plan))["memory"][0]["data"][0]
    highest = line["y"].index(max(line["y"]))
    assert line["text"][highest] == "layer 31 · feed_forward.mul"
    assert line["y"][highest] == pytest.approx(plan.simulation.peak / 2**30, rel=1e-4)


def test_the_grid_has_a_colour_for_each_decision(plan: Plan) -> None:
    grid = figures(make_page(plan))["grid"]["data"][0]
    row = dict(zip(grid["y"], grid["z"], strict=True))
    assert set(row["ffn_norm"]) == {1}
    assert row["feed_forward.w1"] == [2] * 24 + [0] * 8
    assert [colour for _, colour in grid["colorscale"]][::2] == ["@keep", "@recompute", "@swap"]


def test_every_stage_has_its_pictures_and_the_fullest_is_shown_first() -> None:
    plan = llama_plan(8, 4, 8)
    page = make_page(plan)
    assert len(figures(page)["memory"]) == len(figures(page)["lanes"]) == 4
    assert re.findall(r"<option( selected)?>stage (\d)", page) == [(" selected", "0"), ("", "1"), ("", "2"), ("", "3")]
    bars = figures(page)["stage_memory"]["data"]
    total = [sum(bar["x"][stage] for bar in bars) for stage in range(4)]
    scale = {"MiB": 2**20, "GiB": 2**30}[figures(page)["stage_memory"]["layout"]["xaxis"]["ticksuffix"].strip()]
    assert total == pytest.approx([stage.reserved / scale for stage in plan.simulation.stages], rel=1e-3)


def test_a_budget_far_above_does_not_flatten_the_pictures(plan: Plan) -> None:
    shown = figures(make_page(replace(plan, budget=1 << 40)))
    for figure in (shown["memory"][0], shown["curve"], shown["stage_memory"]):
        assert figure["layout"]["shapes"] == []
        assert any("the budget, 1 TiB, is far above" in note["text"] for note in figure["layout"]["annotations"])
    assert shown["memory"][0]["layout"]["yaxis"]["range"][1] < 30


def test_the_yaml_is_shown_as_a_difference_to_the_file(plan: Plan) -> None:
    given = "model: llama\nrecompute_config:\n  recompute: true\n# a remark\nrunner_config:\n  epochs: 1\n"
    page = make_page(plan, given=given)
    assert '<span class="drop">-  recompute: true</span>' in page
    assert '<span class="add">+  recompute: false</span>' in page
    assert "epochs" not in without_scripts(page)
    assert "The file says this already." in make_page(plan, given=plan.yaml)


@pytest.mark.parametrize("feasible", [True, False])
@pytest.mark.parametrize("yaml", [True, False])
def test_a_page_says_how_to_use_the_policy_in_python_always(feasible: bool, yaml: bool) -> None:
    plan = llama_plan(4, feasible=feasible)
    page = make_page(plan if yaml else replace(plan, yaml=""))
    section = re.search(r'<section id="use"><h2>How to use it</h2>(.*?)</section>', page, flags=re.DOTALL)
    assert section is not None
    text = unescape(section[1])
    snippet, written = re.findall(r"<pre>(.*?)</pre>", text, flags=re.DOTALL)[:2]
    compile(snippet, "snippet", "exec")
    assert "lowtide.apply(model, policy)" in snippet
    assert Policy.from_json(written) == plan.policy
    assert ("As MindSpore YAML" in text) == yaml
    assert ("does not fit" in text) != feasible


def test_only_the_sections_that_the_plan_has_are_taken_from_a_file() -> None:
    text = "a:\n  b: 1\n\n  c: 2\nd: 3\n# e: 4\nswap_config: {}\n"
    assert sections_of(text, "a: 1\nswap_config: 2\n") == "a:\n  b: 1\n  c: 2\nswap_config: {}"


def test_a_page_of_a_large_plan_is_below_two_megabytes_too() -> None:
    plan = llama_plan(126, 16, 16)
    assert sum(len(stage.spans) for stage in plan.simulation.stages) > 30_000
    page = make_page(plan)
    assert len(page.encode()) < 2 << 20
    for stage, figure in zip(plan.simulation.stages, figures(page)["memory"], strict=True):
        assert max(figure["data"][0]["y"]) == pytest.approx(stage.peak / 2**30, rel=1e-4)


def test_a_plan_without_details_has_a_page_without_their_pictures(plan: Plan) -> None:
    stage = replace(plan.simulation.stages[0], memory=(), spans=(), shares=(), peak_at=None)
    bare = replace(
        plan, simulation=replace(plan.simulation, stages=(stage,)), options=(), curve=(), operators=(), yaml=""
    )
    assert set(figures(make_page(bare))) == {"stage_memory", "stage_time"}


def test_a_missing_plotly_is_named_with_the_extra(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ReportError, match=r"pip install 'lowtide\[report\]'"):
        make_page(plan)
