// Making, viewing, copying and resizing tensors of the simulated device.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>

namespace sim {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator(), kKeys, c10::dtype_or_default(dtype));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const Tensor& resize_(
    const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  auto like = at::empty_strided({0}, {1}, self.options().device(c10::kMeta)).resize_(size, format);
  resize_to(self, like.sizes(), like.strides());
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  int device = self.device().index();
  synchronize_stream(device, current_stream(device));
  return at::native::_local_scalar_dense_cpu(in_kernel(self));
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

/// The same numbers of a CPU tensor, which is not kept.
Tensor unowned(const Tensor& t) {
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(),
      t.options().requires_grad(false).pinned_memory(false));
}

void copy_between_devices(const Tensor& self, const Tensor& to) {
  int source = self.device().index(), target = to.device().index();
  int64_t stream = current_stream(source), other = current_stream(target);
  auto copy = [a = in_kernel(self), b = in_kernel(to)] { b.copy_(a); };
  if (source == target) return submit(source, stream, copy);
  make_wait(source, stream, record(target, other)); // as CUDA: on the source's stream, between both
  submit(source, stream, copy);
  make_wait(target, other, record(source, stream));
}
} // namespace

Tensor in_kernel(const Tensor& t) {
  auto made = at::from_blob(t.numel() ? kernel_address(t.const_data_ptr()) : nullptr, t.sizes(),
      t.strides(), t.options().device(c10::kCPU).requires_grad(false).pinned_memory(false));
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

Tensor empty_like_of(const Tensor& t, c10::Device device) {
  return empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, device, {});
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (is_sim(self) && is_sim(to)) {
    copy_between_devices(self, to);
    return to;
  }
  const Tensor& near = is_sim(self) ? to : self;
  int device = (is_sim(self) ? self : to).device().index();
  int64_t stream = current_stream(device);
  const void* memory = near.const_data_ptr();
  bool is_async = non_blocking && is_pinned(memory);
  if (is_sim(self)) {
    submit(device, stream, [a = in_kernel(self), b = unowned(to)] { b.copy_(a); });
  } else if (non_blocking && !is_async) { // the driver takes the numbers away before it returns
    if (device_at(device).streams[stream].graph) {
      forbid_in_captures();
      fail(kCaptureUnsupported, "sim error: a capture can copy from pinned memory alone");
    }
    at::AutoDispatchBelowADInplaceOrView below;
    submit(device, stream, [a = self.clone(), b = in_kernel(to)] { b.copy_(a); });
    return to;
  } else {
    submit(device, stream, [a = unowned(self), b = in_kernel(to)] { b.copy_(a); });
  }
  if (is_async)
    keep_pinned(memory, device, stream);
  else
    synchronize_stream(device, stream);
  return to;
}

void resize_to(const Tensor& t, at::IntArrayRef size, at::IntArrayRef stride) {
  size_t bytes =
      at::detail::computeStorageNbytes(size, stride, t.dtype().itemsize(), t.storage_offset());
  const auto& storage = t.storage();
  if (storage.nbytes() < bytes) {
    c10::DeviceGuard guard(t.device());
    c10::DataPtr made = allocator().allocate(bytes);
    if (storage.nbytes()) allocator().copy_data(made.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(bytes);
  }
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
}
} // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("as_strided", sim::as_strided);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", sim::resize_);
  m.impl("_copy_from", sim::copy_from);
  m.impl("_local_scalar_dense", sim::local_scalar);
  m.impl("record_stream", sim::record_stream);
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Storage",
      static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
}
