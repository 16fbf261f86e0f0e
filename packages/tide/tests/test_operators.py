"""Operators give the CPU's values and gradients, through whichever path they take."""

import pytest
import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def long(device: str, *values) -> Tensor:
    return torch.tensor(values, device=device)


def square(x: Tensor) -> Tensor:
    return x[:12] + 5 * torch.eye(12, device=x.device)


def image(x: Tensor) -> Tensor:
    return x.view(2, 3, 8, 8)


def attention(x: Tensor) -> Tensor:
    y, d = x.view(4, 8, 12), x.device
    weight, bias = torch.full((36, 12), 0.1, device=d), torch.zeros(36, device=d)
    out, zero = torch.full((12, 12), 0.1, device=d), torch.zeros(12, device=d)
    return F.multi_head_attention_forward(
        y, y, y, 12, 3, weight, bias, None, None, False, 0.0, out, zero
    )[0]


OPERATORS = {
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(image(x), 2),
    "amax": lambda x: x.amax(0),
    "attention": attention,
    "baddbmm": lambda x: torch.baddbmm(
        x.view(2, 16, 12), x.view(2, 16, 12), x[:24].view(2, 12, 12)
    ),
    "batch norm": lambda x: torch.nn.BatchNorm1d(12).to(x.device)(x),
    "bucketize": lambda x: x * torch.bucketize(x.detach(), torch.tensor([0.0, 1], device=x.device)),
    "cat of splits": lambda x: torch.cat([part * 2 for part in x.split(5)]),
    "cdist": lambda x: torch.cdist(x, x * 2),
    "clamp": lambda x: x.clamp(-1, 1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(32, 6, 2)) * (1 + 2j)),
    "conjugate": lambda x: torch.view_as_complex(x.view(32, 6, 2)).conj().mul(1j).real,
    "convolution": lambda x: F.conv2d(image(x), x[:27].reshape(4, 3, 3, 9), padding=1),
    "convolution 1d": lambda x: F.conv1d(x.view(2, 6, 32), x[:6].view(4, 6, 3)),
    "convolution transposed": lambda x: F.conv_transpose2d(image(x), x[:9].view(3, 4, 3, 3)),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(32, device=x.device) % 12),
    "cumulative": lambda x: x.cumsum(0) + x.cumprod(1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "embedding": lambda x: F.embedding(long(x.device, 1, 3, 1), x),
    "embedding bag": lambda x: F.embedding_bag(long(x.device, [1, 2], [3, 4]), x),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "flip, roll, tril": lambda x: x.roll(1, 0).flip(0).tril(),
    "gather": lambda x: x.gather(1, long(x.device, [0, 3], [5, 5])),
    "gelu, glu, erf": lambda x: F.gelu(F.glu(x)) + torch.erf(x[:, :6]),
    "grid sample": lambda x: F.grid_sample(
        image(x), torch.zeros(2, 4, 4, 2, device=x.device), align_corners=False
    ),
    "group norm": lambda x: F.group_norm(x.view(2, 6, 32), 3),
    "index": lambda x: x[long(x.device, 1, 2, 1)],
    "index from the host": lambda x: x[torch.tensor([1, 2, 1])],
    "index put": lambda x: x.index_put((long(x.device, 1, 1),), x[:2] * 3, accumulate=True),
    "interpolate": lambda x: F.interpolate(image(x), scale_factor=2, mode="bilinear"),
    "inverse": lambda x: torch.linalg.inv(square(x)),
    "layer norm": lambda x: F.layer_norm(x, (12,)),
    "lerp": lambda x: x.lerp(x * 2, 0.3),
    "log softmax, kl": lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
    "logsumexp": lambda x: x.logsumexp(-1),
    "masked": lambda x: x[x > 0].sum() + x.masked_fill(x > 0, 1.0),
    "max pool": lambda x: F.max_pool2d(image(x), 2),
    "norms": lambda x: x.norm() + torch.linalg.vector_norm(x, 1) + F.normalize(x),
    "one hot": lambda x: F.one_hot(long(x.device, 1, 2), 5).float() * x.mean(),
    "outer": lambda x: torch.addr(x, x[:, 0], x[0]),
    "pad": lambda x: F.pad(x, (1, 2), mode="constant", value=3),
    "polar": lambda x: torch.view_as_real(torch.polar(x.abs() + 1, x)),
    "prod": lambda x: (x * 0.1 + 1).prod(),
    "repeat interleave": lambda x: x.repeat_interleave(torch.full((32,), 2, device=x.device), 0),
    "scatter add": lambda x: torch.zeros_like(x).scatter_add(1, x.argsort(1), x),
    "silu, mish": lambda x: F.silu(x) + F.mish(x),
    "singular values": lambda x: torch.linalg.svdvals(x),
    "solve": lambda x: torch.linalg.solve(square(x), x[:12]),
    "sort": lambda x: x.sort(-1)[0] * torch.arange(12, device=x.device),
    "std, var": lambda x: x.std(0) + x.var(),
    "top k": lambda x: x.topk(3)[0],
    "unbind": lambda x: sum(x.unbind(0)),
    "unique": lambda x: torch.unique(long(x.device, 1, 2, 1)).float() * x.mean(),
    "vmap": lambda x: torch.vmap(lambda row: row * row.sum())(x),
    "where": lambda x: torch.where(x > 0, x, x * 2),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients_are_the_cpus(name):
    base = torch.randn(32, 12, generator=torch.Generator().manual_seed(1))
    answers = []
    for device in ("cpu", "tide"):
        x = base.clone().to(device).requires_grad_()
        y = OPERATORS[name](x)
        y.pow(2).sum().backward()
        assert y.device.type == x.grad.device.type == device
        answers.append((y.detach().cpu(), x.grad.cpu()))
    for expected, found in zip(*answers, strict=True):
        assert torch.allclose(expected, found, atol=1e-4, rtol=1e-4)


def test_an_in_place_operator_writes_the_tensor_itself():
    x = torch.arange(6.0, device="tide")
    y = x.view(2, 3)
    assert y.add_(1).data_ptr() == x.data_ptr()
    y[0].copy_(torch.tensor([7.0, 8, 9]))
    torch.mul(y, 2, out=y)
    assert x.tolist() == [14, 16, 18, 8, 10, 12]
    assert x._version > 0


def test_saved_tensors_can_live_in_pinned_memory():
    x = torch.randn(16, 16, device="tide", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="tide"):
        y = (x.exp() * x).sum()
    y.backward()
    expected = x.detach().cpu().requires_grad_()
    (expected.exp() * expected).sum().backward()
    assert torch.allclose(x.grad.cpu(), expected.grad)
