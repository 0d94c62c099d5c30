// A call whose kernel is queued in its stream. Memory for its results is the caching allocator's, taken when it is
// launched.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>

#include "arguments.h"
#include "generators.h"

// The part of the simulated runtime that queues work (streams.cpp): loaded before torch.
template <class Function>
Function* of_runtime(const char* name) {
  return (Function*)dlsym(RTLD_DEFAULT, name);
}
inline auto* enqueue = of_runtime<void(void*, int, const char*, std::function<void()>)>("software_gpu_enqueue");
inline auto* finish = of_runtime<void(void*, int)>("software_gpu_finish");
inline auto* finish_all = of_runtime<void()>("software_gpu_finish_all");
inline auto* is_capturing = of_runtime<bool(void*, int)>("software_gpu_is_capturing");
inline auto* work_failed = of_runtime<void(const char*)>("software_gpu_failed");

struct Job {
  c10::OperatorHandle op;
  c10::Stack stack;
  std::vector<at::Tensor> results;  // where they go; undefined: written into an argument
};

// Does it without changing it: a captured job runs again.
inline void run_job(const Job& job) {
  at::NoGradGuard no_grad;
  auto name = toString(job.op.operator_name());
  try {
    c10::Stack stack = job.stack;
    call_on_cpu(job.op, &stack);
    auto results = tensors_of(stack);
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset);
    for (size_t i = 0; i < job.results.size(); i++)
      if (job.results[i].defined() && job.results[i].numel()) job.results[i].copy_(results[i]);
  } catch (const std::exception& error) {
    work_failed(("kernel " + name + " failed: " + error.what()).c_str());
  }
}

// For each result the argument that it is, or -1 for a new tensor. False if results are of another kind.
inline bool find_results(const c10::FunctionSchema& schema, bool writes, std::vector<int>* found) {
  for (const auto& result : schema.returns()) {
    int index = -1;
    for (size_t i = 0; result.alias_info() && i < schema.arguments().size(); i++) {
      const auto* info = schema.arguments()[i].alias_info();
      if (info && *info == *result.alias_info()) index = i;
    }
    auto type = result.type()->str();
    bool is_new = !result.alias_info() && (type == "Tensor" || type == "Tensor[]") && !writes;
    if (index < 0 && !is_new) return false;
    found->push_back(index);
  }
  return true;
}

// Why a call cannot be queued; nullptr if it may be.
inline const char* why_not_queued(const c10::OperatorHandle& op, const Facts& facts) {
  const auto& name = op.schema().name();
  bool is_copy = name == "aten::copy_";
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape))
    return "its shape depends on data";
  if (name.find("batch_norm") != std::string::npos) return "its shapes depend on arguments in ways of its own";
  if (facts.devices.size() > 1) return "tensors of two devices";
  bool blocking = !is_copy || !facts.arguments[2].toBool();
  if (is_copy && facts.of_host && (blocking || (facts.writes_host && facts.pinned.empty())))
    return "a copy that the host waits for";
  if (facts.writes_host && !is_copy) return "it writes memory of the host";
  if (facts.draws && facts.generator < 0) return "it draws without a generator";
  return nullptr;
}

// Give arguments without elements that a call writes the shape that it would give them: kernels of CUDA take memory for
// them when they are launched. False if that cannot be foreseen.
inline bool resize_written(const c10::OperatorHandle& op, const Facts& facts) {
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  auto device = facts.has_integers ? c10::kMeta : c10::kCPU;
  auto replace = [&](const at::Tensor& tensor, bool is_written) -> at::Tensor {
    if (!tensor.is_cuda()) return tensor;
    if (is_written && tensor.numel() == 0) {
      written.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options().device(device)));
      return written.back().second;
    }
    return facts.has_integers ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta))
                              : over_same_memory(tensor).clone();
  };
  c10::Stack probe;
  for (size_t i = 0; i < facts.arguments.size(); i++)
    probe.push_back(replaced(facts.arguments[i], op.schema().arguments()[i], replace, device));
  try {
    call_on_cpu(op, &probe);
  } catch (const std::exception&) {
    return false;
  }
  for (auto& [of_device, like] : written)
    if (of_device.sizes() != like.sizes()) of_device.resize_(like.sizes());
  return true;
}

