"""Measure, decide and switch while training, and come through when memory runs out.

The package is also the function: ``lowtide.adapt(model, optimizer)`` is :func:`lowtide.adapt.call.adapt`, as
:mod:`lowtide.plan` is.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__: list[str] = []


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from lowtide.adapt.call import adapt

        return adapt(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
