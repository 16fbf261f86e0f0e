"""The kernels that every device is measured with: what a transformer's step is made of, over sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.cost.shape import SHORT

__all__ = ["standard_kernels"]

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
    "_log_softmax_backward_data": "{x},{x},-1,<torch.{dtype}>", "native_layer_norm": "{x},({w}),{d}[{w}],{d}[{w}],1e-05",
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
    "bmm": "{d}[4,{n},{k}],{d}[4,{k},{n}]", "baddbmm": "{d}[4,{n},{n}],{d}[4,{n},{k}],{d}[4,{k},{n}]",
    "_grouped_mm": "{d}[{n},{k}],{d}[4,{k},{n}],i32[4]",
}  # fmt: skip
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": "{q},{q},{q},0.0,True",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "{q},{q},{q},{q},{q},f32[1,4,{n}],0.0,True",
}


def standard_kernels(*, small: bool = False) -> Iterator[tuple[str, str, str]]:
    """Kind, dtype and shape text of each kernel; ``small`` where the host itself computes."""
    for dtype in ("float32", "bfloat16"):
        names = {"d": SHORT[dtype], "dtype": dtype, "other": {"float32": "bfloat16"}.get(dtype, "float32")}
        for rows, width in ((256, 512), (1024, 1024)) if small else ((512, 512), (2048, 1024)):
            sizes = {"x": f"{SHORT[dtype]}[{rows},{width}]", "n": rows, "w": width, "v": width + 8}
            for name, text in {**_POINTWISE, **_ROWWISE}.items():
                yield f"aten::{name}", dtype, text.format(**names, **sizes)
        # A thin middle makes a product bound by memory, a wide one by computation.
        for size, middle in ((512, 16), (256, 256), (512, 512)) if small else ((2048, 16), (512, 512), (1024, 1024)):
            for name, text in _PRODUCTS.items():
                yield f"aten::{name}", dtype, text.format(**names, n=size, k=middle)
        for rows in (128, 512):
            heads = f"{SHORT[dtype]}[1,4,{rows},64]"
            for name, text in _ATTENTION.items():
                yield f"aten::{name}", dtype, text.format(**names, q=heads, n=rows)
