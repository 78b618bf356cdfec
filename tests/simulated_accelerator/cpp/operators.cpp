// How any other operator runs: the meta backend says at once which shapes its outputs have, and the
// CPU's kernel computes the numbers later, in the order of the stream.
#include "operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <unordered_map>

namespace sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

/// The value with another tensor in the place of each of its tensors.
template <class F>
IValue mapped(const IValue& value, F&& each) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(each(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : value.toTensorList().vec()) out.push_back(each(t));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      out.push_back(t && t->defined() ? std::optional<Tensor>(each(*t)) : std::nullopt);
    return out;
  }
  return value;
}

template <class F>
void for_each(const IValue& value, F&& visit) {
  mapped(value, [&](const Tensor& t) {
    visit(t);
    return t;
  });
}

bool is_sim_device(const IValue& value) {
  return value.isDevice() && value.toDevice().type() == kType;
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
}

/// The operator to call elsewhere: CPU and meta do not know the one for a backend's convolutions.
c10::OperatorHandle elsewhere(const c10::OperatorHandle& op) {
  static const auto convolution =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  static const c10::OperatorName overrideable{"aten::convolution_overrideable", ""};
  return op.operator_name() == overrideable ? convolution : op;
}

/// True if the shapes of its outputs depend on numbers, or it returns other things than tensors.
bool depends_on_numbers(const c10::OperatorHandle& op) {
  for (auto& result : op.schema().returns()) {
    auto kind = result.type()->kind();
    bool is_list = kind == c10::TypeKind::ListType &&
                   result.type()->expectRef<c10::ListType>().getElementType()->kind() ==
                       c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !is_list) return true;
  }
  for (auto tag : op.getTags())
    if (tag == at::Tag::data_dependent_output || tag == at::Tag::dynamic_output_shape) return true;
  return false;
}

/// True if an argument is a list of indices, which may be on the host, too.
bool may_be_anywhere(const std::string& name, size_t argument) {
  if (argument != 1) return false;
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
}

/// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& stack)
      : schema_(op.schema()),
        op_(elsewhere(op)),
        args_(stack.end() - std::ptrdiff_t(schema_.arguments().size()), stack.end()),
        device_(find_device()),
        guard_(device_),
        stream_(current_stream(device_.index())),
        duration_(duration_of(schema_.name())) {}

  Stack run() {
    TORCH_CHECK_NOT_IMPLEMENTED(op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
        "the simulated device lacks ", op_.operator_name(), ", which has no kernel for CPUs");
    if (depends_on_numbers(op_)) return run_and_wait();
    std::vector<std::pair<Tensor, Tensor>> resized; // what it writes to, and how that shall be
    Stack shapes;
    if (!keeps_shapes() && !find_shapes(shapes, resized)) return run_and_wait();
    for (auto& [t, like] : resized)
      if (t.sizes() != like.sizes()) resize_to(t, like.sizes(), like.strides());
    return run_later(shapes);
  }

 private:
  c10::Device find_device() const {
    c10::Device device(kType, -1);
    for (size_t i = 0; i < args_.size(); i++) {
      auto& arg = args_[i];
      bool is_strict = !may_be_anywhere(schema_.name(), i);
      if (is_sim_device(arg) && device.index() < 0) device = arg.toDevice();
      for_each(arg, [&](const Tensor& t) {
        bool is_other =
            is_sim(t) ? device.index() >= 0 && device != t.device() : is_strict && t.dim() > 0;
        TORCH_CHECK(!is_other,
            "Expected all tensors to be on the same device, but found at least two devices, ",
            device, " and ", t.device(), "! (when checking arguments of ", schema_.name(), ")");
        if (is_sim(t)) device = t.device();
      });
    }
    return device.index() < 0 ? c10::Device(kType, c10::DeviceIndex(current_device())) : device;
  }

  const c10::AliasInfo* written(size_t i) const {
    auto* info = schema_.arguments()[i].alias_info();
    return info && info->isWrite() ? info : nullptr;
  }

  /// The argument that a result is; nullptr if it is a new tensor.
  const IValue* same_as(const c10::Argument& result) const {
    if (!result.alias_info()) return nullptr;
    for (size_t i = 0; i < args_.size(); i++) {
      auto* info = schema_.arguments()[i].alias_info();
      if (!info || !(*info == *result.alias_info())) continue;
      TORCH_CHECK(info->isWrite(), "the simulated device lacks the view ", schema_.operator_name());
      return &args_[i];
    }
    return nullptr;
  }

  /// True if it only writes to tensors that have their shape already.
  bool keeps_shapes() const {
    const std::string& name = schema_.name();
    if (name.back() == '_' && name[name.size() - 2] != '_') return true; // in place
    bool is_so = !schema_.returns().empty(), has_any = false;
    for (auto& result : schema_.returns())
      is_so = is_so && result.alias_info() && result.alias_info()->isWrite();
    for (size_t i = 0; is_so && i < args_.size(); i++)
      if (written(i))
        for_each(args_[i], [&](const Tensor& t) {
          has_any = true;
          is_so = is_so && t.numel() > 0;
        });
    return is_so && has_any;
  }

  bool find_shapes(Stack& shapes, std::vector<std::pair<Tensor, Tensor>>& resized) const {
    std::unordered_map<c10::TensorImpl*, Tensor> seen;
    for (size_t i = 0; i < args_.size(); i++) {
      if (is_sim_device(args_[i])) {
        shapes.emplace_back(c10::Device(c10::kMeta));
        continue;
      }
      shapes.push_back(mapped(args_[i], [&](const Tensor& t) {
        if (!is_sim(t) && t.dim() == 0) return t;
        auto& like = seen[t.unsafeGetTensorImpl()];
        if (like.defined()) return like;
        like = at::empty_strided(t.sizes(), t.strides(),
            t.options().device(c10::kMeta).requires_grad(false).pinned_memory(false));
        if (written(i)) resized.emplace_back(t, like);
        return like;
      }));
    }
    try {
      auto own = shapes_of(op_.operator_name());
      own ? own(shapes) : call(op_, shapes);
      return true;
    } catch (const std::exception&) { // the kernel says what is wrong, if anything is
      return false;
    }
  }

  /// The arguments as a kernel sees them.
  Stack kernel_args() const {
    Stack made;
    std::unordered_map<c10::TensorImpl*, Tensor> seen;
    for (auto& arg : args_) {
      if (is_sim_device(arg)) {
        made.emplace_back(c10::Device(c10::kCPU));
        continue;
      }
      made.push_back(mapped(arg, [&](const Tensor& t) {
        auto& like = seen[t.unsafeGetTensorImpl()];
        if (like.defined()) return like;
        like = is_sim(t) ? in_kernel(t) : t.dim() ? t : t.clone();
        if (t.unsafeGetTensorImpl()->is_wrapped_number())
          like.unsafeGetTensorImpl()->set_wrapped_number(true);
        return like;
      }));
    }
    return made;
  }

  /// Run as a kernel that tells the host how large its outputs are.
  Stack run_and_wait() {
    auto stack = std::make_shared<Stack>(kernel_args());
    auto problem = std::make_shared<std::exception_ptr>();
    submit(device_.index(), stream_,
        [op = op_, stack, problem] {
          try {
            call(op, *stack);
          } catch (...) {
            *problem = std::current_exception();
          }
        },
        {duration_.us, true});
    synchronize_stream(device_.index(), stream_);
    if (*problem) std::rethrow_exception(*problem);
    Stack results;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      auto* same = same_as(schema_.returns()[i]);
      results.push_back(same ? *same : mapped((*stack)[i], [&](const Tensor& t) {
        auto made = empty_like_of(t, device_);
        copy_from(t, made, false);
        return made;
      }));
    }
    return results;
  }

  Stack run_later(const Stack& shapes) {
    Stack results;
    std::vector<std::pair<size_t, std::vector<Tensor>>> outputs;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      if (auto* same = same_as(schema_.returns()[i])) {
        results.push_back(*same);
        continue;
      }
      std::vector<Tensor> kernels;
      results.push_back(mapped(shapes[i], [&](const Tensor& t) {
        auto made = empty_like_of(t, device_);
        kernels.push_back(in_kernel(made));
        return made;
      }));
      outputs.emplace_back(i, std::move(kernels));
    }
    // The work owns no device tensor: that would hide from a test that memory is used after its
    // end.
    submit(
        device_.index(), stream_,
        [op = op_, inputs = kernel_args(), outputs = std::move(outputs)] {
          Stack stack = inputs; // a graph does it again
          call(op, stack);
          for (auto& [i, kernels] : outputs) {
            size_t next = 0;
            for_each(stack[i], [&](const Tensor& t) {
              auto& to = kernels[next++];
              // CPUs leave out statistics that inference has no use for.
              if (t.numel() || !to.numel() || i == 0) to.copy_(t);
            });
          }
        },
        duration_);
    return results;
  }

  const c10::FunctionSchema& schema_;
  c10::OperatorHandle op_;
  Stack args_;
  c10::Device device_;
  c10::DeviceGuard guard_;
  int64_t stream_;
  Duration duration_;
};
} // namespace

void run_any(const c10::OperatorHandle& given, Stack* stack) {
  Stack results = Call(given, *stack).run();
  torch::jit::drop(*stack, given.schema().arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}
} // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::run_any>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim::run_any>());
}
