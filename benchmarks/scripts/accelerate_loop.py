"""A loop around an Accelerator: accumulation, clipping, a learning-rate schedule."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
config = GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=8, n_head=4, use_cache=False)
model = GPT2LMHeadModel(config).to(accelerator.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(torch.randint(0, 64, (128, 64)), batch_size=8)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 16)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for tokens in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    losses.append(loss.item())
torch.save({"losses": losses, "model": accelerator.unwrap_model(model).state_dict()}, sys.argv[1])
