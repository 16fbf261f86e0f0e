"""Supervised fine-tuning with TRL's SFTTrainer and `lowtide.attach(trainer)`.

TRL has gradient checkpointing on unless it is turned off. It may stay: lowtide turns it off while it decides what to
recompute. Model and tokenizer are small ones that are built here, so nothing is downloaded.

    python examples/trl/sft.py --tiny --budget 40MiB
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
parser.add_argument("--budget", default="auto", help='device memory to use, such as "22GiB"; "auto": all there is')
args = parser.parse_args()
width, depth, heads, length, rows = (64, 4, 4, 64, 4) if args.tiny else (2048, 16, 16, 2048, 4)
torch.manual_seed(0)

# Put your own model, tokenizer and data here: sentences that count upwards.
words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {str(number): 3 + number for number in range(61)}
tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
starts = torch.randint(0, 61, (256,)).tolist()
texts = [" ".join(str((start + offset) % 61) for offset in range(length)) for start in starts]
config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=width,
    intermediate_size=3 * width,
    num_hidden_layers=depth,
    num_attention_heads=heads,
    pad_token_id=0,
)
arguments = SFTConfig(
    output_dir=tempfile.mkdtemp(),
    max_steps=10 if args.tiny else 100,
    per_device_train_batch_size=rows,
    learning_rate=1e-3,
    max_length=length,
    bf16=not args.tiny,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = SFTTrainer(
    LlamaForCausalLM(config), arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
)
attachment = lowtide.attach(trainer, budget=args.budget)
trainer.train()

losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
for step, loss in losses[0], losses[-1]:
    print(f"step {step} loss {loss:.4f}")
print(f"last event of lowtide: {attachment.run.record.events[-1].text}")
