// Devices: how many, what they are, errors, and launches of compiled kernels, which all fail.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <map>
#include <mutex>

#include "streams.h"

size_t bytes_of_a_device();

static thread_local int current = 0;
static thread_local cudaError_t last_error = cudaSuccess;
// Never deleted: torch calls in here while the process ends.
static auto& mutex = *new std::mutex;
static auto& messages = *new std::map<int, std::string>;         // of each kind of error, the latest
static auto& kernels = *new std::map<const void*, std::string>;  // names, by the address in the host's program
static std::atomic<bool> has_failed{false};
static std::atomic<long long> counts[COUNTED];

static int device_count() {
  static int value = getenv("SOFTWARE_GPU_COUNT") ? atoi(getenv("SOFTWARE_GPU_COUNT")) : 1;
  return value;
}

void count(Counted what) { counts[what]++; }

void set_error(cudaError_t error, const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex);
  last_error = error;
  messages[error] = message;
}

void work_failed(const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex);
  messages[cudaErrorLaunchFailure] = message;
  has_failed = true;
}

cudaError_t failure() { return has_failed ? cudaErrorLaunchFailure : cudaSuccess; }

// A kernel that has reached the runtime was not replaced by one of the CPU: torch shall raise, not go on with garbage.
static cudaError_t refuse(const void* kernel) {
  count(LAUNCHES);
  std::string name;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = kernels.find(kernel);
    name = found == kernels.end() ? "?" : found->second;
  }
  if (name.find("spin_kernel") != std::string::npos) return cudaSuccess;  // torch.cuda._sleep
  set_error(cudaErrorInvalidDeviceFunction, "a software GPU has no kernel of the CPU for " + name);
  return cudaErrorInvalidDeviceFunction;
}

static CUresult succeed() { return CUDA_SUCCESS; }
static CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }
static CUresult describe(CUresult, const char** text) {
  *text = "a software GPU has no virtual memory (expandable_segments) and no multicast";
  return CUDA_SUCCESS;
}

extern "C" {
long long software_gpu_count(int what) { return counts[what]; }

cudaError_t cudaGetDeviceCount(int* n) {
  *n = device_count();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) {
    set_error(cudaErrorInvalidDevice, "invalid device ordinal");
    return cudaErrorInvalidDevice;
  }
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  static thread_local std::string text;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = messages.find(error);
  text = found == messages.end() ? "error " + std::to_string((int)error) + " of a software GPU" : found->second;
  return text.c_str();
}
const char* cudaGetErrorName(cudaError_t) { return "errorOfSoftwareGPU"; }

// The figures are those of an H100, so that torch takes the paths of a newer GPU.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Software GPU");
  memset(p->uuid.bytes, device + 1, sizeof p->uuid.bytes);
  p->major = 9;
  p->totalGlobalMem = bytes_of_a_device();
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxBlocksPerMultiProcessor = 32;
  p->concurrentKernels = 1;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = p->canMapHostMemory = 1;
  p->textureAlignment = 512;
  p->pciBusID = device + 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// The driver's functions that torch asks for by name. There is no virtual memory management and no multicast.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  bool missing = !strncmp(symbol, "cuMem", 5) || strstr(symbol, "Multicast");
  *function = !strcmp(symbol, "cuGetErrorString") ? (void*)describe : missing ? (void*)not_supported : (void*)succeed;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return refuse(kernel); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return refuse(kernel); }
cudaError_t __cudaLaunchKernel(void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return refuse(kernel); }
cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = (void*)function;
  return cudaSuccess;
}
static thread_local struct {
  dim3 grid, block;
  size_t bytes;
  cudaStream_t stream;
} configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, cudaStream_t stream) {
  configuration = {grid, block, bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* bytes, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *bytes = configuration.bytes;
  *(cudaStream_t*)stream = configuration.stream;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  std::lock_guard<std::mutex> lock(mutex);
  kernels[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
}
