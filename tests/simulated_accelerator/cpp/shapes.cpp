// Shapes of the outputs of operators whose meta kernel is written in Python.
#include "operators.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>

#include <unordered_map>

namespace sim {
namespace {

using torch::jit::Stack;

c10::TensorOptions meta_options(const Tensor& like) { return like.options().device(c10::kMeta); }

at::MemoryFormat format_of(const Tensor& input, const Tensor& weight) {
  for (auto format : {at::MemoryFormat::ChannelsLast, at::MemoryFormat::ChannelsLast3d})
    if (input.suggest_memory_format() == format || weight.suggest_memory_format() == format)
      return format;
  return at::MemoryFormat::Contiguous;
}

void convolution(Stack& stack) {
  auto args = stack.end() - 9;
  Tensor input = args[0].toTensor(), weight = args[1].toTensor();
  auto stride = args[3].toIntVector(), padding = args[4].toIntVector(),
       dilation = args[5].toIntVector();
  bool is_transposed = args[6].toBool();
  auto output_padding = args[7].toIntVector();
  int64_t groups = args[8].toInt(), num_spatial = weight.dim() - 2;
  bool is_one = input.dim() == weight.dim() - 1; // without a batch
  TORCH_CHECK(is_one || input.dim() == weight.dim(), "the input has a wrong number of dimensions");
  TORCH_CHECK(input.size(is_one ? 0 : 1) ==
                  weight.size(is_transposed ? 0 : 1) * (is_transposed ? 1 : groups),
      "the input has a wrong number of channels");
  auto of = [](const std::vector<int64_t>& values, int64_t i) {
    return values[values.size() == 1 ? 0 : size_t(i)];
  };
  std::vector<int64_t> sizes;
  if (!is_one) sizes.push_back(input.size(0));
  sizes.push_back(is_transposed ? weight.size(1) * groups : weight.size(0));
  for (int64_t i = 0; i < num_spatial; i++) {
    int64_t size = input.size(i + (is_one ? 1 : 2)),
            kernel = of(dilation, i) * (weight.size(i + 2) - 1) + 1;
    int64_t out = is_transposed ? (size - 1) * of(stride, i) - 2 * of(padding, i) + kernel +
                                      of(output_padding, i)
                                : (size + 2 * of(padding, i) - kernel) / of(stride, i) + 1;
    TORCH_CHECK(out >= 0, "the kernel is larger than the input");
    sizes.push_back(out);
  }
  auto format = is_one ? at::MemoryFormat::Contiguous : format_of(input, weight);
  torch::jit::drop(stack, 9);
  stack.emplace_back(at::empty(sizes, meta_options(input).memory_format(format)));
}

/// Output, mean and inverse deviation. In inference, the last two are empty, as on CPUs.
void normalise(Stack& stack, size_t num_args, bool is_training) {
  Tensor input = (stack.end() - std::ptrdiff_t(num_args))->toTensor();
  auto options = meta_options(input);
  int64_t num_saved = is_training ? input.size(1) : 0;
  torch::jit::drop(stack, num_args);
  stack.emplace_back(
      at::empty(input.sizes(), options.memory_format(input.suggest_memory_format())));
  for (int i = 0; i < 2; i++) {
    auto type = c10::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
    stack.emplace_back(at::empty({num_saved}, options.dtype(type)));
  }
}
void native_batch_norm(Stack& stack) { normalise(stack, 8, (stack.end() - 3)->toBool()); }
void batch_norm_no_training(Stack& stack) { normalise(stack, 7, false); }
/// Mean, variance and the like over some dimensions, or over all.
template <size_t num_results>
void reduced(Stack& stack) {
  auto args = stack.end() - 4;
  Tensor input = args[0].toTensor();
  auto dims = args[1].isNone() ? std::vector<int64_t>{} : args[1].toIntVector();
  bool keeps = args[3].toBool();
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < input.dim(); i++) {
    bool is_reduced = dims.empty();
    for (int64_t dim : dims) is_reduced = is_reduced || (dim + input.dim()) % input.dim() == i;
    if (!is_reduced || keeps) sizes.push_back(is_reduced ? 1 : input.size(i));
  }
  torch::jit::drop(stack, 4);
  for (size_t i = 0; i < num_results; i++)
    stack.emplace_back(at::empty(sizes, meta_options(input)));
}

template <size_t num_args>
void same_as_first(Stack& stack) {
  Tensor input = (stack.end() - num_args)->toTensor();
  torch::jit::drop(stack, num_args);
  stack.emplace_back(at::empty_like(input));
}

void where(Stack& stack) {
  auto args = stack.end() - 3;
  Tensor condition = args[0].toTensor(), self = args[1].toTensor(), other = args[2].toTensor();
  auto broadcast = at::TensorIteratorConfig()
                       .check_all_same_dtype(false)
                       .check_all_same_device(false)
                       .declare_static_dtype_and_device(at::result_type(self, other), c10::kMeta)
                       .add_owned_output(Tensor())
                       .add_const_input(condition)
                       .add_const_input(self)
                       .add_const_input(other)
                       .build();
  torch::jit::drop(stack, 3);
  stack.emplace_back(broadcast.output());
}
} // namespace

ShapeFunction shapes_of(const c10::OperatorName& name) {
  static const std::unordered_map<c10::OperatorName, ShapeFunction> all{
      {{"aten::convolution", ""}, convolution},
      {{"aten::native_batch_norm", ""}, native_batch_norm},
      {{"aten::_native_batch_norm_legit_no_training", ""}, batch_norm_no_training},
      {{"aten::var_mean", "correction"}, reduced<2>},
      {{"aten::var", "correction"}, reduced<1>},
      {{"aten::std", "correction"}, reduced<1>},
      {{"aten::relu", ""}, same_as_first<1>},
      {{"aten::hardtanh", ""}, same_as_first<3>},
      {{"aten::hardswish", ""}, same_as_first<1>},
      {{"aten::_prelu_kernel", ""}, same_as_first<2>},
      {{"aten::roll", ""}, same_as_first<3>},
      {{"aten::where", "self"}, where},
  };
  auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}
} // namespace sim
