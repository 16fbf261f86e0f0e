"""What a test may leave on in its process: modes, hooks, patched functions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._C import _pop_torch_function_stack
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lowtide._torch_private.compiled import NothingCompiled
from lowtide._torch_private.modes import current_dispatch_mode, function_modes
from lowtide._torch_private.saved_tensor_hooks import pop_saved_tensors_hooks, top_saved_tensors_hooks

__all__ = ["take_off"]

PLAIN_RESIZE = torch.UntypedStorage.resize_


def take_off(modes: int) -> list[str]:
    """Take off everything that is on, and name it; ``modes`` function modes were on before."""
    return list(_taken_off(modes))


def _taken_off(modes: int) -> Iterator[str]:
    while (mode := current_dispatch_mode()) is not None:
        yield f"the dispatch mode {mode}"
        mode.__exit__(None, None, None)
    while function_modes() > modes:
        yield f"the function mode {_pop_torch_function_stack()}"
    while (hooks := top_saved_tensors_hooks(False)) is not None:
        yield f"the saved-tensor hooks {hooks}"
        pop_saved_tensors_hooks()
    if torch.UntypedStorage.resize_ is not PLAIN_RESIZE:
        yield f"{torch.UntypedStorage.resize_} as UntypedStorage.resize_"
        torch.UntypedStorage.resize_ = PLAIN_RESIZE  # type: ignore[method-assign]
    for one in list(NothingCompiled._all):
        yield "that nothing is compiled"
        one.off()
    for of_all in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        for hook in of_all.values():
            yield f"the hook {hook} of all optimizers"
        of_all.clear()
