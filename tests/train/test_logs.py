from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.runtime.receipt import Receipt, SettingReceipt
from lowtide.train.logs import OF_EACH_RANK, start_logging
from lowtide.train.memory_statistics import memory_statistics, wants_memory_statistics

GUIDE = [
    # the guide's command, its lines
    (
        "grep 'attention.flash_attention'",
        ["-INFO - Set op_swap at layer 0: attention.flash_attention, value=10"],
    ),
    ("grep 'Set layer swap at'", ["-INFO - Set layer swap at layer 3 and value is: 20"]),
    (
        "grep 'Set op_swap at layer' -C 1",
        [
            "-INFO - Set select recompute at layer 0: feed_forward",
            "-INFO - Set op_swap at layer 0: .attention, value=20",
        ],
    ),
]


@pytest.mark.parametrize(("command", "lines"), GUIDE, ids=lambda value: str(value)[:30])
def test_the_guides_commands_find_the_guides_lines(tmp_path: Path, command: str, lines: list[str]) -> None:
    logs = start_logging(0, tmp_path / "output" / "msrun")
    for line in lines:
        logging.getLogger("lowtide.train").info("%s", line.removeprefix("-INFO - "))
    logs.close()
    shell = f"cat output/msrun/worker_0.log | {command}"
    found = subprocess.run(shell, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert [line[line.index("-INFO") :] for line in found.splitlines()] == lines


def test_only_the_packages_logger_is_touched_and_given_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, own = logging.getLogger(), logging.getLogger("lowtide")
    before = (list(root.handlers), root.level, list(own.handlers), own.level, own.propagate)
    logs = start_logging(1, tmp_path)
    own.warning("kept")
    logging.getLogger("another").warning("not ours")
    assert (list(root.handlers), root.level) == before[:2]
    logs.close()
    assert (list(root.handlers), root.level, list(own.handlers), own.level, own.propagate) == before
    text = (tmp_path / "worker_1.log").read_text()
    assert "kept" in text
    assert "not ours" not in text
    assert logs.console is None
    assert "kept" not in capsys.readouterr().err  # rank 1 says nothing on the terminal


def test_an_earlier_runs_log_is_kept_and_a_restart_appends(tmp_path: Path) -> None:
    for text, continued in (("first", False), ("second", False), ("restart", True), ("third", False)):
        logs = start_logging(2, tmp_path, continued=continued)
        logging.getLogger("lowtide").warning(text)
        logs.close()
    words = {
        file.name: [line.rsplit(" ", 1)[1] for line in file.read_text().splitlines()] for file in tmp_path.iterdir()
    }
    assert words == {
        "worker_2.1.log": ["first"],
        "worker_2.2.log": ["second", "restart"],
        "worker_2.log": ["third"],
    }


def test_a_rank_with_nothing_of_its_own_to_say_leaves_no_file(tmp_path: Path) -> None:
    logs = start_logging(3, tmp_path)
    logging.getLogger("lowtide").info("the loss, which rank 0 says")
    logs.close()
    assert not list(tmp_path.iterdir())


def test_a_rank_logs_its_warnings_and_what_is_not_the_same_on_all_ranks(tmp_path: Path) -> None:
    logs = start_logging(3, tmp_path)
    logging.getLogger("lowtide").info("the loss")
    logging.getLogger("lowtide").info("peak of this rank", extra=OF_EACH_RANK)
    logging.getLogger("lowtide").warning("damaged")
    logs.close()
    (file,) = tmp_path.iterdir()
    assert [line.split(" - ")[1] for line in file.read_text().splitlines()] == ["peak of this rank", "damaged"]


def test_all_ranks_log_everything_at_the_level_debug(tmp_path: Path) -> None:
    logs = start_logging(3, tmp_path, environment={"GLOG_v": "0"})
    logging.getLogger("lowtide").info("the loss")
    logs.close()
    assert "the loss" in logs.file.read_text()


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0", ["DEBUG", "INFO", "WARNING", "ERROR"]), ("1", ["INFO", "WARNING", "ERROR"]), ("3", ["ERROR"])],
)
def test_glog_v_is_the_level(tmp_path: Path, value: str, expected: list[str]) -> None:
    logs = start_logging(0, tmp_path, environment={"GLOG_v": value})
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger("lowtide").log(level, "said")
    logs.close()
    assert [line.split(" -")[1] for line in logs.file.read_text().splitlines()] == expected


def test_a_wrong_glog_v_says_what_it_can_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GLOG_v is 'verbose'; expected 0"):
        start_logging(0, tmp_path, environment={"GLOG_v": "verbose"})


def test_lazy_inline_is_accepted_with_a_note(tmp_path: Path) -> None:
    logs = start_logging(0, tmp_path, environment={"ENABLE_LAZY_INLINE_NO_PIPELINE": "1"})
    logs.close()
    assert "ENABLE_LAZY_INLINE_NO_PIPELINE is not needed" in logs.file.read_text()


def test_memory_statistics_say_what_moved_and_name_no_operator() -> None:
    assert wants_memory_statistics({"MS_MEMORY_STATISTIC": "1"})
    assert not wants_memory_statistics({})
    swapped = SettingReceipt(
        "attention.flash_attention", "swap", (0,), ("attention.flash_attention",), 2**20, 2**21, 0, 0.1, 0.5, 0.0, ()
    )
    lines = memory_statistics([Receipt((swapped,), (), ()), Receipt((swapped,), (), ())])
    assert any(line.startswith("Process peak memory: ") for line in lines)
    assert "4 MiB moved to the host, 2 MiB freed" in lines[-1]
    assert "1.000 s waited" in lines[-1]
    assert not any("flash_attention" in line for line in lines)
    assert not any("Activations" in line for line in memory_statistics([]))
