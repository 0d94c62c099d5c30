// A call whose kernel runs before it returns. The work queued in its stream has been done.
#pragma once
#include "arguments.h"
#include "generators.h"
#include "queued.h"

struct Replacement {
  at::Tensor of_device, of_cpu;
  bool resized;  // written, without elements at first: the CPU's kernel resizes it
};

// Torch may have queued the filling of memory that it has just allocated: it comes before what is written here.
inline void let_fills_end(c10::Device device) {
  finish((void*)c10::cuda::getCurrentCUDAStream(device.index()).stream(), device.index());
}

inline at::Tensor copied_to(c10::Device device, const at::Tensor& of_cpu) {
  if (!of_cpu.defined() || of_cpu.is_cuda()) return of_cpu;
  auto result = at::empty_strided(of_cpu.sizes(), of_cpu.strides(), of_cpu.options().device(device));
  if (of_cpu.numel() == 0) return result;
  let_fills_end(device);
  if (of_cpu.is_non_overlapping_and_dense())
    std::memcpy(result.data_ptr(), of_cpu.data_ptr(), of_cpu.numel() * of_cpu.element_size());
  else
    over_same_memory(result).copy_(of_cpu);
  return result;
}

inline void run_at_once(const c10::OperatorHandle& op, c10::Stack* stack, const Facts& facts) {
  const auto& arguments = op.schema().arguments();
  std::vector<Replacement> replacements;
  auto replace = [&](const at::Tensor& tensor, bool written) -> at::Tensor {
    if (!tensor.is_cuda()) return tensor;
    for (auto& each : replacements)
      if (each.of_device.is_same(tensor)) return each.of_cpu;
    bool resized = written && tensor.numel() == 0;
    auto of_cpu = resized ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : over_same_memory(tensor);
    replacements.push_back({tensor, of_cpu, resized});
    return of_cpu;
  };
  c10::Stack inner;
  for (size_t i = 0; i < arguments.size(); i++)
    inner.push_back(replaced(facts.arguments[i], arguments[i], replace, c10::kCPU));
  if (facts.generator >= 0) inner[facts.generator] = IValue();

  if (facts.draws) {
    Continued draws(facts.given_generator(), facts.device);
    if (facts.generator >= 0) {
      inner[facts.generator] = draws.cpu();
      call_on_cpu(op, &inner);
    } else {
      ForDefault meanwhile(draws);
      call_on_cpu(op, &inner);
    }
    draws.move_on();
  } else {
    call_on_cpu(op, &inner);
  }

  for (auto& each : replacements) {
    if (!each.resized || !each.of_cpu.numel()) continue;
    each.of_device.resize_(each.of_cpu.sizes());
    let_fills_end(each.of_device.device());
    std::memcpy(each.of_device.data_ptr(), each.of_cpu.contiguous().data_ptr(),
                each.of_cpu.numel() * each.of_cpu.element_size());
  }
  torch::jit::drop(*stack, arguments.size());
  for (auto& value : inner)
    torch::jit::push(*stack, replaced_result(value, [&](const at::Tensor& tensor) -> at::Tensor {
      if (!tensor.defined()) return tensor;
      for (auto& each : replacements)
        if (each.of_cpu.is_same(tensor)) return each.of_device;
      return copied_to(facts.device, tensor);
    }));
}
