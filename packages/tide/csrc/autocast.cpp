// Mixed precision: torch's own lists of what runs in low precision and what in float32.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace tide {
namespace {

using namespace at; // the lists below name at::Tensor as Tensor
using namespace at::autocast;

Tensor refuse_binary_cross_entropy(
    const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(
      false,
      "binary_cross_entropy is unsafe to autocast: use binary_cross_entropy_with_logits, which "
      "is safe, or turn autocast off around it");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL)
#undef FULL
#define SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET)
#undef SET
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
#undef PROMOTE
  m.impl("binary_cross_entropy", &refuse_binary_cross_entropy);
}

} // namespace
} // namespace tide
