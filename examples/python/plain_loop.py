"""An ordinary training loop inside `lowtide.adapt`.

The first steps are measured, then the fastest Policy that fits the budget is applied. Nothing inside the loop changes,
and its losses are bitwise those of the loop alone.

    python examples/python/plain_loop.py --tiny --budget 7MiB
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
width, depth, heads, length, rows = (64, 3, 4, 32, 8) if args.tiny else (1024, 24, 16, 1024, 8)
steps = 12 if args.tiny else 100
vocabulary = 128
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask, is_causal=True))


def get_batch():
    """Rows that count upwards from a random start: put your own data here."""
    tokens = (torch.randint(0, vocabulary, (rows, 1)) + torch.arange(length + 1)) % vocabulary
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with lowtide.adapt(model, optimizer, budget=args.budget) as run:
    for step in range(1, steps + 1):
        tokens, targets = get_batch()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
for event in run.record.events:
    print(f"after step {event.step}, {event.kind}: {event.text}")
