// Streams as queues of work, and when that work is done. SOFTWARE_GPU_LATE chooses the schedule: see `Schedule`.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

using Step = std::function<bool()>;  // a piece of work. true: done; false: not yet, call again
struct Stream;
struct Position {  // a place in a stream's queue; reached when the work up to it is done
  Stream* stream;
  unsigned long long number;
};

enum Schedule {
  AT_ONCE = 0,       // each piece of work is done by the host when it is launched
  LATE = 1,          // nothing is done before somebody waits for it
  DEFAULT_LATE = 2,  // the same for the default stream; others run as early as they may
  SOON = 3,          // everything runs as early as it may, in a thread beside the host
  DEFAULT_SOON = 4,  // the default stream as early as it may; nothing of others before somebody waits for it
  DRAWN = 10,        // LATE, but other streams get ahead by draws; the seed is what exceeds 10
};
int schedule();

Stream* stream_of(void* handle,
                  int device = -1);  // a cudaStream_t; the default stream is of `device`, or of the current one
unsigned long long enqueue(Stream*, std::string what, Step);  // a captured step is made again for each launch: a copy
Position position_of(Stream*);                                // behind all that it was given
void wait_for(Stream*, Position);
Stream* stream_like(Stream*);    // another one of its device and priority
void finish(Stream*);            // the host waits for all work of a stream
void finish_device(int device);  // for all streams of a device; -1: of all devices
// `ask` is called again and again by the thread that does the work; it names positions that other processes wait for.
void ask_often(std::function<void(std::vector<Position>&)> ask);

// Errors of work done late: the host learns of them where it waits, as on a GPU.
void work_failed(const std::string& message);
cudaError_t failure();  // cudaSuccess, or the error of an earlier piece of work
void set_error(cudaError_t,
               const std::string& message);  // what cudaGetLastError and cudaGetErrorString say in this thread

// What the host waited for and launched: read by `software_gpu.counters`.
enum Counted {
  LAUNCHES,
  DEVICE_WAITS,
  STREAM_WAITS,
  EVENT_WAITS,
  TO_HOST,
  TO_DEVICE,
  ALLOCATIONS,
  EVENT_QUERIES,
  COUNTED
};
void count(Counted);
