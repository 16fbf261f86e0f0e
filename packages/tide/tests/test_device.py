import copy
import io
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

import tide


def test_tide_is_the_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device("tide")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 1
    assert torch.get_device_module("tide") is torch.tide


def test_views_share_bytes_with_their_base():
    x = torch.arange(24.0, device="tide").view(4, 6)
    x[1:3, ::2].mul_(10)
    x.t()[5].fill_(-1)
    expected = torch.arange(24.0).view(4, 6)
    expected[1:3, ::2].mul_(10)
    expected.t()[5].fill_(-1)
    assert torch.equal(x.cpu(), expected)
    assert x.unfold(1, 2, 2)._base is not None
    assert x.view(torch.int32).data_ptr() == x.data_ptr()


def test_views_cost_neither_time_nor_memory():
    x = torch.zeros(64, 64, device="tide")
    torch.accelerator.synchronize()
    before = tide.now(), torch.accelerator.memory_allocated(), tide.idle_at()
    x.view(-1).unfold(0, 8, 8).transpose(0, 1)[2].expand(3, -1)
    assert (tide.now(), torch.accelerator.memory_allocated(), tide.idle_at()) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_copies_convert_dtype_and_layout(dtype):
    host = torch.arange(60.0).view(3, 4, 5)
    device = torch.zeros(5, 4, 3, device="tide", dtype=dtype).permute(2, 1, 0)
    device.copy_(host)
    assert torch.equal(device.cpu(), host.to(dtype))
    back = torch.zeros(4, 3, 5).transpose(0, 1)
    back.copy_(device.to(torch.float32))
    assert torch.equal(back, host)


def test_out_argument_is_resized_into_device_memory():
    out = torch.empty(0, device="tide")
    torch.add(torch.ones(300, device="tide"), 1, out=out)
    assert out.shape == (300,) and out.sum().item() == 600
    assert out.untyped_storage().nbytes() >= 1200


def test_storage_resize_frees_and_returns_memory():
    before = torch.accelerator.memory_allocated()
    x = torch.ones(1000, device="tide")
    held = torch.accelerator.memory_allocated() - before
    x.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated() == before
    x.untyped_storage().resize_(4000)
    assert torch.accelerator.memory_allocated() - before == held == 4096
    assert x.fill_(3).sum().item() == 3000


def test_set_and_resize_follow_the_storage():
    x = torch.arange(10.0, device="tide")
    y = torch.empty(0, device="tide").set_(x.untyped_storage(), 2, (2, 3), (3, 1))
    assert torch.equal(y.cpu(), torch.arange(2.0, 8).view(2, 3))
    assert torch.empty(0, device="tide").set_(x).data_ptr() == x.data_ptr()
    x.resize_(2000)
    assert x[:10].tolist() == list(range(10))


def test_save_load_and_deepcopy_keep_values_and_device():
    model = torch.nn.Linear(3, 4).to("tide")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["weight"].device.type == "tide"
    assert torch.equal(loaded["weight"], model.weight)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["weight"].device.type == "cpu"
    clone = copy.deepcopy(model)
    assert clone.weight.device.type == "tide" and clone.weight.data_ptr() != model.weight.data_ptr()
    assert torch.equal(clone.weight, model.weight)


def test_random_numbers_come_from_the_device_generator_alone():
    host = torch.get_rng_state()
    state = torch.tide.get_rng_state()
    x = torch.ones(64, device="tide")

    def draw() -> list[torch.Tensor]:
        return [
            torch.randn(8, device="tide"),
            F.dropout(x, 0.5),
            torch.bernoulli(x * 0.5),
            torch.randperm(9, device="tide"),
            torch.rrelu(x - 2, training=True),
            torch.multinomial(x, 4),
            torch.empty(4, device="tide").normal_(),
        ]

    first = draw()
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(torch.tide.get_rng_state(), state)
    torch.tide.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(first, draw(), strict=True))


def test_manual_seed_reaches_the_device_and_fork_rng_restores_it():
    torch.manual_seed(5)
    a = torch.rand(4, device="tide")
    with torch.random.fork_rng(devices=[0], device_type="tide"):
        torch.rand(4, device="tide")
    b = torch.rand(4, device="tide")
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4, device="tide"), a)
    assert torch.equal(torch.rand(4, device="tide"), b)
    generator = torch.Generator("tide").manual_seed(5)
    assert torch.equal(torch.rand(4, device="tide", generator=generator), a)


def test_a_host_generator_is_refused():
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device="tide", generator=torch.Generator())


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="same device"):
        torch.mm(torch.ones(2, 2, device="tide"), torch.ones(2, 2))
    assert (torch.ones(2, device="tide") * torch.tensor(3.0)).tolist() == [3, 3]


def test_autocast_chooses_dtypes_like_an_accelerator():
    x = torch.randn(4, 4, device="tide")
    with torch.autocast("tide", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).exp().dtype == torch.float32
        assert F.linear(x, x).dtype == torch.bfloat16
    with torch.autocast("tide", torch.float16):
        assert torch.mm(x, x).dtype == torch.float16
    assert (x @ x).dtype == torch.float32


