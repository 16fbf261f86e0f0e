// Tensors that need no kernel: making them, resizing them, looking at them another way.
#include "allocator.h"
#include "copy.h"
#include "engine.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace tide {

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  const size_t old_bytes = storage.nbytes();
  if (bytes == old_bytes) {
    return;
  }
  const auto device = storage.device().index();
  c10::DataPtr fresh = allocate_on(device, bytes);
  const size_t keep = std::min(bytes, old_bytes);
  if (keep > 0) {
    copy_bytes_on_device(device, fresh.get(), storage.data_ptr().get(), keep);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::OptionalDeviceGuard guard_for(std::optional<at::Device> device) {
  return c10::OptionalDeviceGuard(device);
}

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(
      !layout || *layout == at::kStrided, "tide: only strided tensors exist on this device");
  TORCH_CHECK(!pin || !*pin, "tide: only host tensors can be pinned");
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
  check_options(layout, pin);
  const auto guard = guard_for(device);
  return at::detail::empty_generic(
      size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  check_options(layout, pin);
  const auto guard = guard_for(device);
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

void ensure_storage(const at::Tensor& self, size_t bytes) {
  auto& storage = *self.storage().unsafeGetStorageImpl();
  if (bytes > storage.nbytes()) {
    resize_storage(storage, bytes);
  }
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    if (self.numel() > 0) {
      ensure_storage(
          self,
          at::detail::computeStorageNbytesContiguous(
              size, self.element_size(), self.storage_offset()));
    }
  }
  if (format && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  if (self.numel() > 0) {
    ensure_storage(
        self,
        at::detail::computeStorageNbytes(
            self.sizes(), self.strides(), self.element_size(), offset));
  }
  return self;
}

at::Tensor& set_from_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_from_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0, allocate_on(self.device().index(), 0),
      device_allocator(), true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_from_storage);
  m.impl("set_.source_Tensor", &set_from_tensor);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
}

} // namespace tide
