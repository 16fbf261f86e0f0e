"""Lightning's Trainer, with automatic or manual optimisation."""

import sys

import lightning
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.accelerator.current_accelerator() or torch.device("cpu")


class AnyAccelerator(CPUAccelerator):
    def setup_device(self, device):
        pass


class Module(lightning.LightningModule):
    def __init__(self, manual):
        super().__init__()
        self.automatic_optimization = not manual
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Embedding(128, 64), encoder, nn.Linear(64, 128))
        self.losses = []

    def training_step(self, batch, index):
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
module = Module(manual="--manual" in sys.argv)
loader = DataLoader(TensorDataset(torch.randint(0, 128, (160, 64))), batch_size=16)
trainer = lightning.Trainer(
    strategy=SingleDeviceStrategy(device=device, accelerator=AnyAccelerator()),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, loader)
torch.save({"losses": module.losses, "model": module.state_dict()}, sys.argv[1])
