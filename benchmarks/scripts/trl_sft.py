"""TRL's SFTTrainer, without its gradient checkpointing."""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {str(one): one for one in range(3, 64)}
tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = WhitespaceSplit()
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=24, num_attention_heads=4, pad_token_id=0
)
rows = torch.randint(3, 64, (80, 32)).tolist()
arguments = SFTConfig(
    output_dir=tempfile.mkdtemp(),
    max_steps=8,
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    logging_steps=1,
    max_length=None,
    gradient_checkpointing=False,
    bf16=False,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = SFTTrainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=Dataset.from_dict({"input_ids": rows}),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ),
)
trainer.train()
losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
torch.save({"losses": losses, "model": trainer.model.state_dict()}, sys.argv[1])
