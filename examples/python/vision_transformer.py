"""A vision transformer from `torch.nn`, with bf16 autocast, inside `lowtide.adapt`.

lowtide finds the layers of the `nn.TransformerEncoder` by itself. What it measured and decided is saved in `--out`:
`lowtide report DIRECTORY` draws a page of it, and `policy.json` can be applied to the next run.

    python examples/python/vision_transformer.py --tiny --budget 8MiB --out output/vit
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
parser.add_argument("--budget", default="auto", help='device memory to use, such as "22GiB"; "auto": all there is')
parser.add_argument("--out", help="a directory for what lowtide saves")
args = parser.parse_args()
width, depth, heads, pixels, patch, rows = (64, 3, 4, 64, 8, 16) if args.tiny else (1024, 24, 16, 224, 14, 64)
steps, classes = (12, 4) if args.tiny else (100, 1000)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn(1, (pixels // patch) ** 2, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(x).mean(1))


def get_batch():
    """Noise that is brighter the higher its class: put your own images here."""
    labels = torch.randint(0, classes, (rows,))
    images = torch.randn(rows, 3, pixels, pixels) + 4 * labels.view(-1, 1, 1, 1) / classes
    return images.to(device), labels.to(device)


model = VisionTransformer().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with lowtide.adapt(model, optimizer, budget=args.budget, directory=args.out) as run:
    for step in range(1, steps + 1):
        images, labels = get_batch()
        with torch.autocast(device.type, torch.bfloat16):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
print(f"last event of lowtide: {run.record.events[-1].text}")
if args.out:
    print(f"saved: lowtide report {args.out}")
