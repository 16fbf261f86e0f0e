"""The Trainer of transformers: accumulation, evaluation in between."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, use_cache=False
)
rows = torch.randint(3, 64, (120, 64))
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=10,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, eval_dataset=data[:4])
trainer.train()
losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
torch.save({"losses": losses, "model": trainer.model.state_dict()}, sys.argv[1])
