"""The best Policy for a budget: schedule, simulate, problem, solve.

The package is also the function: ``lowtide.plan(model, run, budget="60GiB")`` is :func:`lowtide.plan.call.plan`. A
package and a function of one name cannot both be attributes of ``lowtide``, so the package can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__: list[str] = []


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from lowtide.plan.call import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
