"""How many layers of a model can be trained on a device: ``python examples/capacity.py``.

The device has 64 MiB, and raises ``torch.OutOfMemoryError`` where a real one would.
"""

import gc

import torch
from torch import nn

import tide

tide.configure(preset="h100", capacity=64 << 20)


def fits(layers: int) -> bool:
    try:
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(layers))
        )
        model = model.to("tide")
        model(torch.randn(1024, 256, device="tide")).sum().backward()
    except torch.OutOfMemoryError:
        return False
    return True


most = 0
while fits(most + 1):
    most += 1
    gc.collect()
print(f"{most} layers fit into 64 MiB, {most + 1} do not")