def test_attention_saves_no_scores():
    q, k, v = (torch.randn(2, 4, 32, 8, device="tide", requires_grad=True) for _ in range(3))
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert type(out.grad_fn).__name__ == "ScaledDotProductFusedAttentionOverrideableBackward0"
    assert sorted(map(tuple, saved)) == [(2, 4, 32)] + [(2, 4, 32, 8)] * 4
    out.sum().backward()
    host = [t.detach().cpu().requires_grad_() for t in (q, k, v)]
    F.scaled_dot_product_attention(*host, is_causal=True).sum().backward()
    for a, b in zip((q, k, v), host, strict=True):
        assert torch.allclose(a.grad.cpu(), b.grad, atol=1e-6)


def test_attention_with_dropout_or_a_learnt_mask_takes_the_unfused_way():
    q = torch.randn(1, 2, 8, 4, device="tide", requires_grad=True)
    bias = torch.zeros(8, 8, device="tide", requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, bias).sum().backward()
    assert bias.grad is not None
    assert F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).shape == q.shape


def test_rms_norm_saves_input_weight_and_one_number_a_row():
    norm = torch.nn.RMSNorm(16).to("tide")
    x = torch.randn(3, 5, 16, device="tide", requires_grad=True)
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        out = norm(x)
    assert sorted(map(tuple, saved)) == [(3, 5, 1), (3, 5, 16), (16,)]
    out.pow(2).sum().backward()
    y = x.detach().cpu().requires_grad_()
    reference = torch.nn.RMSNorm(16)
    reference(y).pow(2).sum().backward()
    assert torch.allclose(x.grad.cpu(), y.grad, atol=1e-5)
    assert torch.allclose(norm.weight.grad.cpu(), reference.weight.grad, atol=1e-5)


def test_grouped_matmul_is_one_kernel_with_gradients():
    a = torch.randn(12, 8, device="tide", requires_grad=True)
    b = torch.randn(3, 8, 16, device="tide", requires_grad=True)
    offsets = torch.tensor([4, 4, 12], dtype=torch.int32, device="tide")
    with tide.record() as timeline:
        out = F.grouped_mm(a, b, offs=offsets)
    assert [span["name"] for span in timeline.spans] == ["aten::_grouped_mm"]
    assert timeline.spans[0]["flops"] == 2 * 12 * 8 * 16
    out.pow(2).sum().backward()
    assert a.grad.shape == a.shape and b.grad.shape == b.shape


def test_foreach_is_one_kernel():
    tensors = [torch.ones(5, device="tide") for _ in range(4)]
    with tide.record() as timeline:
        torch._foreach_add_(tensors, 2)
        doubled = torch._foreach_mul(tensors, 2.0)
    assert [span["name"] for span in timeline.spans] == [
        "aten::_foreach_add_",
        "aten::_foreach_mul",
    ]
    assert all(t.tolist() == [6] * 5 for t in doubled)


def _use_in_child(queue):
    try:
        torch.ones(2, device="tide")
        queue.put("worked")
    except RuntimeError as error:
        queue.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused():
    torch.ones(2, device="tide")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_use_in_child, args=(queue,))
    child.start()
    answer = queue.get(timeout=60)
    child.join(60)
    assert "forked subprocess" in answer
    assert child.exitcode == 0
    assert os.getpid() != child.pid


def test_fused_and_foreach_optimizers_agree():
    results = []
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(8, 8).to("tide"))
        optimizer = torch.optim.AdamW([weight], lr=0.1, **options)
        for _ in range(3):
            (weight**2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weight.detach().cpu())
    assert torch.allclose(results[0], results[1], atol=1e-6)
    assert torch.allclose(results[0], results[2], atol=1e-6)


def test_inference_mode_and_grad_scaler_work():
    model = torch.nn.Linear(4, 4).to("tide")
    with torch.inference_mode():
        assert model(torch.ones(2, 4, device="tide")).view(8).add_(1).shape == (8,)
    scaler = torch.amp.GradScaler("tide", init_scale=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with torch.autocast("tide", torch.float16):
        loss = model(torch.ones(2, 4, device="tide")).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(before - model.weight, torch.full((4, 4), 0.2, device="tide"), atol=1e-3)


def test_a_loader_pins_its_batches():
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    sums = []
    for (batch,) in loader:
        assert batch.is_pinned()
        sums.append(batch.to("tide", non_blocking=True).sum().item())
    assert sums == [6, 22]


def test_a_non_blocking_copy_to_the_host_lands_in_pinned_memory():
    x = torch.ones(4, device="tide")
    host = x.to("cpu", non_blocking=True)
    assert host.is_pinned()
    torch.accelerator.synchronize()
    assert host.tolist() == [1] * 4


def test_there_can_be_several_devices():
    # It ends by os._exit: autograd's device thread drops a finished graph after backward has
    # returned, takes the GIL for it, and torch aborts if the interpreter is going down just then.
    program = """
import os, torch, tide
assert torch.accelerator.device_count() == 2
a = torch.ones(4, device="tide:1", requires_grad=True)
b = a.detach().to("tide:0")
assert b.device.index == 0 and b.tolist() == [1] * 4
assert torch.accelerator.memory_allocated(0) == torch.accelerator.memory_allocated(1) == 512
with torch.accelerator.device_index(1), torch.Stream("tide:1"):
    assert torch.zeros(3, device="tide").device.index == 1
(a * 2).sum().backward()
assert a.grad.device.index == 1 and a.grad.tolist() == [2] * 4
tide.check_races()
os._exit(0)
"""
    environment = {**os.environ, "TIDE_DEVICES": "2"}
    subprocess.run([sys.executable, "-P", "-c", program], check=True, env=environment)
