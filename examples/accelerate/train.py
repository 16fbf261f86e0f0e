"""A loop around an Accelerator, with `lowtide.attach(accelerator)` before `prepare`.

The loop has accumulation, clipping and a learning-rate schedule, and stays yours. `accelerator.end_training()` restores
the model.

    python examples/accelerate/train.py --tiny --budget 8MiB
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
parser.add_argument("--budget", default="auto", help='device memory to use, such as "22GiB"; "auto": all there is')
args = parser.parse_args()
width, depth, heads, length, rows = (64, 4, 4, 64, 4) if args.tiny else (2048, 16, 16, 2048, 4)
steps, accumulate, vocabulary = 10 if args.tiny else 100, 2, 128
torch.manual_seed(0)

accelerator = Accelerator(
    gradient_accumulation_steps=accumulate,
    mixed_precision="no" if args.tiny else "bf16",
    step_scheduler_with_optimizer=False,
)
attachment = lowtide.attach(accelerator, budget=args.budget)
config = LlamaConfig(
    vocab_size=vocabulary,
    hidden_size=width,
    intermediate_size=3 * width,
    num_hidden_layers=depth,
    num_attention_heads=heads,
    use_cache=False,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
starts = torch.randint(0, vocabulary, (steps * accumulate * rows, 1))
loader = DataLoader((starts + torch.arange(length)) % vocabulary, batch_size=rows)  # put your own data here
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

step = 0
for tokens in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        schedule.step()
        step += 1
        accelerator.print(f"step {step} loss {loss.item():.4f}", flush=True)
accelerator.end_training()
accelerator.print(f"last event of lowtide: {attachment.run.record.events[-1].text}")
