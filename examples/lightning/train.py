"""Lightning's Trainer with one line more: `lowtide.attach(trainer)` before `fit`.

With automatic optimisation a micro-batch that runs out of memory is retried if nothing else helps. The model and its
optimizer are restored when `fit` ends.

    python examples/lightning/train.py --tiny --budget 8MiB
"""

import argparse

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
parser.add_argument("--budget", default="auto", help='device memory to use, such as "22GiB"; "auto": all there is')
args = parser.parse_args()
width, depth, heads, length, rows = (64, 4, 4, 32, 8) if args.tiny else (1024, 24, 16, 1024, 8)
steps, vocabulary = 12 if args.tiny else 100, 128


class LanguageModel(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, tokens, index):
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        logits = self.head(self.encoder(self.embedding(tokens[:, :-1]), mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def on_train_batch_end(self, outputs, batch, index):
        print(f"step {self.global_step} loss {outputs['loss'].item():.4f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
starts = torch.randint(0, vocabulary, (steps * rows, 1))
loader = DataLoader((starts + torch.arange(length + 1)) % vocabulary, batch_size=rows)  # put your own data here
trainer = lightning.Trainer(
    devices=1,
    max_epochs=1,
    precision="32-true" if args.tiny else "bf16-mixed",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
attachment = lowtide.attach(trainer, budget=args.budget)
trainer.fit(LanguageModel(), loader)
print(f"last event of lowtide: {attachment.run.record.events[-1].text}")
