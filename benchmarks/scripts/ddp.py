"""DistributedDataParallel, under torchrun."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

device = torch.accelerator.current_accelerator() or torch.device("cpu")
rank = int(os.environ["RANK"])
others = dist.get_default_backend_for_device(device)
dist.init_process_group("gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{others}")
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(128, 64), nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), nn.Linear(64, 128)
).to(device)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
torch.manual_seed(rank)
losses = []
for _ in range(12):
    tokens = torch.randint(0, 128, (16, 64)).to(device)
    loss = nn.functional.cross_entropy(parallel(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    torch.save({"losses": losses, "model": model.state_dict()}, sys.argv[1])
dist.destroy_process_group()
