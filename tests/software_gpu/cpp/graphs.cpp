// Capture of streams into graphs, by the rules of CUDA, and launches of graphs.
//
// A graph is launched as its streams were captured: each gets a stream of its own, the first that of the launch. Waits
// between them are what was captured, so that with late streams a wait that is missing in a graph gives wrong numbers.
#include "graphs.h"

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

struct Node {  // of a stream, in the order of the host
  Stream* stream;
  std::string what;
  std::function<void(Stream*)> launch;  // empty: the stream waits for `until`
  Captured until;
};

struct Graph {
  unsigned long long id;
  Stream* origin;
  std::vector<Node> nodes;
  std::map<Stream*, Stream*> streams;           // where the work of each captured stream goes
  std::vector<std::shared_ptr<void>> retained;  // what its work uses
};
using GraphHandle = std::shared_ptr<Graph>;

struct UserObject {
  std::shared_ptr<void> held;
};

struct Capture {
  GraphHandle graph;
  cudaStreamCaptureMode mode;
  size_t thread;                      // that began it
  std::map<Stream*, size_t> numbers;  // of each stream that is captured: how many nodes it has
  std::string broken_by;
  size_t missed = 0;  // work put into other streams meanwhile, which is done once, and not by launches of the graph
  std::string first_missed;
  cudaError_t error = cudaSuccess;
};

static auto& mutex = *new std::mutex;
static auto& captures = *new std::vector<std::shared_ptr<Capture>>;  // those that have not ended
static std::atomic<int> running{0};
static unsigned long long last_id = 0;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static thread_local char own_address;  // of each thread its own
static size_t this_thread() { return (size_t)&own_address; }

static std::shared_ptr<Capture> capture_of(Stream* stream) {
  if (running)
    for (auto& each : captures)
      if (each->numbers.count(stream)) return each;
  return nullptr;
}

bool is_capturing(Stream* stream) {
  if (!running) return false;
  std::lock_guard<std::mutex> lock(mutex);
  return capture_of(stream) != nullptr;
}

bool is_running(unsigned long long id) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& each : captures)
    if (each->graph->id == id) return true;
  return false;
}

static cudaError_t break_one(Capture& capture, cudaError_t error, const std::string& why) {
  if (capture.error == cudaSuccess) {
    capture.error = error;
    capture.broken_by = why;
  }
  set_error(error, why);
  return error;
}

cudaError_t break_captures(cudaError_t error, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& each : captures) break_one(*each, error, why);
  return error;
}

void capture(Stream* stream, std::string what, std::function<void(Stream*)> launch) {
  std::lock_guard<std::mutex> lock(mutex);
  auto into = capture_of(stream);
  into->numbers[stream]++;
  into->graph->nodes.push_back({stream, std::move(what), std::move(launch), {}});
}

void note_missed(const std::string& what) {
  if (!running) return;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& each : captures)
    if (!each->missed++) each->first_missed = what;
}

Captured place_in_capture(Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  auto of = capture_of(stream);
  return of ? Captured{of->graph->id, stream, of->numbers[stream]} : Captured{};
}

cudaError_t capture_wait(Stream* stream, const Captured& until) {
  std::lock_guard<std::mutex> lock(mutex);
  auto of = capture_of(stream);
  if (!until.capture)
    return break_one(*of, cudaErrorStreamCaptureIsolation,
                     "a stream that is captured waits for an event that was recorded outside of the capture");
  std::shared_ptr<Capture> joined;
  for (auto& each : captures)
    if (each->graph->id == until.capture) joined = each;
  if (!joined || (of && of != joined)) {
    std::string why = "a stream waits for an event that was recorded in another capture";
    set_error(cudaErrorCapturedEvent, why);
    return of ? break_one(*of, cudaErrorCapturedEvent, why) : cudaErrorCapturedEvent;
  }
  joined->numbers[stream]++;
  joined->graph->nodes.push_back({stream, "wait", nullptr, until});
  return cudaSuccess;
}

cudaError_t forbidden_in_capture(const char* what) {
  if (!running || thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& each : captures) {
    bool is_own = each->thread == this_thread();
    bool forbids = each->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (forbids || (is_own && each->mode != cudaStreamCaptureModeRelaxed))
      return break_one(*each, cudaErrorStreamCaptureUnsupported,
                       std::string(what) + ": not permitted while a stream is captured");
  }
  return cudaSuccess;
}

cudaError_t forbidden_for_captured(Stream* stream, const char* what) {
  if (!running) return cudaSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  auto of = capture_of(stream);
  return of ? break_one(*of, cudaErrorStreamCaptureUnsupported, std::string(what) + " of a stream that is captured")
            : cudaSuccess;
}

