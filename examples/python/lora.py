"""LoRA written by hand: adapters on frozen weights, in a loop inside `lowtide.adapt`.

Frozen weights have no gradients and no optimizer states, so activations are most of what is left. Adapters need nothing
special: pass the optimizer of what is trained.

    python examples/python/lora.py --tiny --budget 10MiB
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
parser.add_argument("--budget", default="auto", help='device memory to use, such as "22GiB"; "auto": all there is')
args = parser.parse_args()
width, depth, heads, length, rows = (64, 3, 4, 64, 16) if args.tiny else (2048, 24, 16, 2048, 4)
steps, vocabulary = 12 if args.tiny else 100, 128
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)


class LoRA(nn.Module):
    """A frozen linear layer plus a trained update of low rank."""

    def __init__(self, base, rank=8, alpha=16, dropout=0.05):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = alpha / rank
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x))) * self.scale


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (one.unflatten(2, (heads, -1)).transpose(1, 2) for one in self.qkv(self.norm_1(x)).chunk(3, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm_2(x))))


model = nn.Sequential(nn.Embedding(vocabulary, width), *(Layer() for _ in range(depth)), nn.Linear(width, vocabulary))
model.requires_grad_(False)  # load the weights of your base model here
for layer in model[1:-1]:
    layer.qkv, layer.out = LoRA(layer.qkv), LoRA(layer.out)
model.to(device)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
print(f"{sum(p.numel() for p in trained):,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")
optimizer = torch.optim.AdamW(trained, lr=1e-2)
with lowtide.adapt(model, optimizer, budget=args.budget) as run:
    for step in range(1, steps + 1):
        tokens = ((torch.randint(0, vocabulary, (rows, 1)) + torch.arange(length + 1)) % vocabulary).to(device)
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
print(f"last event of lowtide: {run.record.events[-1].text}")
