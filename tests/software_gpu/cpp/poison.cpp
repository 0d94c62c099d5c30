// Memory whose contents are undefined is NaN: each byte 0xFF. The caching allocator tells of what it gives out and takes
// back.
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "queued.h"

using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;

struct Range {
  char* address;
  size_t bytes;
};
static std::mutex mutex;
// Taken back, and not filled since: by device and stream that allocated them.
static std::map<std::pair<int, void*>, std::vector<Range>> freed;

// A stream that allocates may get any block that it has freed, and write it: so all of them are filled, as work of this
// stream. Between the free and this moment it may still be made to wait for those who use them.
static void note(const Entry& entry) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& of_stream = freed[{entry.device_, entry.stream_}];
  Range range{(char*)entry.addr_, entry.size_};
  auto enqueue_filling = [&](Range each) {
    enqueue(entry.stream_, entry.device_, "undefined memory", [=] { memset(each.address, 0xFF, each.bytes); });
  };
  switch (entry.action_) {
    case Entry::ALLOC:
      for (auto& each : of_stream) enqueue_filling(each);
      of_stream.clear();
      enqueue_filling(range);
      break;
    case Entry::FREE_COMPLETED: of_stream.push_back(range); break;
    case Entry::SEGMENT_FREE:
      std::erase_if(of_stream, [&](const Range& each) {
        return each.address >= range.address && each.address < range.address + range.bytes;
      });
      break;
    default: break;
  }
}

static void poison() { c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&note); }

TORCH_LIBRARY_FRAGMENT(software_gpu, library) { library.def("poison() -> ()", &poison); }
