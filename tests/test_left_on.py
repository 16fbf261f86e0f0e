"""The guard around every test sees what the test leaves on, and takes it off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide._torch_private.modes import function_modes
from support.left_on import take_off


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def patch() -> None:
    plain = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda storage, size: plain(storage, size)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("leave", "named"),
    [
        (lambda: Dispatches().__enter__(), "dispatch mode"),
        (lambda: TorchFunctionMode().__enter__(), "function mode"),
        (lambda: saved_tensors_hooks(lambda x: x, lambda x: x).__enter__(), "saved-tensor hooks"),
        (patch, "UntypedStorage.resize_"),
        (lambda: register_optimizer_step_post_hook(lambda *_: None), "all optimizers"),
    ],
)
def test_what_is_left_on_is_named_and_taken_off(leave: Callable[[], Any], named: str) -> None:
    modes = function_modes()
    leave()
    (left,) = take_off(modes)
    assert named in left
    assert take_off(modes) == []
