"""FSDP2 on several ranks: the Policy is applied first, then `fully_shard` shards every layer.

The activation function is recomputed, queries, keys and values are swapped (offloaded) to host memory. In this order
loss and gradients are bitwise those without a Policy.

    torchrun --standalone --nproc-per-node 2 examples/python/fsdp2.py --tiny
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import lowtide
from lowtide import Policy, Recompute, Swap

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
args = parser.parse_args()
width, depth, heads, length, rows = (64, 4, 4, 32, 4) if args.tiny else (2048, 24, 16, 2048, 4)
vocabulary = 128
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(dist.get_default_backend_for_device(device))


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


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


torch.manual_seed(0)  # the same weights on every rank
model = Model().to(device)
handle = lowtide.apply(model, Policy.uniform({"act": Recompute(), "qkv": Swap(prefetch=4)}))
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(1, 9):
    tokens = ((torch.randint(0, vocabulary, (rows, 1)) + torch.arange(length + 1)) % vocabulary).to(device)
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach() / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.4f}", flush=True)
receipt = handle.receipt()  # of this rank
if dist.get_rank() == 0:
    print(receipt)
handle.remove()
dist.destroy_process_group()
