"""Two models that train against each other, with an optimizer each."""

import sys

import torch
from torch import nn

device = torch.accelerator.current_accelerator() or torch.device("cpu")
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def network(inputs, outputs, width=128, layers=6):
    return nn.Sequential(nn.Linear(inputs, width), *(Block(width) for _ in range(layers)), nn.Linear(width, outputs))


generator, discriminator = network(16, 64).to(device), network(64, 1).to(device)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
judge = nn.BCEWithLogitsLoss()
real, fake = torch.ones(1024, 1, device=device), torch.zeros(1024, 1, device=device)
losses = []
for _ in range(12):
    data, noise = torch.randn(1024, 64).to(device), torch.randn(1024, 16).to(device)

    of_discriminator.zero_grad()
    made = generator(noise)
    loss = judge(discriminator(data), real) + judge(discriminator(made.detach()), fake)
    loss.backward()
    of_discriminator.step()

    of_generator.zero_grad()
    deception = judge(discriminator(made), real)
    deception.backward()
    of_generator.step()
    losses += [loss.item(), deception.item()]
torch.save({"losses": losses, "model": generator.state_dict(), "other": discriminator.state_dict()}, sys.argv[1])
