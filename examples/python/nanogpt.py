"""A GPT in the manner of nanoGPT: accumulation, clipping, evaluation in between.

Each step is a function that is given to `run.step`, so that a step that runs out of memory can be retried from its
start. Batches are taken outside of it: a retry sees the same ones.

    python examples/python/nanogpt.py --tiny --budget 5MiB
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
parser.add_argument("--budget", default="auto", help='device memory to use, such as "22GiB"; "auto": all there is')
args = parser.parse_args()
width, depth, heads, context, rows = (64, 3, 4, 32, 8) if args.tiny else (768, 12, 12, 1024, 12)
steps, accumulate, vocabulary = (12, 2, 96) if args.tiny else (600, 40, 50304)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(1337)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (one.unflatten(2, (heads, -1)).transpose(1, 2) for one in self.c_attn(self.ln_1(x)).chunk(3, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(functional.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.Sequential(*(Block() for _ in range(depth)))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        tokens, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.h(self.wte(tokens) + self.wpe(torch.arange(context, device=tokens.device)))
        return functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def get_batch():  # rows that count upwards: put your own data here
    return ((torch.randint(0, vocabulary, (rows, 1)) + torch.arange(context + 1)) % vocabulary).to(device)


def train_step(batches):
    for tokens in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            loss = model(tokens) / len(batches)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() * len(batches)


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
run = lowtide.adapt(model, optimizer, budget=args.budget)
for step in range(1, steps + 1):
    batches = [get_batch() for _ in range(accumulate)]
    loss = run.step(lambda batches=batches: train_step(batches))
    print(f"step {step} loss {loss:.4f}", flush=True)
    if step % 4 == 0:
        with torch.no_grad():
            print(f"evaluation {model(get_batch()).item():.4f}")
run.remove()
print(f"last event of lowtide: {run.record.events[-1].text}")
