"""Plan for a budget first, then train under the plan.

`lowtide.plan` runs the model on one batch and finds the fastest Policy whose memory fits; `lowtide.apply` carries it
out. The plan counts parameters, gradients and activations: leave room for the optimizer's states.

    python examples/python/plan_then_train.py --tiny --budget 6MiB
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
parser.add_argument("--budget", default="20GiB", help="device memory without the optimizer's states")
args = parser.parse_args()
width, depth, heads, length, rows = (64, 3, 4, 64, 8) if args.tiny else (1024, 24, 16, 1024, 16)
vocabulary = 128
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)


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


def get_batch():  # rows that count upwards: put your own data here
    return ((torch.randint(0, vocabulary, (rows, 1)) + torch.arange(length + 1)) % vocabulary).to(device)


def loss_of(tokens):
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


model = nn.Sequential(nn.Embedding(vocabulary, width), *(Layer() for _ in range(depth)), nn.Linear(width, vocabulary))
model.to(device)
batch = get_batch()
try:
    plan = lowtide.plan(model, lambda: loss_of(batch), budget=args.budget, device=device)
except lowtide.InfeasibleError as error:
    raise SystemExit(str(error)) from None
for option in plan.options:  # what the plan was compared with, its memory and time predicted
    size, ratio = option.simulation.reserved / 2**20, option.simulation.seconds / plan.simulation.seconds
    print(f"{option.name:40}{size:8.0f} MiB {ratio:6.2f} x the time{'' if option.fits else ', does not fit'}")
print(f"planned: {plan.policy}")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with lowtide.apply(model, plan) as handle:
    for step in range(1, 9):
        loss = loss_of(get_batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    print(handle.receipt())
