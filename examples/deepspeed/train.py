"""DeepSpeed's engine with ZeRO-2 and `lowtide.attach(engine)`.

`engine.step()` ends a step. With ZeRO-3 attach a Policy that recomputes whole layers instead:
`lowtide.attach(engine, policy=Policy.uniform(default=Recompute()))`.

    torchrun --standalone --nproc-per-node 1 examples/deepspeed/train.py --tiny --budget 8MiB
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
parser.add_argument("--budget", default="auto", help='device memory to use, such as "22GiB"; "auto": all there is')
args = parser.parse_args()
width, depth, heads, length, rows = (64, 4, 4, 64, 4) if args.tiny else (2048, 16, 16, 2048, 4)
steps, accumulate, vocabulary = 10 if args.tiny else 100, 2, 128
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
dist.init_process_group(dist.get_default_backend_for_device(device))
torch.manual_seed(0)

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
settings = {
    "train_micro_batch_size_per_gpu": rows,
    "gradient_accumulation_steps": accumulate,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": not args.tiny},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000 if args.tiny else 500_000_000},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
attachment = lowtide.attach(engine, budget=args.budget)
for step in range(1, steps + 1):
    for _ in range(accumulate):
        tokens = (torch.randint(0, vocabulary, (rows, 1)) + torch.arange(length)) % vocabulary  # put your own data here
        tokens = tokens.to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
attachment.remove()
if dist.get_rank() == 0:
    print(f"last event of lowtide: {attachment.run.record.events[-1].text}")
dist.destroy_process_group()
