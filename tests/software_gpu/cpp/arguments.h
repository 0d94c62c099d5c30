// What the kernels of a call are given: its arguments with tensors of devices replaced by tensors of the CPU over the
// same memory.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAFunctions.h>

#include <functional>
#include <string>
#include <vector>

using c10::IValue;

inline at::Tensor over_same_memory(const at::Tensor& tensor) {
  auto nothing = [](void*) {};
  auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  auto alias =
      at::from_blob(tensor.numel() ? tensor.data_ptr() : nullptr, tensor.sizes(), tensor.strides(), nothing, options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}
inline bool is_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

// An argument with each of its tensors, and its device, replaced.
using Replace = std::function<at::Tensor(const at::Tensor&, bool written)>;
inline IValue replaced(const IValue& value, const c10::Argument& argument, const Replace& replace, c10::Device device) {
  bool written = is_written(argument);
  if (value.isTensor()) return value.toTensor().defined() ? IValue(replace(value.toTensor(), written)) : value;
  if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (at::Tensor each : value.toTensorList()) list.push_back(each.defined() ? replace(each, written) : each);
    return c10::List<at::Tensor>(list);
  }
  if (value.isList() && argument.type()->str().find("Tensor?") != std::string::npos) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toListRef()) {
      bool missing = each.isNone() || !each.toTensor().defined();
      list.push_back(missing ? std::nullopt : std::optional(replace(each.toTensor(), written)));
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return device;
  if (argument.name() == "pin_memory") return IValue();
  return value;
}

// The tensors of results, each replaced.
inline IValue replaced_result(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (!value.isTensorList()) return value;
  std::vector<at::Tensor> list;
  for (at::Tensor each : value.toTensorList()) list.push_back(replace(each));
  return c10::List<at::Tensor>(list);
}

inline std::vector<at::Tensor> tensors_of(const c10::Stack& stack) {
  std::vector<at::Tensor> tensors;
  for (auto& value : stack)
    if (value.isTensor())
      tensors.push_back(value.toTensor());
    else if (value.isTensorList())
      for (at::Tensor each : value.toTensorList()) tensors.push_back(each);
  return tensors;
}

// What a call is about, seen before it is made.
struct Facts {
  std::vector<IValue> arguments;
  std::vector<at::Tensor> pinned;  // its tensors in pinned memory
  c10::Device device{c10::kCUDA, -1};
  std::vector<int> devices;  // of its tensors
  int generator = -1;        // the index of the argument
  bool draws = false;
  bool of_host = false, of_device = false;   // has tensors of the host, of a device
  bool writes = false, writes_host = false;  // writes into arguments, into tensors of the host
  bool writes_empty = false;                 // into a tensor without elements, which may be resized
  bool has_integers = false;                 // of a device: indices, lengths, whose values decide shapes

  Facts(const c10::OperatorHandle& op, const c10::Stack& stack) {
    const auto& schema = op.schema();
    arguments = torch::jit::last(stack, schema.arguments().size()).vec();
    draws = op.hasTag(at::Tag::nondeterministic_seeded);
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto& argument = schema.arguments()[i];
      writes |= is_written(argument);
      if (is_generator(argument)) generator = i;
      if (arguments[i].isDevice() && arguments[i].toDevice().is_cuda()) device = arguments[i].toDevice();
      replaced(
          arguments[i], argument, [&](const at::Tensor& tensor, bool written) { return note(tensor, written); },
          c10::kCPU);
    }
    if (!devices.empty()) device = c10::Device(c10::kCUDA, devices[0]);
    if (!device.has_index()) device = c10::Device(c10::kCUDA, c10::cuda::current_device());
  }

  at::Generator given_generator() const {
    return generator >= 0 && arguments[generator].isGenerator() ? arguments[generator].toGenerator() : at::Generator();
  }

 private:
  const at::Tensor& note(const at::Tensor& tensor, bool written) {
    if (tensor.is_cuda()) {
      of_device = true;
      int index = tensor.device().index();
      if (std::find(devices.begin(), devices.end(), index) == devices.end()) devices.push_back(index);
      has_integers |= c10::isIntegralType(tensor.scalar_type(), true);
      writes_empty |= written && tensor.numel() == 0;
    } else if (tensor.device().is_cpu()) {
      of_host = true;
      writes_host |= written;
      if (tensor.is_pinned()) pinned.push_back(tensor);
    }
    return tensor;
  }
};

// The kernel of the CPU, without autograd.
inline void call_on_cpu(const c10::OperatorHandle& op, c10::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset);
  op.callBoxed(stack);
}
