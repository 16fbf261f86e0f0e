// CPU tensors over the bytes of device tensors: how CPU kernels come to work on device memory.
#pragma once

#include "race.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace tide {

inline bool is_tide(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_privateuseone();
}

// The aliases made for one operator. Tensors that share a storage get aliases that share one,
// so that a kernel sees overlaps and its views can be traced back. Aliases own nothing.
class AliasSet {
 public:
  at::Tensor of(const at::Tensor& tensor);
  // The device tensor behind an alias, or an undefined one.
  at::Tensor original(const at::Tensor& alias) const;
  // The device storage behind an alias' storage, or null.
  c10::StorageImpl* original_storage(const c10::StorageImpl* alias) const;

 private:
  struct StoragePair {
    c10::StorageImpl* original;
    c10::Storage alias;
  };
  struct TensorPair {
    at::Tensor original;
    at::Tensor alias;
  };
  std::vector<StoragePair> storages_;
  std::vector<TensorPair> tensors_;
};

// The byte ranges a tensor covers, appended to `accesses`. Rows of a strided view become ranges of
// their own while there are few; beyond that the whole span is taken.
void add_accesses(const at::Tensor& tensor, bool write, std::vector<Access>& accesses);

// How many different bytes a kernel moves to read or write the tensor once.
int64_t bytes_of(const at::Tensor& tensor);

} // namespace tide
