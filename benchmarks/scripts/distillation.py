"""A student that learns from a teacher, which is not trained, with mixed precision."""

import sys

import torch
from torch import nn
from torch.nn import functional

device = torch.accelerator.current_accelerator() or torch.device("cpu")
torch.manual_seed(0)


def transformer(layers):
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(128, 64), encoder, nn.Linear(64, 128)).to(device)


teacher, student = transformer(4).eval(), transformer(8)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
losses = []
for _ in range(10):
    tokens = torch.randint(0, 128, (16, 64)).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        with torch.no_grad():
            wanted = functional.softmax(teacher(tokens).float(), -1)
        loss = functional.cross_entropy(student(tokens).float().flatten(0, 1), wanted.flatten(0, 1))
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    losses.append(loss.item())
torch.save({"losses": losses, "model": student.state_dict()}, sys.argv[1])
