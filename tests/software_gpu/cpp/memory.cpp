// Memory of devices and pinned memory, which are both memory of the host, and copies between them.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "graphs.h"

enum Kind { OF_DEVICE, PINNED, REGISTERED };
struct Range {
  size_t bytes;
  Kind kind;
  int device;
};
// Never deleted: torch frees memory while the process ends.
static auto& mutex = *new std::mutex;
static auto& ranges = *new std::map<char*, Range>;
static auto& used = *new std::map<int, size_t>;  // bytes of each device

size_t bytes_of_a_device() {
  static size_t value = getenv("SOFTWARE_GPU_BYTES") ? atoll(getenv("SOFTWARE_GPU_BYTES")) : 8ull << 30;
  return value;
}

static int current_device() {
  int device;
  cudaGetDevice(&device);
  return device;
}

// Pages are taken from the host when they are first touched. A device gives no more bytes than it has.
static cudaError_t allocate(void** out, size_t bytes, Kind kind) {
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  int device = current_device();
  void* address = MAP_FAILED;
  if (kind != OF_DEVICE || used[device] + bytes <= bytes_of_a_device())
    address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    set_error(cudaErrorMemoryAllocation, "out of memory");
    return cudaErrorMemoryAllocation;
  }
  if (kind == OF_DEVICE) used[device] += bytes;
  ranges[(char*)address] = {bytes, kind, device};
  *out = address;
  return cudaSuccess;
}

// As CUDA does, freeing waits for all work.
static cudaError_t release(void* address) {
  if (!address) return cudaSuccess;
  finish_device(-1);
  std::lock_guard<std::mutex> lock(mutex);
  auto found = ranges.find((char*)address);
  if (found == ranges.end()) return cudaErrorInvalidValue;
  if (found->second.kind == OF_DEVICE) used[found->second.device] -= found->second.bytes;
  if (found->second.kind != REGISTERED) munmap(address, found->second.bytes);
  ranges.erase(found);
  return cudaSuccess;
}

// The range that an address lies in; false for ordinary memory of the host.
static bool find(const void* address, Range* range) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = ranges.upper_bound((char*)address);
  if (after == ranges.begin()) return false;
  auto& [begin, found] = *--after;
  if ((char*)address >= begin + found.bytes) return false;
  *range = found;
  return true;
}

// Ordinary memory of the host is read when the copy is launched, and written before the call returns.
static cudaError_t copy(void* to, const void* from, size_t bytes, bool blocking, void* handle) {
  Range to_range, from_range;
  bool to_known = find(to, &to_range), from_known = find(from, &from_range);
  bool to_device = to_known && to_range.kind == OF_DEVICE, from_device = from_known && from_range.kind == OF_DEVICE;
  if (from_device && !to_device) count(TO_HOST);
  if (to_device && !from_device) count(TO_DEVICE);
  auto* stream = stream_of(handle);
  if (from_known || schedule() == AT_ONCE) {
    enqueue(stream, "copy", [=] { return memmove(to, from, bytes), true; });
  } else {
    auto read = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    enqueue(stream, "copy", [=] { return memcpy(to, read->data(), bytes), true; });
  }
  if (blocking || !to_known) {
    if (auto error = forbidden_for_captured(stream, "a copy that the host waits for")) return error;
    finish(stream);
  }
  return failure();
}

extern "C" {
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(mutex);
  *total = bytes_of_a_device();
  *free = *total - used[current_device()];
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** out, size_t bytes) {
  if (auto error = forbidden_in_capture("cudaMalloc")) return error;
  count(ALLOCATIONS);
  return allocate(out, bytes, OF_DEVICE);
}
cudaError_t cudaFree(void* address) {
  if (auto error = forbidden_in_capture("cudaFree")) return error;
  return release(address);
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  if (auto error = forbidden_in_capture("cudaHostAlloc")) return error;
  return allocate(out, bytes, PINNED);
}
cudaError_t cudaMallocHost(void** out, size_t bytes) { return allocate(out, bytes, PINNED); }
cudaError_t cudaFreeHost(void* address) { return release(address); }
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  ranges[(char*)address] = {bytes, REGISTERED, current_device()};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) { return release(address); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  memset(attributes, 0, sizeof *attributes);
  Range range;
  if (!find(address, &range)) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = current_device();
    return cudaSuccess;
  }
  attributes->device = range.device;
  attributes->type = range.kind == OF_DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->devicePointer = (void*)address;
  if (range.kind != OF_DEVICE) attributes->hostPointer = (void*)address;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (auto error = forbidden_in_capture("cudaMemcpy")) return error;
  count(STREAM_WAITS);
  return copy(to, from, bytes, true, nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, false, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, false, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, false, stream);
  return failure();
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  enqueue(stream_of(stream), "memset", [=] { return memset(to, value, bytes), true; });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
}
