"""Two processes on the device, against the same programs on the CPU over gloo."""

import pytest
import ranks

MODELS = [ranks.ddp, ranks.fsdp, ranks.tensor_parallel, ranks.pipeline]
CLOCKS = [ranks.ready_times, ranks.overlapped, ranks.across_nodes, ranks.step_time, ranks.unwaited]


@pytest.fixture(scope="module")
def on_cpu():
    return ranks.run([ranks.collectives, *MODELS], "cpu")


@pytest.fixture(scope="module")
def on_tide():
    return ranks.run([ranks.collectives, ranks.average, *MODELS, *CLOCKS], "tide")


@pytest.fixture(scope="module")
def on_tide_async():
    return ranks.run([ranks.collectives, *MODELS, ranks.step_time], "tide", mode="async")


def losses(answers) -> list[float]:
    rows = [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
    return [loss for row in rows for loss in row]


def test_every_collective_gives_gloos_values(on_cpu, on_tide):
    assert on_tide["collectives"][0][:-2] == on_cpu["collectives"][0][:-2]
    assert on_tide["collectives"][1][:-2] == on_cpu["collectives"][1][:-2]


def test_two_reductions_without_a_wait_between_follow_each_other(on_tide):
    for answers in on_tide["collectives"]:
        assert answers[-2] == [20.0, 24.0, 28.0, 32.0]


def test_average_is_supported_though_gloo_has_none(on_tide):
    assert on_tide["average"] == [[5.0, 6.0, 7.0, 8.0]] * 2


@pytest.mark.parametrize("model", [model.__name__ for model in MODELS])
def test_losses_are_those_of_gloo_on_the_cpu(model, on_cpu, on_tide):
    expected, found = losses(on_cpu[model]), losses(on_tide[model])
    difference = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    print(f"{model}: largest difference of {len(found)} losses {difference:.1e}")
    assert difference < 1e-5
    assert any(loss > 1 for loss in found)


@pytest.mark.parametrize("model", [model.__name__ for model in MODELS])
def test_losses_are_the_same_in_asynchronous_mode(model, on_tide, on_tide_async):
    assert on_tide[model] == on_tide_async[model]


def test_fsdp_really_shards(on_tide):
    assert [share for _, share in on_tide["fsdp"]] == [0.5, 0.5]


def test_a_collective_starts_with_its_last_rank(on_tide):
    first, second = on_tide["ready_times"]
    assert first["all_reduce"] == second["all_reduce"] == 100_000 + 2 * 500 + 4000


def test_a_receive_starts_when_both_are_ready_and_a_send_does_not_wait(on_tide):
    receiver, sender = on_tide["ready_times"]
    start = sender["all_reduce"]
    assert sender["send"] == start + 500 + 4000
    assert receiver["recv"] == start + 200_000 + 500 + 4000


def test_a_collective_beside_a_longer_kernel_is_hidden_and_two_in_a_row_add_up(on_tide):
    for answer in on_tide["overlapped"]:
        assert answer == {"hidden": 800_000, "exposed": 2 * (2 * 500 + 4000)}


def test_virtual_time_of_a_step_is_the_same_on_both_ranks_and_modes(on_tide, on_tide_async):
    assert on_tide["step_time"] == on_tide_async["step_time"]
    assert all(time > 0 for time in on_tide["step_time"])


def test_a_result_used_before_the_wait_is_stale_and_reported(on_tide):
    for values, reports in on_tide["unwaited"]:
        assert values == [1.0] * 4
        assert reports >= 1


def test_what_goes_to_another_node_goes_through_the_network(on_tide):
    receiver, sender = on_tide["across_nodes"]
    for devices in (0, 2):  # one node
        assert receiver[f"all_reduce {devices}"] == sender[f"all_reduce {devices}"] == 4_000
        assert receiver[f"all_to_all {devices}"] == 2_000
        assert receiver[f"recv {devices}"] == 4_000
    assert receiver["all_reduce 1"] == sender["all_reduce 1"] == 40_000
    assert receiver["all_to_all 1"] == 20_000
    assert receiver["recv 1"] == 40_000
