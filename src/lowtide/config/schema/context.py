"""The device and its memory: ``context``."""

from typing import Annotated, Any, Literal

from lowtide.config.schema.field import EXACT, Bytes, Free, Index, ListOf, NoEffect, Section

__all__ = ["Context"]

GRAPH = "there is no graph compiler of MindSpore here"
ASCEND = "it belongs to the Ascend runtime of MindSpore"


class Context(Section):
    """The device and its memory."""

    mode: Annotated[Literal[0, 1], EXACT, NoEffect("PyTorch runs operators as they come", harmless=(1,))] | None = None
    """0 graph mode, 1 eager mode of MindSpore; default: unset."""
    device_target: Annotated[Literal["Ascend", "GPU", "CPU"], NoEffect("the device that is present is used")] | None = (
        None
    )
    """The device the file was written for; default: the one that is present."""
    device_id: Annotated[Index, NoEffect("torchrun assigns devices")] | None = None
    """The device of this process; default: assigned by torchrun."""
    max_device_memory: Bytes | None = None
    """The device memory a run may use, such as "58GB"; also the planner's budget; default: all of it."""
    mempool_block_size: Annotated[Bytes, NoEffect("torch's allocator chooses its blocks")] | None = None
    """The block size of MindSpore's memory pool; default: unset."""
    memory_optimize_level: Literal["O0", "O1"] | None = None
    """MindSpore's own memory planning; swap asks for "O0"; default: unset."""
    deterministic: bool | Literal["ON", "OFF"] = False
    """Whether only deterministic kernels are used; default false."""
    jit_config: Annotated[Free, NoEffect(GRAPH)] | None = None
    """The level of MindSpore's compiler (`jit_level`); default: unset."""
    jit_level: Annotated[str, NoEffect(GRAPH)] | None = None
    """The level of MindSpore's compiler; default: unset."""
    save_graphs: Annotated[bool | int, NoEffect(GRAPH, harmless=(False, 0))] = False
    """Whether MindSpore writes its graphs; default false."""
    save_graphs_path: Annotated[str, NoEffect(GRAPH)] | None = None
    """Where MindSpore writes its graphs; default: unset."""
    max_call_depth: Annotated[Index, NoEffect(GRAPH)] | None = None
    """The deepest call of MindSpore's compiler; default: unset."""
    affinity_cpu_list: Annotated[Free | ListOf[Any] | str | bool, NoEffect("threads are not bound")] | None = None
    """The CPUs of each process; default: unset."""
    ascend_config: Annotated[Free, NoEffect(ASCEND)] | None = None
    """Settings of the Ascend runtime; default: unset."""
