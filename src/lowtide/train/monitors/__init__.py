"""What looks at each step: each is a :class:`~lowtide.train.record.Monitor`."""

from lowtide.train.monitors.curve import Curve
from lowtide.train.monitors.drop_rate import DropRate
from lowtide.train.monitors.json_lines import JsonLines
from lowtide.train.monitors.loss_line import LossLine
from lowtide.train.monitors.profile import Profile
from lowtide.train.monitors.progress_bar import ProgressBar
from lowtide.train.monitors.tensor_board import TensorBoard
from lowtide.train.monitors.wandb import WandB

__all__ = ["Curve", "DropRate", "JsonLines", "LossLine", "Profile", "ProgressBar", "TensorBoard", "WandB"]
