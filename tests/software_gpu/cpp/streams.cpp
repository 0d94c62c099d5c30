// Streams and events of the CUDA runtime. See streams.h for the schedules, graphs.cpp for what is captured.
#include "streams.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "graphs.h"

struct Item {
  std::string what;
  Step step;  // empty: wait for `until`
  Position until;
};

struct Stream {
  int device;
  int priority;
  bool is_default;
  std::deque<Item> queue;
  std::atomic<unsigned long long> launched{0}, done{0};
};

struct Event {
  unsigned flags;
  bool recorded = false;
  double milliseconds = 0;
  Position at{};
  Captured captured{};  // or where in a capture
  int queries = 0;
};

int schedule() {
  static int value = getenv("SOFTWARE_GPU_LATE") ? atoi(getenv("SOFTWARE_GPU_LATE")) : AT_ONCE;
  return value;
}

// How many pieces of work may be queued in a stream before the oldest half is done unasked.
static unsigned long long bound() {
  static unsigned long long value = getenv("SOFTWARE_GPU_BOUND") ? atol(getenv("SOFTWARE_GPU_BOUND")) : 20000;
  return value;
}

// Does the work of all streams of this process in one thread, in the order of the schedule.
class Worker {
 public:
  static Worker& instance() {
    static Worker* worker = new Worker;  // never deleted: streams are used until the process ends
    return *worker;
  }

  Stream* create(int device, int priority, bool is_default = false) {
    auto* stream = new Stream{device, priority, is_default};
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.push_back(stream);
    return stream;
  }

