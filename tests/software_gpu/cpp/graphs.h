// Graphs: while a stream is captured, its work is written down, and done each time that the graph is launched.
#pragma once
#include <functional>
#include <string>

#include "streams.h"

struct Captured {                  // a place in a capture: behind the first `number` pieces of work of a stream
  unsigned long long capture = 0;  // 0: of none
  Stream* stream = nullptr;
  size_t number = 0;
};

bool is_capturing(Stream*);
bool is_running(unsigned long long capture);  // whether it has not ended
// While a stream is captured: keep `launch`, which puts work into the stream that it is given.
void capture(Stream*, std::string what, std::function<void(Stream*)> launch);
void note_missed(const std::string& what);  // work of a stream that is not captured
Captured place_in_capture(Stream*);
// A stream waits for an event: one that is captured joins it to the capture.
cudaError_t capture_wait(Stream*, const Captured&);
// What CUDA forbids while a thread captures. Ends the capture with an error.
cudaError_t forbidden_in_capture(const char* what);
cudaError_t forbidden_for_captured(Stream*, const char* what);
cudaError_t break_captures(cudaError_t, const std::string& why);
