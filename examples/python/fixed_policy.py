"""A Policy written by hand: rules on operators, applied to a model, with a receipt of what it did.

The first half of the layers is recomputed as a whole. In the others two operators are recomputed, and the attention is
swapped (offloaded) to host memory. Losses are bitwise those without it.

    python examples/python/fixed_policy.py --tiny
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

from lowtide import LayerPolicy, Policy, Recompute, Rule, Swap, apply

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
args = parser.parse_args()
width, depth, heads, length, rows = (64, 4, 4, 64, 8) if args.tiny else (1024, 24, 16, 1024, 8)
vocabulary = 128
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (one.unflatten(2, (heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = nn.LayerNorm(width), Attention(), nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(self.act(self.up(self.norm_2(x))))


model = nn.Sequential(
    nn.Embedding(vocabulary, width), *(Layer() for _ in range(depth)), nn.Linear(width, vocabulary)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(step):
    tokens = (torch.randint(0, vocabulary, (rows, 1)) + torch.arange(length + 1)) % vocabulary
    tokens = tokens.to(device)
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}", flush=True)


whole = LayerPolicy(default=Recompute())
# A pattern names an operator by its path in the layer, or a module and so all operators in it.
parts = LayerPolicy(rules=(Rule("norm_2", Recompute()), Rule("act", Recompute()), Rule("attention", Swap(prefetch=4))))
policy = Policy((whole,) * (depth // 2) + (parts,) * (depth - depth // 2))
print(policy)
handle = apply(model, policy)
for step in range(1, 6):
    train(step)
handle.receipt()  # a receipt is of all that happened since the last one: the next is of one step
train(6)
print(handle.receipt())
handle.remove()  # the model is restored
train(7)
