"""A transformer of torch.nn in a loop of its own."""

import sys

import torch
from torch import nn

device = torch.accelerator.current_accelerator() or torch.device("cpu")
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask, is_causal=True))


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(12):
    tokens = torch.randint(0, 256, (16, 65)).to(device)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    print(f"step {step}: {losses[-1]:.4f}", flush=True)
torch.save({"losses": losses, "model": model.state_dict()}, sys.argv[1])
