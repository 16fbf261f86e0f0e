"""The Trainer of transformers with one line more: `lowtide.attach(trainer)`.

The first steps are measured, then the fastest Policy that fits the budget is applied. The model is a small Llama that
is built here, so nothing is downloaded.

    python examples/transformers/train.py --tiny --budget 8MiB
"""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
parser.add_argument("--budget", default="auto", help='device memory to use, such as "22GiB"; "auto": all there is')
args = parser.parse_args()
width, depth, heads, length, rows = (64, 4, 4, 64, 4) if args.tiny else (2048, 16, 16, 2048, 4)
vocabulary = 128
torch.manual_seed(0)

config = LlamaConfig(
    vocab_size=vocabulary,
    hidden_size=width,
    intermediate_size=3 * width,
    num_hidden_layers=depth,
    num_attention_heads=heads,
    use_cache=False,
)
tokens = (torch.randint(0, vocabulary, (256, 1)) + torch.arange(length)) % vocabulary  # put your own data here
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=10 if args.tiny else 100,
    per_device_train_batch_size=rows,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    bf16=not args.tiny,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
attachment = lowtide.attach(trainer, budget=args.budget)
trainer.train()

losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
for step, loss in losses[0], losses[-1]:
    print(f"step {step} loss {loss:.4f}")
print(f"last event of lowtide: {attachment.run.record.events[-1].text}")