  Stream* default_of(int device) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = defaults_.find(device);
      if (found != defaults_.end()) return found->second;
    }
    auto* stream = create(device, 0, true);
    std::lock_guard<std::mutex> lock(mutex_);
    return defaults_[device] = stream;
  }

  std::vector<Stream*> streams() {
    std::lock_guard<std::mutex> lock(mutex_);
    return streams_;
  }

  unsigned long long put(Stream* stream, Item item) {
    std::lock_guard<std::mutex> lock(mutex_);
    start();
    stream->queue.push_back(std::move(item));
    auto number = ++stream->launched;
    bool too_many = number - stream->done > bound();
    if (too_many) wanted_.push_back({stream, number - bound() / 2});
    if (too_many || (schedule() >= DEFAULT_LATE && schedule() <= DEFAULT_SOON)) has_work_.notify_all();
    return number;
  }

  // Ask for the work up to a position, and wait for it if `blocking`.
  void reach(Position position, bool blocking) {
    if (schedule() == AT_ONCE || position.stream->done >= position.number) return;
    std::unique_lock<std::mutex> lock(mutex_);
    start();
    wanted_.push_back(position);
    has_work_.notify_all();
    auto reached = [&] { return position.stream->done >= position.number || stopped_; };
    if (blocking && !has_moved_.wait_for(lock, std::chrono::seconds(40), reached)) {
      print_queues();
      has_moved_.wait(lock, reached);
    }
  }

  void ask_often(std::function<void(std::vector<Position>&)> ask) {
    std::lock_guard<std::mutex> lock(mutex_);
    start();
    asked_.push_back(std::move(ask));
    has_work_.notify_all();
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  void start() {
    if (started_) return;
    started_ = true;
    if (schedule() >= DRAWN) draws_.seed(schedule() - DRAWN);
    thread_ = new std::thread([this] { loop(); });
    atexit([] { instance().stop(); });
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    has_work_.notify_all();
    thread_->join();
  }

  bool is_early(Stream* stream) {
    return schedule() == SOON || schedule() == (stream->is_default ? DEFAULT_SOON : DEFAULT_LATE);
  }

  // All work that may be done early, until none is left that does not wait for late work.
  bool run_early(Lock& lock) {
    bool moved = false;
    for (bool again = true; again && !stopped_;) {
      again = false;
      for (size_t i = 0; i < streams_.size(); i++)
        if (is_early(streams_[i])) again |= advance({streams_[i], streams_[i]->launched}, false, lock);
      moved |= again;
    }
    return moved;
  }

  // A few pieces of work of some streams, as drawn.
  bool run_drawn(Lock& lock) {
    bool moved = false;
    while (draws_() % 3 == 0) {
      auto* stream = streams_[draws_() % streams_.size()];
      moved |= advance({stream, std::min<unsigned long long>(stream->launched, stream->done + 1 + draws_() % 8)}, false,
                       lock);
    }
    return moved;
  }

  // Do the work of a stream up to a position. Where it waits for another stream: with `pull` that one's work is done
  // first, without it this ends. Tells whether anything was done.
  bool advance(Position to, bool pull, Lock& lock) {
    auto* stream = to.stream;
    bool moved = false;
    while (stream->done < to.number && !stopped_) {
      if (pull && schedule() < DRAWN && !is_early(stream)) moved |= run_early(lock);
      if (pull && schedule() >= DRAWN) moved |= run_drawn(lock);
      if (stream->done >= to.number) break;
      Item& item = stream->queue.front();
      if (!item.step) {
        if (item.until.stream->done < item.until.number) {
          if (!pull) return moved;
          moved |= advance(item.until, true, lock);
          if (item.until.stream->done < item.until.number) return moved;
          continue;
        }
      } else {
        lock.unlock();
        bool done = item.step();
        lock.lock();
        if (!done) return moved;
      }
      stream->queue.pop_front();
      stream->done++;
      moved = true;
    }
    return moved;
  }

  void loop() {
    Lock lock(mutex_);
    std::vector<Position> asked_for;
    while (!stopped_) {
      bool moved = run_early(lock);
      auto wanted = wanted_;
      for (auto& position : wanted) moved |= advance(position, true, lock);
      bool any = !wanted_.empty();
      for (size_t i = 0; i < wanted_.size();)
        if (wanted_[i].stream->done >= wanted_[i].number)
          wanted_.erase(wanted_.begin() + i);
        else
          i++;
      asked_for.clear();
      if (auto asked = asked_; !asked.empty()) {
        lock.unlock();  // they take locks that are held while work is put into queues
        for (auto& ask : asked) ask(asked_for);
        lock.lock();
      }
      for (auto& position : asked_for) moved |= advance(position, true, lock);
      if (any || moved) has_moved_.notify_all();
      if (moved) continue;
      if (asked_.empty() && wanted_.empty())
        has_work_.wait(lock);
      else
        has_work_.wait_for(lock, std::chrono::microseconds(wanted_.empty() ? 300 : 50));
    }
    has_moved_.notify_all();
  }

  // After a long wait: what every stream would do next.
  void print_queues() {
    for (auto* stream : streams_) {
      if (stream->queue.empty()) continue;
      fprintf(stderr, "[software gpu, rank %s] stream %p of device %d%s has %zu pieces of work:\n", getenv("RANK"),
              (void*)stream, stream->device, stream->is_default ? " (default)" : "", stream->queue.size());
      for (size_t i = 0; i < stream->queue.size() && i < 6; i++) {
        auto& item = stream->queue[i];
        if (item.step)
          fprintf(stderr, "    %s\n", item.what.c_str());
        else
          fprintf(stderr, "    wait for stream %p up to %llu; it has done %llu\n", (void*)item.until.stream,
                  item.until.number, (unsigned long long)item.until.stream->done);
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable has_work_, has_moved_;
  std::vector<Stream*> streams_;
  std::map<int, Stream*> defaults_;
  std::vector<Position> wanted_;
  std::vector<std::function<void(std::vector<Position>&)>> asked_;
  std::mt19937 draws_;
  std::thread* thread_ = nullptr;
  std::atomic<bool> started_{false}, stopped_{false};
};

static bool is_done(Position position) { return schedule() == AT_ONCE || position.stream->done >= position.number; }

Stream* stream_of(void* handle, int device) {
  if ((size_t)handle >= 16) return (Stream*)handle;  // 0, 1 and 2 are names of the default stream
  if (device < 0) cudaGetDevice(&device);
  return Worker::instance().default_of(device);
}

unsigned long long enqueue(Stream* stream, std::string what, Step step) {
  if (is_capturing(stream)) {
    capture(stream, what, [what, step](Stream* into) { enqueue(into, what, Step(step)); });
    return 0;
  }
  note_missed(what);
  if (schedule() != AT_ONCE) return Worker::instance().put(stream, {std::move(what), std::move(step), {}});
  while (!step()) usleep(50);
  return 0;
}

Position position_of(Stream* stream) { return {stream, stream->launched}; }

void wait_for(Stream* stream, Position until) {
  if (until.stream != stream && !is_done(until)) Worker::instance().put(stream, {"", nullptr, until});
}

Stream* stream_like(Stream* other) { return Worker::instance().create(other->device, other->priority); }

void finish(Stream* stream) { Worker::instance().reach({stream, stream->launched}, true); }

void finish_device(int device) {
  if (schedule() == AT_ONCE) return;
  for (auto* stream : Worker::instance().streams())
    if (device < 0 || stream->device == device) finish(stream);
}

void ask_often(std::function<void(std::vector<Position>&)> ask) { Worker::instance().ask_often(std::move(ask)); }

// Who only asks, again and again, gets the work done in the end: the host may be waiting in a loop.
static cudaError_t answer_query(Position position, int queries) {
  if (is_done(position)) return failure();
  if (queries % 50 == 0) Worker::instance().reach(position, false);
  return cudaErrorNotReady;
}

static double now_in_milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

static cudaStream_t new_stream(int priority) {
  int device;
  cudaGetDevice(&device);
  return (cudaStream_t)Worker::instance().create(device, priority);
}

extern "C" {
// For kernels.cpp, which is another library.
void software_gpu_enqueue(void* stream, int device, const char* what, std::function<void()> run) {
  enqueue(stream_of(stream, device), what, [run] {
    run();
    return true;
  });
}
void software_gpu_finish(void* stream, int device) { finish(stream_of(stream, device)); }
void software_gpu_finish_all() { finish_device(-1); }
int software_gpu_schedule() { return schedule(); }
void software_gpu_failed(const char* message) { work_failed(message); }

cudaError_t cudaDeviceSynchronize() {
  int device;
  cudaGetDevice(&device);
  if (auto error = forbidden_in_capture("cudaDeviceSynchronize")) return error;
  count(DEVICE_WAITS);
  finish_device(device);
  return failure();
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = new_stream(priority);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new_stream(0);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new_stream(0);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  static std::atomic<int> queries;
  auto* stream = stream_of(handle);
  if (auto error = forbidden_for_captured(stream, "cudaStreamQuery")) return error;
  return answer_query({stream, stream->launched}, ++queries);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (auto error = forbidden_for_captured(stream_of(stream), "cudaStreamSynchronize")) return error;
  if (auto error = forbidden_in_capture("cudaStreamSynchronize")) return error;
  count(STREAM_WAITS);
  finish(stream_of(stream));
  return failure();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  auto* at = (Event*)event;
  auto* stream = stream_of(handle);
  if (!at->recorded) return cudaSuccess;
  if (at->captured.capture || is_capturing(stream)) return capture_wait(stream, at->captured);
  wait_for(stream, at->at);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  enqueue(stream_of(stream), "callback", [=] {
    call(stream, cudaSuccess, data);
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  enqueue(stream_of(stream), "host function", [=] {
    call(data);
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = (cudaEvent_t) new Event{flags};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  auto* event = (Event*)handle;
  event->milliseconds = now_in_milliseconds();
  event->at = position_of(stream_of(stream));
  event->captured = place_in_capture(stream_of(stream));
  event->recorded = true;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  auto* event = (Event*)handle;
  if (event->captured.capture) return break_captures(cudaErrorCapturedEvent, "cudaEventQuery of a captured event");
  if (auto error = forbidden_in_capture("cudaEventQuery")) return error;
  count(EVENT_QUERIES);
  return event->recorded ? answer_query(event->at, ++event->queries) : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  auto* event = (Event*)handle;
  if (event->captured.capture)
    return break_captures(cudaErrorCapturedEvent, "cudaEventSynchronize of a captured event");
  if (auto error = forbidden_in_capture("cudaEventSynchronize")) return error;
  count(EVENT_WAITS);
  if (event->recorded) Worker::instance().reach(event->at, true);
  return failure();
}
// Times at which events were recorded by the host: of the order of what a CPU needs, and no measure of a GPU.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  auto *a = (Event*)first, *b = (Event*)second;
  if ((a->flags | b->flags) & cudaEventDisableTiming) return cudaErrorInvalidResourceHandle;
  *milliseconds = b->milliseconds - a->milliseconds;
  return cudaSuccess;
}
}
