"""Ray Train on two workers: `lowtide.apply` before `ray.train.torch.prepare_model` wraps the model in DDP.

Every worker applies the same Policy to its own copy of the model: here the dropout of the feed-forward part is
recomputed, and the attention is swapped (offloaded) to host memory. It was run with Ray 2.60 on CPUs.

    python examples/ray/train.py --tiny
"""

import argparse

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide import Policy, Recompute, Swap


class Model(nn.Module):
    def __init__(self, vocabulary, width, depth, heads):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask, is_causal=True))


def train(config):
    rank, device = ray.train.get_context().get_world_rank(), ray.train.torch.get_device()
    vocabulary, rows, length = 128, config["rows"], config["length"]
    torch.manual_seed(0)
    model = Model(vocabulary, config["width"], config["depth"], config["heads"])
    policy = Policy.uniform({"self_attn": Swap(prefetch=4), "dropout": Recompute()})
    handle = lowtide.apply(model, policy)
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for step in range(1, config["steps"] + 1):
        tokens = (torch.randint(0, vocabulary, (rows, 1)) + torch.arange(length + 1)) % vocabulary  # your data
        tokens = tokens.to(device)
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ray.train.report({"step": step, "loss": loss.item()})
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        print(handle.receipt())
    handle.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a model that trains on a CPU in seconds")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    tiny = {"width": 64, "depth": 4, "heads": 4, "length": 32, "rows": 8, "steps": 10}
    real = {"width": 1024, "depth": 24, "heads": 16, "length": 1024, "rows": 8, "steps": 100}
    scaling = ray.train.ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available())
    ray.train.torch.TorchTrainer(train, train_loop_config=tiny if args.tiny else real, scaling_config=scaling).fit()
