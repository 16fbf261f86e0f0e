"""Is a copy hidden behind a product? The virtual clock says: ``python examples/overlap.py``."""

import torch

import tide

tide.configure(preset="h100", capacity=1 << 30)
x = torch.randn(2048, 2048, device="tide")
host = torch.empty(2048, 2048, pin_memory=True)
copies = torch.Stream("tide")


def step(overlapped: bool) -> int:
    torch.accelerator.synchronize()
    begin = tide.now()
    copies.wait_stream(torch.accelerator.current_stream())
    with copies:
        host.copy_(x, non_blocking=True)
    if not overlapped:
        torch.accelerator.current_stream().wait_stream(copies)
    y = x
    for _ in range(8):
        y = y @ x
    torch.accelerator.current_stream().wait_stream(copies)
    torch.accelerator.synchronize()
    return tide.now() - begin


one, other = step(overlapped=False), step(overlapped=True)
print(f"one after the other {one / 1000:.1f} us, overlapped {other / 1000:.1f} us")
