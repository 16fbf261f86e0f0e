#include "alias.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>

namespace tide {

namespace {
constexpr int64_t kMaxRows = 1024;
}

at::Tensor AliasSet::of(const at::Tensor& tensor) {
  auto* original = tensor.storage().unsafeGetStorageImpl();
  auto pair = std::find_if(storages_.begin(), storages_.end(), [&](const StoragePair& p) {
    return p.original == original;
  });
  if (pair == storages_.end()) {
    // Resizable, because kernels resize an `out` argument of the wrong size.
    c10::Storage alias(
        c10::Storage::use_byte_size_t(), static_cast<int64_t>(original->nbytes()),
        c10::DataPtr(original->mutable_data(), c10::Device(c10::DeviceType::CPU)),
        c10::GetCPUAllocator(), /*resizable=*/true);
    storages_.push_back({original, std::move(alias)});
    pair = std::prev(storages_.end());
  }
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(pair->alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  if (tensor.is_neg()) {
    alias._set_neg(true);
  }
  if (tensor.is_conj()) {
    alias._set_conj(true);
  }
  tensors_.push_back({tensor, alias});
  return alias;
}

at::Tensor AliasSet::original(const at::Tensor& alias) const {
  for (const auto& pair : tensors_) {
    if (pair.alias.is_same(alias)) {
      return pair.original;
    }
  }
  return {};
}

c10::StorageImpl* AliasSet::original_storage(const c10::StorageImpl* alias) const {
  for (const auto& pair : storages_) {
    if (pair.alias.unsafeGetStorageImpl() == alias) {
      return pair.original;
    }
  }
  return nullptr;
}

void add_accesses(const at::Tensor& tensor, bool write, std::vector<Access>& accesses) {
  if (tensor.numel() == 0) {
    return;
  }
  const auto item = static_cast<int64_t>(tensor.element_size());
  const auto base = reinterpret_cast<uintptr_t>(tensor.storage().data()) +
      static_cast<uintptr_t>(tensor.storage_offset() * item);

  struct Dimension {
    int64_t stride;
    int64_t size;
  };
  std::vector<Dimension> dimensions;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != 0) {
      dimensions.push_back({tensor.stride(d) * item, tensor.size(d)});
    }
  }
  std::sort(dimensions.begin(), dimensions.end(), [](const Dimension& a, const Dimension& b) {
    return a.stride < b.stride;
  });
  // Inner dimensions that touch or overlap melt into one run of bytes.
  int64_t run = item;
  size_t outer = 0;
  while (outer < dimensions.size() && dimensions[outer].stride <= run) {
    run += dimensions[outer].stride * (dimensions[outer].size - 1);
    ++outer;
  }
  int64_t rows = 1;
  for (size_t d = outer; d < dimensions.size() && rows <= kMaxRows; ++d) {
    rows *= dimensions[d].size;
  }
  if (rows > kMaxRows) {
    int64_t span = run;
    for (size_t d = outer; d < dimensions.size(); ++d) {
      span += dimensions[d].stride * (dimensions[d].size - 1);
    }
    accesses.push_back({base, base + static_cast<uintptr_t>(span), write});
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    int64_t offset = 0;
    int64_t rest = row;
    for (size_t d = outer; d < dimensions.size(); ++d) {
      offset += rest % dimensions[d].size * dimensions[d].stride;
      rest /= dimensions[d].size;
    }
    const auto begin = base + static_cast<uintptr_t>(offset);
    accesses.push_back({begin, begin + static_cast<uintptr_t>(run), write});
  }
}

int64_t bytes_of(const at::Tensor& tensor) {
  int64_t elements = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) != 0 || tensor.size(d) == 0) {
      elements *= tensor.size(d);
    }
  }
  return elements * static_cast<int64_t>(tensor.element_size());
}

} // namespace tide
