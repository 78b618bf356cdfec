// Autocast, with operators that a model's inference has from the lists of CUDA. They are boxed:
// torch's own macros for these lists take a minute to compile.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_to_copy.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace sim {
namespace {

constexpr const char* kInLowerPrecision[] = {"_convolution", "addbmm", "addmm", "addmv", "addr",
    "baddbmm", "bmm", "chain_matmul", "conv1d", "conv1d.padding", "conv2d", "conv2d.padding",
    "conv3d", "conv3d.padding", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "einsum", "gru_cell", "linalg_multi_dot", "linear",
    "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell",
    "scaled_dot_product_attention"};
constexpr const char* kInFloat[] = {"acos", "asin", "cdist", "cosh", "cosine_similarity", "cumprod",
    "cumsum", "erfinv", "exp", "expm1", "group_norm", "layer_norm", "log", "log10", "log1p", "log2",
    "log_softmax.int", "native_layer_norm", "norm.Scalar", "norm.ScalarOpt_dim", "pdist",
    "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "prod", "prod.dim_int", "reciprocal",
    "renorm", "rsqrt", "sinh", "softmax.int", "softplus", "sum", "sum.dim_IntList", "tan"};
constexpr const char* kInWidest[] = {"addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross",
    "dot", "index_put", "scatter_add", "stack", "tensordot", "vdot"};

bool is_castable(const at::Tensor& t) {
  return t.defined() && t.is_privateuseone() && t.is_floating_point() &&
         t.scalar_type() != at::kDouble;
}

template <class F>
void change_each(c10::IValue& value, F&& change) {
  if (value.isTensor()) {
    if (is_castable(value.toTensor())) value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& t : value.toTensorList().vec())
      changed.push_back(is_castable(t) ? change(t) : t);
    value = changed;
  }
}

void call_in(at::ScalarType type, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  for (auto it = stack->end() - std::ptrdiff_t(op.schema().arguments().size()); it != stack->end();
       ++it)
    change_each(*it, [&](const at::Tensor& t) {
      return t.scalar_type() == type ? t : at::_to_copy(t, t.options().dtype(type));
    });
  op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_in(at::autocast::get_autocast_dtype(c10::DeviceType::PrivateUse1), op, stack);
}
void in_float(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_in(at::kFloat, op, stack);
}
void in_widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto type = at::autocast::get_autocast_dtype(c10::DeviceType::PrivateUse1);
  for (auto it = stack->end() - std::ptrdiff_t(op.schema().arguments().size()); it != stack->end();
       ++it)
    change_each(*it, [&](const at::Tensor& t) {
      if (t.scalar_type() == at::kFloat) type = at::kFloat;
      return t;
    });
  call_in(type, op, stack);
}
} // namespace
} // namespace sim

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto* name : sim::kInLowerPrecision)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sim::in_lower_precision>());
  for (auto* name : sim::kInFloat)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sim::in_float>());
  for (auto* name : sim::kInWidest)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sim::in_widest>());
}
