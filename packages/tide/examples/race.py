"""A copy that nobody waits for, and the report of it: ``python examples/race.py``."""

import torch

import tide

tide.configure(preset="h100", capacity=1 << 30)
x = torch.randn(1024, 1024, device="tide")
host = torch.empty(1024, 1024, pin_memory=True)
copies = torch.Stream("tide")
with copies:  # copies.wait_stream(torch.accelerator.current_stream()) is missing
    host.copy_(x, non_blocking=True)
copies.synchronize()

found = tide.races()
print(f"{len(found)} race" + ("s" if len(found) != 1 else ""))
print(found[0])
tide.clear_races()
