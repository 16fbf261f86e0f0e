"""A convolutional network with no two layers alike."""

import sys

import torch
from torch import nn

device = torch.accelerator.current_accelerator() or torch.device("cpu")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16 * 16, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for _ in range(6):
    images, labels = torch.randn(64, 3, 32, 32).to(device), torch.randint(0, 10, (64,)).to(device)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
torch.save({"losses": losses, "model": model.state_dict()}, sys.argv[1])
