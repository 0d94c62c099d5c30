// ATen's CUDA kernels, replaced by those of the CPU over the same memory.
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <set>

#include "at_once.h"
#include "queued.h"

static bool is_late() {
  static bool value = of_runtime<int()>("software_gpu_schedule")() != 0;
  return value;
}

// Where CUDA's kernel makes the host wait: it does so here too, by the call that torch counts and may refuse.
static bool host_waits(const c10::OperatorHandle& op, const Facts& facts) {
  if (op.schema().name() == "aten::copy_") return facts.of_host && facts.of_device && !facts.arguments[2].toBool();
  return op.hasTag(at::Tag::dynamic_output_shape);
}

// What CUDA's kernel of an operation refuses, and that of the CPU does not.
static void refuse_as_cuda_does(const c10::OperatorHandle& op, const Facts& facts) {
  if (op.schema().name() == "aten::_assert_async" && op.schema().overload_name() == "msg")
    TORCH_CHECK(facts.arguments[1].toStringRef().size() < 255, "Message length must be smaller than 255");
}

static void run(const c10::OperatorHandle& op, c10::Stack* stack) {
  Facts facts(op, *stack);
  refuse_as_cuda_does(op, facts);
  auto stream = c10::cuda::getCurrentCUDAStream(facts.device.index());
  bool captured = is_capturing((void*)stream.stream(), facts.device.index());
  if (is_late() || captured) {
    // A copy into a tensor without elements writes nothing.
    if (op.schema().name() == "aten::copy_" && facts.writes_empty) {
      torch::jit::drop(*stack, facts.arguments.size());
      torch::jit::push(*stack, facts.arguments[0]);
      return;
    }
    const char* why_not = captured && facts.draws ? "draws are not simulated" : why_not_queued(op, facts);
    if (!why_not && queue_call(op, stack, facts)) return;
    TORCH_CHECK(!captured, op.schema().name(),
                " cannot be captured: ", why_not ? why_not : "its results cannot be foreseen");
    if (facts.devices.size() > 1)
      finish_all();
    else
      finish((void*)stream.stream(), facts.device.index());
  }
  if (host_waits(op, facts)) c10::cuda::stream_synchronize(stream.stream());
  run_at_once(op, stack, facts);
}

// Kernels that only make tensors, or look at them: CUDA's own are right. `_local_scalar_dense` copies and waits.
static const std::set<std::string> KEPT = {"as_strided",
                                           "view",
                                           "_reshape_alias",
                                           "empty.memory_format",
                                           "empty_strided",
                                           "unfold",
                                           "_local_scalar_dense",
                                           "resize_",
                                           "set_",
                                           "set_.source_Storage",
                                           "set_.source_Storage_storage_offset",
                                           "set_.source_Tensor",
                                           "is_set_to",
                                           "record_stream",
                                           "_pin_memory",
                                           "is_pinned",
                                           "_efficientzerotensor",
                                           "lift",
                                           "lift_fresh",
                                           "view_as_real",
                                           "view_as_complex",
                                           "empty_quantized",
                                           "_resize_output_",
                                           "squeeze",
                                           "unsqueeze",
                                           "_nested_tensor_size"};
// Kernels that serve all devices, by code that launches CUDA's own.
static const char* const SHARED[] = {"copy_", "_foreach_copy_", "fill_.Scalar", "fill_.Tensor", "zero_"};

static bool has_twin(const c10::OperatorHandle& op) {
  for (auto key :
       {c10::DispatchKey::CPU, c10::DispatchKey::CompositeExplicitAutograd,
        c10::DispatchKey::CompositeExplicitAutogradNonFunctional, c10::DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return true;
  return false;
}

static bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

// Replace all that have a twin; tells how many. A kernel without one reaches the runtime, which refuses it
// (device.cpp).
static int64_t install() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int64_t count = 0;
  auto replace = [&](const c10::OperatorName& name) {
    auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.substr(std::string("aten::").size()).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    count++;
  };
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    auto op = dispatcher.findSchema(name);
    if (!KEPT.count(full) && op && has_twin(*op) && !is_view(op->schema())) replace(name);
  }
  for (std::string each : SHARED) {
    auto dot = each.find('.');
    c10::OperatorName name("aten::" + each.substr(0, dot), dot == std::string::npos ? "" : each.substr(dot + 1));
    auto op = dispatcher.findSchema(name);
    if (op && !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) replace(name);
  }
  return count;
}

TORCH_LIBRARY(software_gpu, library) { library.def("install() -> int", &install); }
