// Shapes of the outputs of operators whose meta kernel is written in Python.
#include "operators.h"

#include <ATen/ops/empty.h>

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
} // namespace

ShapeFunction shapes_of(const c10::OperatorName& name) {
  static const std::unordered_map<std::string, ShapeFunction> all{
      {"aten::convolution", convolution},
      {"aten::native_batch_norm", native_batch_norm},
      {"aten::_native_batch_norm_legit_no_training", batch_norm_no_training},
  };
  auto found = name.overload_name.empty() ? all.find(name.name) : all.end();
  return found == all.end() ? nullptr : found->second;
}
} // namespace sim
