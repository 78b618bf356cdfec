// What operators share: tensors as kernels see them, and copies.
#pragma once
#include "runtime.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace sim {
using at::Tensor;

inline bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kType; }

/// The same numbers in a CPU tensor that kernels can use. It does not keep the memory.
Tensor in_kernel(const Tensor& t);
/// A tensor of the same layout on a device, whose numbers are still unset.
Tensor empty_like_of(const Tensor& t, c10::Device device);
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking);
/// Gives a tensor another shape, and more memory if it needs more.
void resize_to(const Tensor& t, at::IntArrayRef size, at::IntArrayRef stride);

using ShapeFunction = void (*)(torch::jit::Stack& stack);
/// Shapes of operators whose meta kernel is in Python: that one would import a compiler first.
ShapeFunction shapes_of(const c10::OperatorName& name);

void run_any(const c10::OperatorHandle& given, torch::jit::Stack* stack);
} // namespace sim
