"""A diffusion transformer on video: long sequences of space-time patches, with the attention swapped.

The activations of a clip grow with frames x height x width. Here the attention of every layer is offloaded to host
memory while later layers compute, and the cheap modulation and activation function are recomputed.

    python examples/python/video_dit.py --tiny
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide import Policy, Recompute, Swap

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
args = parser.parse_args()
width, depth, heads, rows = (64, 4, 4, 4) if args.tiny else (1152, 28, 16, 1)
frames, height, channels = (4, 16, 4) if args.tiny else (32, 64, 16)  # of the autoencoder's latents
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (one.unflatten(2, (heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, 2))
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention, self.modulation = Attention(), nn.Linear(width, 6 * width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)

    def forward(self, x, condition):
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition).unsqueeze(1).chunk(6, 2)
        x = x + gate_1 * self.attention(torch.addcmul(shift_1, self.norm_1(x), 1 + scale_1))
        return x + gate_2 * self.down(self.act(self.up(torch.addcmul(shift_2, self.norm_2(x), 1 + scale_2))))


class VideoDiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv3d(channels, width, (1, 2, 2), stride=(1, 2, 2))
        self.positions = nn.Parameter(torch.randn(1, frames * (height // 2) ** 2, width) * 0.02)
        self.blocks, self.time = nn.ModuleList(Block() for _ in range(depth)), nn.Linear(1, width)
        self.head = nn.ConvTranspose3d(width, channels, (1, 2, 2), stride=(1, 2, 2))

    def forward(self, clip, time):
        x = self.patches(clip).flatten(2).transpose(1, 2) + self.positions
        condition = functional.silu(self.time(time))
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x.transpose(1, 2).unflatten(2, (frames, height // 2, height // 2)))


model = VideoDiT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
clip = torch.rand(rows, channels, frames, height, height, device=device)  # put your own data here
rules = {"attention": Swap(prefetch=4), "addcmul.*": Recompute(), "act": Recompute()}
with lowtide.apply(model, Policy.uniform(rules)) as handle:
    for step in range(1, 9):  # rectified flow: from noise to data along a straight line
        noise, time = torch.randn_like(clip), torch.rand(rows, 1, device=device)
        mixed = torch.lerp(clip, noise, time.view(-1, 1, 1, 1, 1))
        loss = functional.mse_loss(model(mixed, time), noise - clip)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    print(handle.receipt())
