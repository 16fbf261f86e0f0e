"""The operators of a layer in a graph of Dynamo's, under the names that they have in eager mode.

One node is one call of a torch function, and knows the modules it is called in. So the names are those of
:mod:`lowtide.operators.calls`: the leaf module's path, or the function's name after the path of the innermost module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor, nn

from lowtide._torch_private.storages import storage_key
from lowtide.operators.calls import collapse, function_name, numbered, tensors_of
from lowtide.operators.families import aliases_of
from lowtide.policy import Operator

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = ["ModulePlace", "catalogue_of", "module_places", "name_calls"]


class ModulePlace(NamedTuple):
    """Where a module is in its layer."""

    path: str
    """As operators have it."""
    leaf: bool
    module: ReferenceType[nn.Module] | None = None
    """An identity is another module's once this one is gone."""


ModulePlaces = Mapping[int, ModulePlace]
"""The modules of a layer by their identity, which is how Dynamo's nodes refer to them."""


def module_places(layer: nn.Module) -> dict[int, ModulePlace]:
    """The modules of a layer."""
    return {
        id(module): ModulePlace(collapse(name), next(module.children(), None) is None, ref(module))
        for name, module in layer.named_modules()
    }


def name_calls(nodes: Iterable[Node], modules: ModulePlaces) -> dict[Node, str]:
    """The name of the operator that each node belongs to; nodes that call nothing have none."""
    names: dict[Node, str] = {}
    counts: dict[str, int] = {}
    leaves: dict[tuple[str, ...], str] = {}
    for node in nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        stack = tuple(node.meta.get("nn_module_stack") or ())
        inside = [place for key in stack if (place := modules.get(_identity(key))) is not None and _alive(place)]
        module = inside[-1] if inside else ModulePlace("", leaf=False)
        if module.leaf:
            if stack not in leaves:
                leaves[stack] = numbered(module.path, counts)
            names[node] = leaves[stack]
            continue
        function = _function(node)
        if function is None or _takes_apart(node):
            continue
        names[node] = numbered(f"{module.path}.{function}" if module.path else function, counts)
    return names


_OPERATORS = {
    "iadd": "add", "imul": "mul", "isub": "sub", "itruediv": "div", "mod": "remainder", "truediv": "div",
}  # fmt: skip
"""Python's operators that eager mode knows by another name."""


def _function(node: Node) -> str | None:
    """The name that eager mode has for the function of a node; None for what computes nothing."""
    if node.op == "call_method":
        return function_name(getattr(Tensor, str(node.target), None))
    name = function_name(node.target)
    if name == "truediv" and _value(node.args[0]) is None:  # such as 1 / x
        return "rdiv"
    return _OPERATORS.get(name, name) if name is not None else None


def _value(given: Any) -> Any:
    """What a node gives, as Dynamo knows it; None for what is no node."""
    return getattr(given, "meta", {}).get("example_value")


def _alive(place: ModulePlace) -> bool:
    return place.module is not None and place.module() is not None


def _identity(key: str) -> int:
    """The module's identity in a key of Dynamo's module stack; a second call's key ends in ``@1``."""
    number = key.partition("@")[0]
    return int(number) if number.isdigit() else 0


def _takes_apart(node: Node) -> bool:
    """Whether it takes an item out of a tuple, which in eager mode is no call."""
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(_value(node.args[0]), tuple | list)


def catalogue_of(names: Mapping[Node, str]) -> tuple[Operator, ...]:
    """The operators that compute something, in order, each with those that read its value."""
    owners: dict[Node, str | None] = {}
    consumers: dict[str, dict[str, None]] = {}
    for node, name in names.items():
        read = [owner for one in node.all_input_nodes if (owner := _owner(one, names, owners)) is not None]
        if _computes(node):
            consumers.setdefault(name, {})
            owners[node] = name
            for other in read:
                if other != name:
                    consumers[other][name] = None
        else:
            owners[node] = read[0] if read else None
    aliases = aliases_of(consumers)
    return tuple(Operator(name, tuple(readers), aliases[name]) for name, readers in consumers.items())


def _owner(node: Node, names: Mapping[Node, str], owners: dict[Node, str | None]) -> str | None:
    """The operator whose value a node is; None for what comes from outside the layer."""
    if node in names or node.op not in ("call_function", "call_method"):
        return owners.get(node)
    if node not in owners:
        owners[node] = next(
            (owner for one in node.all_input_nodes if (owner := _owner(one, names, owners)) is not None), None
        )
    return owners[node]


_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
_IN_PLACE = {"iadd", "imul", "isub", "itruediv", "setitem"}
_FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def _computes(node: Node) -> bool:
    """Whether a node makes a new value: not a view of its input, not a cast of it, and not what is yet to be filled."""
    name: str = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name in _FACTORIES:
        return False
    if (
        name == "setitem"
        or name in ("iadd", "imul", "isub", "itruediv")
        or (name.endswith("_") and not name.endswith("__"))
    ):
        return True  # in place
    made = tensors_of(_value(node))
    given = [tensor for one in node.all_input_nodes for tensor in tensors_of(_value(one))]
    known = {storage_key(tensor) for tensor in given}
    if not any(storage_key(tensor) not in known for tensor in made):
        return False
    return not (name in _CASTS and given and made and made[0].dtype != given[0].dtype)
