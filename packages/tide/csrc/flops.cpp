#include "flops.h"

#include <ATen/core/stack.h>

#include <unordered_map>

namespace tide {
namespace {

using torch::jit::Stack;

// The matrix product of arguments `a` and `b`: every element of the left side meets one row
// of the right side's last dimension.
template <size_t a, size_t b>
int64_t matmul(const Stack& stack) {
  const at::Tensor left = stack.at(a).toTensor();
  const at::Tensor right = stack.at(b).toTensor();
  const int64_t columns = right.dim() >= 2 ? right.size(-1) : 1;
  return 2 * left.numel() * columns;
}

// (tokens, k) x (experts, k, n), and (m, tokens) x (tokens, n) for the weights' gradient.
int64_t grouped_matmul(const Stack& stack) {
  const at::Tensor left = stack.at(0).toTensor();
  const at::Tensor right = stack.at(1).toTensor();
  return 2 * left.numel() * right.size(-1) / (left.dim() == 3 && right.dim() == 2 ? left.size(0) : 1);
}

int64_t convolution(const Stack& stack) {
  const at::Tensor input = stack.at(0).toTensor();
  const at::Tensor weight = stack.at(1).toTensor();
  const bool transposed = stack.at(6).toBool();
  // Every output element (about an input element a stride apart) meets one filter.
  int64_t positions = input.numel() / input.size(1);
  if (!transposed) {
    for (const int64_t stride : stack.at(3).toIntVector()) {
      positions /= std::max<int64_t>(stride, 1);
    }
  }
  return 2 * positions * weight.numel();
}

int64_t convolution_backward(const Stack& stack) {
  const at::Tensor gradient = stack.at(0).toTensor();
  const at::Tensor weight = stack.at(2).toTensor();
  return 4 * (gradient.numel() / gradient.size(1)) * weight.numel();
}

} // namespace

FlopCount flop_count_for(const std::string& name) {
  static const std::unordered_map<std::string, FlopCount> table = {
      {"aten::mm", matmul<0, 1>},
      {"aten::bmm", matmul<0, 1>},
      {"aten::mv", matmul<0, 1>},
      {"aten::dot", matmul<0, 1>},
      {"aten::_scaled_mm", matmul<0, 1>},
      {"aten::_int_mm", matmul<0, 1>},
      {"aten::addmm", matmul<1, 2>},
      {"aten::_addmm_activation", matmul<1, 2>},
      {"aten::baddbmm", matmul<1, 2>},
      {"aten::addbmm", matmul<1, 2>},
      {"aten::addmv", matmul<1, 2>},
      {"aten::_grouped_mm", grouped_matmul},
      {"aten::_scaled_grouped_mm", grouped_matmul},
      {"aten::convolution", convolution},
      {"aten::convolution_backward", convolution_backward},
  };
  const auto it = table.find(name);
  return it == table.end() ? nullptr : it->second;
}

int64_t attention_flops(
    const at::Tensor& query, const at::Tensor& key, bool causal, bool backward) {
  // Two products forward, five backward (the scores are computed again).
  const int64_t products = backward ? 5 : 2;
  const int64_t all = 2 * products * query.numel() * key.size(-2);
  return causal ? all / 2 : all;
}

} // namespace tide
