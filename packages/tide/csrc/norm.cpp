// Fused RMSNorm and dropout: what they keep for backward is what a real accelerator keeps.
#include "generator.h"
#include "kernel.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>
#include <torch/library.h>

#include <limits>

namespace tide {
namespace {

std::vector<int64_t> last_dimensions(size_t count) {
  std::vector<int64_t> dimensions;
  for (size_t d = 1; d <= count; ++d) {
    dimensions.push_back(-static_cast<int64_t>(d));
  }
  return dimensions;
}

at::ScalarType compute_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::tuple<at::Tensor, at::Tensor> rms_norm(
    const at::Tensor& input, c10::IntArrayRef shape, const std::optional<at::Tensor>& weight,
    std::optional<double> epsilon) {
  auto statistics = input.sizes().vec();
  for (size_t d = 1; d <= shape.size(); ++d) {
    statistics[statistics.size() - d] = 1;
  }
  const at::Tensor output = at::empty(input.sizes(), input.options());
  const at::Tensor scale = at::empty(statistics, input.options().dtype(compute_type(input)));
  Kernel kernel;
  kernel.name = "aten::_fused_rms_norm";
  kernel.reads = {input, weight.value_or(at::Tensor())};
  kernel.writes = {output, scale};
  const double eps = epsilon.value_or(
      input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                         : std::numeric_limits<float>::epsilon());
  launch(kernel, [eps, dimensions = last_dimensions(shape.size())](const auto& reads, auto& writes) {
    const at::Tensor x = reads[0].to(compute_type(reads[0]));
    const at::Tensor r = at::rsqrt(x.pow(2).mean(dimensions, true).add_(eps));
    at::Tensor y = x.mul(r);
    if (reads[1].defined()) {
      y = y.mul(reads[1].to(y.scalar_type()));
    }
    writes[0].copy_(y);
    writes[1].copy_(r);
  });
  return {output, scale};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& gradient, const at::Tensor& input, c10::IntArrayRef shape,
    const at::Tensor& scale, const std::optional<at::Tensor>& weight, std::array<bool, 2> mask) {
  const bool has_weight = weight && weight->defined();
  const at::Tensor input_gradient = mask[0] ? at::empty(input.sizes(), input.options()) : at::Tensor();
  const at::Tensor weight_gradient =
      mask[1] && has_weight ? at::empty_like(*weight) : at::Tensor();
  Kernel kernel;
  kernel.name = "aten::_fused_rms_norm_backward";
  kernel.reads = {gradient, input, scale, weight.value_or(at::Tensor())};
  for (const at::Tensor& tensor : {input_gradient, weight_gradient}) {
    if (tensor.defined()) {
      kernel.writes.push_back(tensor);
    }
  }
  if (kernel.writes.empty()) {
    return {input_gradient, weight_gradient};
  }
  const bool want_input = mask[0];
  const bool want_weight = weight_gradient.defined();
  launch(kernel, [=, dimensions = last_dimensions(shape.size())](const auto& reads, auto& writes) {
    // The same steps, in the same order, as autograd takes through the CPU's unfused norm: the
    // two agree to the last bit in float32, so runs on both devices can be compared exactly.
    const auto type = compute_type(reads[1]);
    const at::Tensor g = reads[0].to(type);
    const at::Tensor x = reads[1].to(type);
    const at::Tensor& r = reads[2];
    const at::Tensor weighted = reads[3].defined() ? g.mul(reads[3].to(type)) : g;
    size_t next = 0;
    if (want_input) {
      int64_t count = 1;
      for (const int64_t d : dimensions) {
        count *= x.size(d);
      }
      const at::Tensor through_r = weighted.mul(x).sum(dimensions, /*keepdim=*/true);
      const at::Tensor through_mean = through_r.mul(-0.5).mul(r.pow(3)).div(count);
      writes[next++].copy_(weighted.mul(r).add(through_mean.mul(x.mul(2))));
    }
    if (want_weight) {
      at::Tensor sum = g.mul(x.mul(r));
      const auto outer = sum.dim() - static_cast<int64_t>(dimensions.size());
      if (outer > 0) {
        std::vector<int64_t> rows(outer);
        for (int64_t d = 0; d < outer; ++d) {
          rows[d] = d;
        }
        sum = sum.sum(rows);
      }
      writes[next++].copy_(sum);
    }
  });
  return {input_gradient, weight_gradient};
}

std::tuple<at::Tensor, at::Tensor> dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  const bool drops = train.value_or(true) && p > 0;
  const at::Tensor output = at::empty_like(input);
  const at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  Kernel kernel;
  kernel.name = "aten::native_dropout";
  kernel.reads = {input};
  kernel.writes = {output, mask};
  kernel.needs_host = true;
  const at::Generator generator = engine_of(default_generator(input.device().index()));
  launch(kernel, [=](const auto& reads, auto& writes) {
    if (!drops) {
      writes[0].copy_(reads[0]);
      writes[1].fill_(true);
      return;
    }
    at::Tensor keep = at::empty(reads[0].sizes(), reads[0].options().dtype(at::kFloat));
    keep.bernoulli_(1 - p, generator);
    writes[1].copy_(keep);
    const double scale = p == 1 ? 0.0 : 1 / (1 - p);
    writes[0].copy_(reads[0].mul(writes[1]).mul_(scale));
  });
  return {output, mask};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_rms_norm", &rms_norm);
  m.impl("_fused_rms_norm_backward", &rms_norm_backward);
  m.impl("native_dropout", &dropout);
}

} // namespace tide
