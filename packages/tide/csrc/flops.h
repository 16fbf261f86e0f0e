// FLOPs of the operators that have many; everything else is bound by its bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>

namespace tide {

using FlopCount = int64_t (*)(const torch::jit::Stack& arguments);
// Null when the operator's time is its bytes.
FlopCount flop_count_for(const std::string& name);

int64_t attention_flops(const at::Tensor& query, const at::Tensor& key, bool causal, bool backward);

} // namespace tide