// Work of another stream for which the origin has not waited when the capture ends; "" if there is none.
static std::string unjoined(const Graph& graph) {
  using Clock = std::map<Stream*, size_t>;        // how many nodes of each stream come before
  std::map<Stream*, std::vector<Clock>> history;  // of each stream, behind each of its nodes
  std::map<Stream*, std::pair<size_t, const Node*>> last_work;
  for (auto& node : graph.nodes) {
    auto& own = history[node.stream];
    Clock clock = own.empty() ? Clock{} : own.back();
    if (!node.launch && node.until.number)
      for (auto& [stream, number] : history[node.until.stream][node.until.number - 1])
        clock[stream] = std::max(clock[stream], number);
    clock[node.stream] = own.size() + 1;
    own.push_back(std::move(clock));
    if (node.launch) last_work[node.stream] = {own.size(), &node};
  }
  auto& of_origin = history[graph.origin];
  Clock end = of_origin.empty() ? Clock{} : of_origin.back();
  for (auto& [stream, last] : last_work)
    if (end[stream] < last.first) return last.second->what;
  return "";
}

static void launch_graph(Graph& graph, Stream* stream) {
  std::map<Stream*, std::vector<Position>> behind;  // of each captured stream, where its nodes are now
  Position begin = position_of(stream);
  for (auto& node : graph.nodes) {
    auto*& into = graph.streams[node.stream];
    if (node.stream == graph.origin)
      into = stream;
    else if (!into)
      into = stream_like(node.stream);
    auto& own = behind[node.stream];
    if (own.empty()) wait_for(into, begin);
    if (node.launch)
      node.launch(into);
    else if (node.until.number)
      wait_for(into, behind[node.until.stream][node.until.number - 1]);
    own.push_back(position_of(into));
  }
  for (auto& [of, positions] : behind) wait_for(stream, positions.back());
}

extern "C" {
bool software_gpu_is_capturing(void* stream, int device) { return is_capturing(stream_of(stream, device)); }

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  auto* stream = stream_of(handle);
  std::lock_guard<std::mutex> lock(mutex);
  auto capture = std::make_shared<Capture>();
  capture->graph = std::make_shared<Graph>(Graph{++last_id, stream});
  capture->mode = mode;
  capture->thread = this_thread();
  capture->numbers[stream];
  captures.push_back(capture);
  running++;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  *out = nullptr;
  auto* stream = stream_of(handle);
  std::lock_guard<std::mutex> lock(mutex);
  auto capture = capture_of(stream);
  if (!capture || capture->graph->origin != stream) return cudaErrorIllegalState;
  std::erase(captures, capture);
  running--;
  if (capture->error != cudaSuccess) {
    set_error(cudaErrorStreamCaptureInvalidated, "the capture was ended by an error before: " + capture->broken_by);
    return cudaErrorStreamCaptureInvalidated;
  }
  if (auto left = unjoined(*capture->graph); !left.empty()) {
    set_error(cudaErrorStreamCaptureUnjoined, "the captured stream has not waited for another one's " + left);
    return cudaErrorStreamCaptureUnjoined;
  }
  if (capture->missed)
    fprintf(stderr,
            "[software gpu, rank %s] %zu pieces of work were put into streams that are not captured; first: %s\n",
            getenv("RANK"), capture->missed, capture->first_missed.c_str());
  *out = (cudaGraph_t) new GraphHandle(capture->graph);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t* edges) {
  std::shared_ptr<Capture> of;
  if (running) {
    auto* stream = stream_of(handle);
    std::lock_guard<std::mutex> lock(mutex);
    of = capture_of(stream);
  }
  *status = !of                        ? cudaStreamCaptureStatusNone
            : of->error == cudaSuccess ? cudaStreamCaptureStatusActive
                                       : cudaStreamCaptureStatusInvalidated;
  if (id) *id = of ? of->graph->id : 0;
  if (graph) *graph = of ? (cudaGraph_t)&of->graph : nullptr;
  if (edges) *edges = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  *out = (cudaGraphExec_t) new GraphHandle(*(GraphHandle*)graph);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(out, graph, flags);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) {
  *n = (*(GraphHandle*)graph)->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  launch_graph(**(GraphHandle*)graph, stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete (GraphHandle*)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete (GraphHandle*)graph;
  return cudaSuccess;
}
// An object lives as long as graphs that retain it.
cudaError_t cudaUserObjectCreate(cudaUserObject_t* out, void* object, cudaHostFn_t destroy, unsigned, unsigned) {
  *out = (cudaUserObject_t) new UserObject{std::shared_ptr<void>(object, destroy)};
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
  delete (UserObject*)object;
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned flags) {
  (*(GraphHandle*)graph)->retained.push_back(((UserObject*)object)->held);
  if (flags & cudaGraphUserObjectMove) cudaUserObjectRelease(object, 1);
  return cudaSuccess;
}
}
