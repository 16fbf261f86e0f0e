"""The adaptive mode: ``adapt``, an addition of lowtide with the names of the MindSpeed guide."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lowtide.config.schema.field import MAX_COUNT, Bytes, Section

__all__ = ["Adapt"]

Number = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
"""A whole number; the guide has a rule for those that make no sense."""
_GUIDE = ("device_size", "profiling_step", "device_swap")


class Adapt(Section):
    """The run measures itself, plans what becomes of its activations, and survives OOM."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"
    aliases: ClassVar[dict[str, str]] = {
        **{f"adaptive_recompute_{name}": name for name in _GUIDE},
        **{f"adaptive-recompute-{name.replace('_', '-')}": name for name in _GUIDE},
    }

    budget: Literal["auto"] | Bytes | None = None
    """Device memory that the plan may fill, such as "60GiB", or auto: the device's less a measured margin."""
    device_size: Number | None = None
    """The same in MB, as in the MindSpeed guide; alone it means no rescue; default: the device's memory."""
    profiling_step: Number = 10
    """Steps that are measured before the plan is made; default 10."""
    device_swap: bool | None = None
    """Whether tensors are offloaded to the host on OOM; default: true, false with `device_size`."""
    watch: Literal["suspicion", "always"] = "suspicion"
    """In which steps operators are watched for OOM: those that give a reason, or all; default suspicion."""
    verbosity: Literal["quiet", "normal"] = "normal"
    """Whether what is decided is printed; default normal."""
