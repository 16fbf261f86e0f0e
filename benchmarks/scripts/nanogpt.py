"""A GPT in one file: gradient accumulation, clipping, a schedule by hand, evaluation in between, a checkpoint."""

import argparse
import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()
device = torch.accelerator.current_accelerator() or torch.device("cpu")
torch.manual_seed(1337)
width, context, vocabulary = 64, 64, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (one.view(b, t, 4, -1).transpose(1, 2) for one in self.qkv(self.ln_1(x)).split(width, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, width))
        return x + functional.dropout(self.out(functional.gelu(self.fc(self.ln_2(x)))), 0.1, self.training)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block() for _ in range(args.layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.view(-1, vocabulary), targets.reshape(-1))


def get_batch():
    tokens = torch.randint(0, vocabulary, (16, context + 1))
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = sum(model(*get_batch())[1].item() for _ in range(2)) / 2
    model.train()
    return found


model = GPT().to(device)
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-3)
raw = model
if args.compile:
    model = torch.compile(model)
losses = []
for iteration in range(10):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * iteration / 10))
    if iteration % 4 == 0:
        losses.append(estimate_loss())
    for _ in range(args.accumulate):
        with nullcontext():
            _, loss = model(*get_batch())
            loss = loss / args.accumulate
        loss.backward()
    losses.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
torch.save({"losses": losses, "model": raw.state_dict(), "optimizer": optimizer.state_dict()}, args.out)