// Queue the call. False if its results cannot be foreseen.
inline bool queue_call(const c10::OperatorHandle& op, c10::Stack* stack, const Facts& facts) {
  const auto& schema = op.schema();
  std::vector<int> found;
  if (!find_results(schema, facts.writes, &found)) return false;
  if (facts.writes_empty && !facts.draws && !resize_written(op, facts)) return false;
  bool returns_new = std::find(found.begin(), found.end(), -1) != found.end();

  auto job = std::make_shared<Job>(Job{op, {}, {}});
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  auto replace = [&](const at::Tensor& tensor, bool) -> at::Tensor {
    if (!tensor.is_cuda())
      return !tensor.device().is_cpu() ? tensor : tensor.is_pinned() ? over_same_memory(tensor) : tensor.clone();
    for (auto& [of_device, of_cpu] : pairs)
      if (of_device.is_same(tensor)) return of_cpu;
    pairs.emplace_back(tensor, over_same_memory(tensor));
    return pairs.back().second;
  };
  for (size_t i = 0; i < facts.arguments.size(); i++)
    job->stack.push_back(replaced(facts.arguments[i], schema.arguments()[i], replace, c10::kCPU));
  if (facts.generator >= 0) job->stack[facts.generator] = IValue();

  c10::Stack results;
  if (returns_new) {
    // Shapes: the CPU's kernel on what lies there now, or where integers decide what is read, a kernel without data.
    c10::Stack probe = job->stack;
    if (facts.has_integers) {
      auto without_data = [](const at::Tensor& tensor, bool) -> at::Tensor {
        return tensor.is_cuda()
                   ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta))
                   : tensor;
      };
      for (size_t i = 0; i < probe.size(); i++)
        probe[i] = replaced(facts.arguments[i], schema.arguments()[i], without_data, c10::kMeta);
      if (facts.generator >= 0) probe[facts.generator] = IValue();
    } else if (facts.draws) {
      probe[facts.generator] = at::detail::createCPUGenerator(0);
    }
    try {
      call_on_cpu(op, &probe);
    } catch (const std::exception&) {
      return false;
    }
    auto make = [&](const at::Tensor& tensor) -> at::Tensor {
      job->results.emplace_back();
      if (!tensor.defined()) return tensor;
      for (auto& [of_device, of_cpu] : pairs)
        if (of_cpu.is_same(tensor)) return of_device;
      auto result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(facts.device));
      job->results.back() = over_same_memory(result);
      return result;
    };
    for (auto& value : probe) results.push_back(replaced_result(value, make));
  } else {
    for (int index : found) results.push_back(facts.arguments[index]);
  }

  auto stream = c10::cuda::getCurrentCUDAStream(facts.device.index());
  if (facts.draws) {  // the numbers are those of the order of launches: drawn by a copy, that the job may draw them
                      // later
    Continued draws(facts.given_generator(), facts.device);
    job->stack[facts.generator] = IValue(draws.cpu().clone());
    c10::Stack now = job->stack;
    for (size_t i = 0; i < now.size(); i++)
      if (now[i].isTensor() && now[i].toTensor().defined()) now[i] = at::empty_like(now[i].toTensor());
    now[facts.generator] = draws.cpu();
    call_on_cpu(op, &now);
    draws.move_on();
  }
  enqueue((void*)stream.stream(), facts.device.index(), schema.name().c_str(), [job] { run_job(*job); });
  // The host's allocator keeps pinned memory until the stream has used it.
  for (auto& pinned : facts.pinned)
    at::getHostAllocator(at::kCUDA)->record_event(pinned.data_ptr(), pinned.storage().data_ptr().get_context(),
                                                  stream.unwrap());
  torch::jit::drop(*stack, facts.arguments.size());
  for (auto& value : results) torch::jit::push(*stack, value);
  return true;
}
