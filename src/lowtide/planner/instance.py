"""One run of a part: a layer and a micro-batch, from its forward to the end of its backward."""

from __future__ import annotations

from lowtide.planner.codes import DONE
from lowtide.planner.program import Program
from lowtide.planner.rank import Storage
from lowtide.planner.sharded import Sharing
from lowtide.planner.swapping import Swapped

__all__ = ["Instance", "RunningCall"]


class RunningCall:
    """A captured call of one instance."""

    __slots__ = ("held", "pending", "references", "results", "swapped")

    def __init__(self) -> None:
        self.held: dict[int, Storage] = {}
        """The arguments that it holds."""
        self.swapped: dict[int, Swapped] = {}
        """Those that were offloaded: they are reloaded from there."""
        self.pending = 0
        """How many outstanding tensors its replay produces."""
        self.references = 1
        """How many hold the call: the layer while it runs, packs, and calls that were given its results."""
        self.results: dict[int, Storage] | None = None


class Instance:
    """One run of a part: a layer and a micro-batch."""

    __slots__ = (
        "calls", "departed", "due", "first", "frees", "handed", "held", "input", "input_swapped", "keeps",
        "kept", "last", "layer", "left", "micro_batch", "offset", "outstanding", "packs", "passes", "program",
        "read_again", "rebuilt", "replayed", "sharing", "slots", "starts", "used",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        layer: int | None,
        micro_batch: int,
        offset: int = 0,
        *,
        passes: bool = False,
        last: bool = False,
        keeps: int | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self.program, self.layer, self.micro_batch, self.offset = program, layer, micro_batch, offset
        self.last = last
        """Whether it is the last layer: after it, all that must be reloaded is reloaded when backward begins."""
        self.passes = passes
        """Whether it keeps everything or nothing, and something of another layer is due in it."""
        self.keeps = keeps
        """A value that other code holds from when it is made: a pipeline, its last stage's logits."""
        self.kept: Storage | None = None
        self.sharing = sharing
        """Where its parameters are gathered for all micro-batches, and its gradients added up whole."""
        self.first = 0
        self.slots: dict[int, Storage] = {}
        """What the program holds."""
        self.frees: list[Storage] = []
        """What others made and it frees."""
        self.handed: list[Storage | None] = []
        """What it hands to the next in addition to its output or its gradient."""
        self.left: list[Storage] = []
        """What its backward made and leaves until the whole backward has ended."""
        self.held: dict[int, Storage] = {}
        """What packs keep."""
        self.packs: dict[int, Swapped] = {}
        self.departed: dict[int, Swapped] = {}
        self.starts: dict[int, list[Swapped]] = {}
        """Packs that start reloads when they are unpacked."""
        self.due: list[Swapped] = []
        """What starts to be reloaded with the gradient of the part's output."""
        self.calls: dict[int, RunningCall] = {}
        self.used: dict[int, Storage] = {}
        """What was rebuilt for a node that is not done yet."""
        self.read_again: dict[tuple[int, int], Storage] = {}
        """What kernels of a backward's second half will read, by kernel and value; see [Note: two halves]."""
        self.input: Storage | None = None
        self.input_swapped: Swapped | None = None
        self.rebuilt = False
        self.outstanding = sum(code == DONE for code, _ in program.backward) if program.whole else 0
