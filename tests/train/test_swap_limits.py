"""The limits of swapping through the command: from the file, from flags, and what they change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.commands import TINY, merged, receipts, train

SWAP: dict[str, Any] = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [0]}]}}


def test_a_host_limit_in_the_file_keeps_tensors_on_the_device_and_a_flag_wins_over_it(tmp_path: Path) -> None:
    few = {"swap_config": {"limits": {"host_bytes": 4096, "minimum_bytes": 1}}}
    done = train(tmp_path, merged(TINY, SWAP, few))
    assert done.returncode == 0, done.stderr
    (receipt,) = receipts(tmp_path)
    assert sum(one["kept_bytes"] for one in receipt["operators"]) > 0
    assert "host memory" in json.dumps(receipt)
    done = train(tmp_path, merged(TINY, SWAP, few), "--fresh", "--swap-host-bytes", "1GiB")
    assert done.returncode == 0, done.stderr
    (receipt,) = receipts(tmp_path)
    assert sum(one["moved_bytes"] for one in receipt["operators"]) > 0
    assert sum(one["kept_bytes"] for one in receipt["operators"]) == 0


def test_a_disk_directory_that_is_not_there_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    disk = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True, "tier": "disk"}]}}
    done = train(tmp_path, merged(TINY, disk), "--swap-disk-directory", str(tmp_path / "missing"))
    assert done.returncode == 1
    assert "is no directory that can be written to" in done.stderr
    done = train(tmp_path, merged(TINY, disk), "--swap-disk-directory", str(tmp_path), "--fresh")
    assert done.returncode == 0, done.stderr
