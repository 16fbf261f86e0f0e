"""Programs that end their process or never end, to check what the runner makes of them."""

from __future__ import annotations

import os
import time

from attacks.harness import Side, attack

__all__: list[str] = []


@attack("a program that never ends", treatments=("swap",), seconds=4)
def hangs(side: Side) -> None:
    if side.treated:
        time.sleep(600)


@attack("a program that takes its process with it", treatments=("swap",))
def aborts(side: Side) -> None:
    if side.treated:
        os.abort()
