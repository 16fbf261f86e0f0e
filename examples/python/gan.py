"""Two models that train against each other, with an optimizer each: one `lowtide.adapt` for each of them.

Each is measured and planned by itself. Give each its steps with `run.step`, one after the other: where the steps of the
two overlap, as inside two `with` around one loop, neither can be measured.

    python examples/python/gan.py --tiny --budget 10MiB
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="models that train on a CPU in seconds")
parser.add_argument("--budget", default="auto", help='device memory for each, such as "10GiB"; "auto": all there is')
args = parser.parse_args()
width, depth, rows, steps = (64, 3, 512, 10) if args.tiny else (2048, 16, 8192, 200)
noise_size, data_size = 16, 32
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, width), *(Block() for _ in range(depth)), nn.Linear(width, outputs))


generator = network(noise_size, data_size).to(device)
discriminator = network(data_size, 1).to(device)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.5, 0.99))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
real, fake = torch.ones(rows, 1, device=device), torch.zeros(rows, 1, device=device)
judge = functional.binary_cross_entropy_with_logits


def train_discriminator(data, noise):
    with torch.no_grad():
        made = generator(noise)
    loss = judge(discriminator(torch.cat([data, made])), torch.cat([real, fake]))  # one call, not two
    loss.backward()
    discriminator_optimizer.step()
    discriminator_optimizer.zero_grad()
    return loss.item()


def train_generator(noise):
    loss = judge(discriminator(generator(noise)), real)
    loss.backward()
    generator_optimizer.step()
    generator_optimizer.zero_grad()
    discriminator_optimizer.zero_grad()
    return loss.item()


discriminator_run = lowtide.adapt(discriminator, discriminator_optimizer, budget=args.budget)
generator_run = lowtide.adapt(generator, generator_optimizer, budget=args.budget)
for step in range(1, steps + 1):
    data = torch.randn(rows, data_size, device=device) + 1  # put your own data here
    noise = torch.randn(rows, noise_size, device=device)
    loss = discriminator_run.step(lambda data=data, noise=noise: train_discriminator(data, noise))
    deception = generator_run.step(lambda noise=noise: train_generator(noise))
    print(f"step {step} loss {loss:.4f} of the generator {deception:.4f}", flush=True)
for name, run in ("discriminator", discriminator_run), ("generator", generator_run):
    run.remove()
    print(f"last event of the {name}'s run: {run.record.events[-1].text}")
