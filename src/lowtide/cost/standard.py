"""The kernels that every device is measured with: what a transformer's step is made of, over sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["StandardKernel", "standard_kernels"]

_POINTWISE = {
    "add": "{x},{x}", "add_": "{x},{x}", "sub": "{x},{x}", "mul": "{x},{x}", "mul_": "{x},{x}", "div": "{x},{x}",
    "neg": "{x}", "pow": "{x},2", "exp": "{x}", "log": "{x}", "sqrt": "{x}", "rsqrt": "{x}", "sigmoid": "{x}",
    "sigmoid_backward": "{x},{x}", "tanh": "{x}", "tanh_backward": "{x},{x}", "relu": "{x}",
    "threshold_backward": "{x},{x},0", "silu": "{x}", "silu_backward": "{x},{x}", "gelu": "{x}",
    "gelu_backward": "{x},{x}", "clone": "{x}", "copy_": "{x},{x}", "zero_": "{x}", "zeros_like": "{x}",
    "ones_like": "{x}", "fill_": "{x},1.0", "full_like": "{x},1.0", "where": "bool[{n},{w}],{x},{x}",
    "masked_fill": "{x},bool[{n},{w}],0.0", "addcmul_": "{x},{x},{x}", "addcdiv_": "{x},{x},{x}",
    "lerp_": "{x},{x},0.1", "_to_copy": "{x},dtype=<torch.{other}>", "cat": "({x},{x}),-1", "stack": "({x},{x})",
    "constant_pad_nd": "{x},(0,8),0.0", "slice_backward": "{x},({n},{v}),1,0,{w},1",
    "_foreach_add_": "({x},{x}),({x},{x})", "_foreach_mul_": "({x},{x}),0.9", "_foreach_sqrt": "({x},{x})",
}  # fmt: skip
_ROWWISE = {
    "sum": "{x},(-1),True", "mean": "{x},(-1),True", "_softmax": "{x},-1,False",
    "_softmax_backward_data": "{x},{x},-1,<torch.{dtype}>", "_log_softmax": "{x},-1,False",
    "_log_softmax_backward_data": "{x},{x},-1,<torch.{dtype}>",
    "native_layer_norm": "{x},({w}),{d}[{w}],{d}[{w}],1e-05",
    "_fused_rms_norm": "{x},({w}),{d}[{w}],1e-05",
    "_fused_rms_norm_backward": "{x},{x},({w}),f32[{n},1],{d}[{w}],(True,True)",
    "native_dropout": "{x},0.1,True", "topk": "{x},8", "cumsum": "{x},-1", "embedding": "{x},i64[{n}]",
    "embedding_dense_backward": "{x},i64[{n}],{n},-1,False", "index_select": "{x},0,i64[{n}]",
    "index": "{x},(i64[{n}])", "index_put_": "{x},(i64[{n}]),{x}", "index_add_": "{x},0,i64[{n}],{x}",
    "gather": "{x},-1,i64[{n},8]", "scatter": "{x},-1,i64[{n},8],1.0", "scatter_add": "{x},-1,i64[{n},8],{d}[{n},8]",
    "nll_loss_forward": "{x},i64[{n}],None,1,-100",
    "nll_loss_backward": "{d}[],{x},i64[{n}],None,1,-100,{d}[]",
}  # fmt: skip
_PRODUCTS = {
    "mm": "{d}[{n},{k}],{d}[{k},{n}]", "addmm": "{d}[{n}],{d}[{n},{k}],{d}[{k},{n}]",
    "bmm": "{d}[2,{n},{k}],{d}[2,{k},{n}]", "baddbmm": "{d}[2,{n},{n}],{d}[2,{n},{k}],{d}[2,{k},{n}]",
    "_grouped_mm": "{d}[{n},{k}],{d}[4,{k},{n}],i32[4]",
}  # fmt: skip
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": "{q},{q},{q},0.0,True",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "{q},{q},{q},{q},{q},f32[1,4,{n}],0.0,True",
}


class StandardKernel(NamedTuple):
    """A kernel of the set."""

    kind: str
    dtype: str
    shape: str
    growth: float
    """How many times the work of the kernel before it of the same kind and dtype this one has; 0 for the first."""


def standard_kernels() -> Iterator[StandardKernel]:
    """The set; kernels of one kind and dtype come one after the other, growing.

    >>> next(standard_kernels())
    StandardKernel(kind='aten::add', dtype='float32', shape='f32[512,512],f32[512,512]', growth=0.0)
    """
    for dtype, short in (("float32", "f32"), ("bfloat16", "bf16")):
        names = {"d": short, "dtype": dtype, "other": {"float32": "bfloat16"}.get(dtype, "float32")}
        for name, text in {**_POINTWISE, **_ROWWISE}.items():
            for growth, rows, width in ((0.0, 512, 512), (8.0, 2048, 1024), (16.0, 8192, 4096)):
                sizes = {"x": f"{short}[{rows},{width}]", "n": rows, "w": width, "v": width + 8}
                yield StandardKernel(f"aten::{name}", dtype, text.format(**names, **sizes), growth)
        for name, text in _PRODUCTS.items():
            # A thin middle makes a product bound by memory, a wide one by computation.
            sides = ((0.0, 2048, 16), (0.0, 512, 512), (8.0, 1024, 1024), (64.0, 4096, 4096))
            for growth, size, middle in sides:
                yield StandardKernel(f"aten::{name}", dtype, text.format(**names, n=size, k=middle), growth)
        for name, text in _ATTENTION.items():
            for growth, rows in ((0.0, 128), (16.0, 512), (16.0, 2048), (4.0, 4096)):
                heads = f"{short}[1,4,{rows},64]"
                yield StandardKernel(f"aten::{name}", dtype, text.format(**names, q=heads, n=rows), growth)
