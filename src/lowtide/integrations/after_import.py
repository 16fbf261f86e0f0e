"""Call a function with a module as soon as it is imported, wherever that is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType

__all__ = ["AfterImport"]

Then = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Inside ``with``: calls functions with modules, by their names, once these are imported; now, if they are."""

    def __init__(self, wanted: dict[str, Then]) -> None:
        self.wanted = dict(wanted)

    def __enter__(self) -> AfterImport:
        for name in [name for name in self.wanted if name in sys.modules]:
            self.wanted.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that calls the function afterwards."""
        if fullname not in self.wanted:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Then(spec.loader, self.wanted.pop(fullname))
                return spec
        return None


class _Then(Loader):
    def __init__(self, loader: Loader, then: Then) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What the module knows of its loader is what it would know without this.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.then(module)
