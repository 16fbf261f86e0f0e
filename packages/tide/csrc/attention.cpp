// Fused attention, through the hook torch keeps for backends like this one, on the CPU's flash kernel.
//
// What is saved for backward is what a real accelerator saves: query, key, value, the output and one
// float32 a row; never the scores.
#include "flops.h"
#include "kernel.h"

#include <ATen/core/Tensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace tide {
namespace {

bool can_fuse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool gqa) {
  const bool shaped = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 &&
      query.size(3) == key.size(3) && key.size(3) == value.size(3) && query.numel() > 0 &&
      key.numel() > 0 && query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1;
  const bool heads = key.dim() == 4 && query.dim() == 4 &&
      (query.size(1) == key.size(1) || (gqa && query.size(1) % key.size(1) == 0));
  const bool same = query.scalar_type() == key.scalar_type() &&
      key.scalar_type() == value.scalar_type() && query.is_floating_point();
  const bool plain_mask = !mask || !mask->defined() || !mask->requires_grad();
  return shaped && heads && same && plain_mask && dropout == 0.0;
}

int64_t choose(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool, std::optional<double>, bool gqa) {
  const bool fused = can_fuse(query, key, value, mask, dropout, gqa);
  return static_cast<int64_t>(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

// Grouped-query attention: each key head serves several query heads. The CPU kernel wants one each.
at::Tensor spread(const at::Tensor& heads, int64_t query_heads) {
  if (heads.size(1) == query_heads) {
    return heads;
  }
  return heads.repeat_interleave(query_heads / heads.size(1), 1);
}

at::Tensor gather(const at::Tensor& gradient, int64_t heads) {
  if (gradient.size(1) == heads) {
    return gradient;
  }
  return gradient
      .unflatten(1, {heads, gradient.size(1) / heads})
      .sum(2, /*keepdim=*/false, gradient.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

using Outputs = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor,
    at::Tensor>;

Outputs attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& bias, double dropout, bool causal, bool,
    std::optional<double> scale) {
  TORCH_CHECK(dropout == 0.0, "tide: the fused attention has no dropout");
  const auto batch = query.size(0);
  const auto heads = query.size(1);
  const auto rows = query.size(2);
  // Rows before heads in memory, as flash kernels write it: the projection that follows
  // needs no copy.
  const at::Tensor output =
      at::empty({batch, rows, heads, value.size(3)}, query.options()).transpose(1, 2);
  const at::Tensor logsumexp = at::empty({batch, heads, rows}, query.options().dtype(at::kFloat));
  Kernel kernel;
  kernel.name = "tide::attention";
  kernel.reads = {query, key, value, bias.value_or(at::Tensor())};
  kernel.writes = {output, logsumexp};
  kernel.flops = attention_flops(query, key, causal, false);
  launch(kernel, [causal, scale](const auto& reads, auto& writes) {
    const auto heads = reads[0].size(1);
    const auto [result, rowsum] = at::_scaled_dot_product_flash_attention_for_cpu(
        reads[0], spread(reads[1], heads), spread(reads[2], heads), 0.0, causal,
        if_defined(reads[3]), scale);
    writes[0].copy_(result);
    writes[1].copy_(rowsum);
  });
  return {output, logsumexp, at::Tensor(), at::Tensor(), rows, key.size(2), at::Tensor(),
          at::Tensor(), at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& bias, std::array<bool, 4>, const at::Tensor& output,
    const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt,
    double, bool causal, const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  const at::Tensor query_gradient = at::empty_like(query);
  const at::Tensor key_gradient = at::empty_like(key);
  const at::Tensor value_gradient = at::empty_like(value);
  Kernel kernel;
  kernel.name = "tide::attention_backward";
  kernel.reads = {gradient, query, key, value, bias, output, logsumexp};
  kernel.writes = {query_gradient, key_gradient, value_gradient};
  kernel.flops = attention_flops(query, key, causal, true);
  launch(kernel, [causal, scale](const auto& reads, auto& writes) {
    const auto heads = reads[1].size(1);
    const auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        reads[0], reads[1], spread(reads[2], heads), spread(reads[3], heads), reads[5],
        reads[6], 0.0, causal, if_defined(reads[4]), scale);
    writes[0].copy_(q);
    writes[1].copy_(gather(k, reads[2].size(1)));
    writes[2].copy_(gather(v, reads[3].size(1)));
  });
  return {query_gradient, key_gradient, value_gradient, at::Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", &choose);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

} // namespace tide

namespace at::native {
// The stub, not the operator, is what scaled_dot_product_attention asks.
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &tide::choose)
} // namespace at::native
