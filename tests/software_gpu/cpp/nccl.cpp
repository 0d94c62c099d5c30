// NCCL between processes of one host, through shared memory. A collective is a piece of work of its stream.
// Ranks that call different collectives, or the same with other counts or types, end with a message.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "elements.h"
#include "graphs.h"

static const int MOST_RANKS = 64;
static const size_t HEADER_BYTES = 65536, LETTER_BYTES = 1u << 20;

// Bytes that a rank can put into one collective; pages that are not touched take no memory.
static size_t slot_bytes() {
  static size_t value = (getenv("SOFTWARE_GPU_SLOT_MIB") ? atol(getenv("SOFTWARE_GPU_SLOT_MIB")) : 256) << 20;
  return value;
}

enum Operation { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, SPLIT };
static const char* const NAMES[] = {"all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce", "split"};

// What a rank called. For a split: its color and key.
struct Call {
  int operation, type, reduction, root;
  size_t elements;
  bool operator==(const Call& other) const {
    return operation == other.operation && type == other.type && reduction == other.reduction && root == other.root &&
           elements == other.elements;
  }
  std::string words() const {
    return std::string(NAMES[operation]) + " of " + std::to_string(elements) + " elements of type " +
           std::to_string(type) + " (reduction " + std::to_string(reduction) + ", root " + std::to_string(root) + ")";
  }
};

// The beginning of the memory that the ranks of a communicator share. Behind it lie a slot for each rank, and a letter
// box for each pair of ranks.
struct Shared {
  std::atomic<int> arrived, sense;  // of the barrier
  Call split[MOST_RANKS], call[MOST_RANKS];
  double scale[MOST_RANKS];                 // of a pre-multiplied sum
  std::atomic<long long> came[MOST_RANKS];  // collectives that a rank has begun,
  std::atomic<long long> left[MOST_RANKS];  // and ended
};
static_assert(sizeof(Shared) <= HEADER_BYTES);
struct LetterBox {
  std::atomic<int> full, wanted;
  size_t bytes;
  char contents[];
};

struct ncclComm {
  std::string name;
  int rank, size, device;
  Shared* shared;
  char *slots, *boxes;
  int splits = 0, sense = 0;
  std::vector<double> scales;  // of the pre-multiplied sums made for it
  std::atomic<bool> aborted{false};
  long long launched = 0;
  std::mutex mutex;
  std::deque<Position> collectives, letters;  // work in queues, for other ranks to ask for
  std::atomic<bool> held_up{false};           // a collective waits for an earlier one of this rank in another stream

  char* slot(int of) { return slots + of * slot_bytes(); }
  LetterBox* box(int from, int to) {
    return (LetterBox*)(boxes + ((size_t)from * size + to) * (sizeof(LetterBox) + LETTER_BYTES));
  }
};

static bool logging() {
  static bool value = getenv("SOFTWARE_GPU_LOG") != nullptr;
  return value;
}

// Where other ranks wait for this one, its queues are run up to what they wait for: real devices run by themselves.
static void answer_others(ncclComm* comm, std::vector<Position>& wanted) {
  if (comm->aborted) return;
  std::lock_guard<std::mutex> lock(comm->mutex);
  if (!comm->collectives.empty()) {
    bool asked = comm->held_up.exchange(false);
    for (int r = 0; r < comm->size; r++) asked |= comm->shared->came[r] > comm->shared->left[comm->rank];
    if (asked) wanted.push_back(comm->collectives.front());
  }
  if (!comm->letters.empty()) {
    bool asked = false;
    for (int r = 0; r < comm->size; r++) asked |= comm->box(r, comm->rank)->full || comm->box(comm->rank, r)->wanted;
    if (asked) wanted.push_back(comm->letters.front());
  }
}

static bool barrier(ncclComm* comm) {
  int sense = comm->sense = 1 - comm->sense;
  if (comm->shared->arrived.fetch_add(1) == comm->size - 1) {
    comm->shared->arrived = 0;
    comm->shared->sense = sense;
    return true;
  }
  while (comm->shared->sense != sense) {
    if (comm->aborted) return false;
    usleep(100);
  }
  return true;
}

// The file goes as soon as all ranks have it open: nothing of it stays when ranks are killed.
static ncclResult_t connect(const std::string& name, int size, int rank, ncclComm** out) {
  auto* comm = new ncclComm;
  comm->name = name;
  comm->size = size;
  comm->rank = rank;
  cudaGetDevice(&comm->device);
  const char* folder = getenv("SOFTWARE_GPU_FOLDER");
  std::string path = std::string(folder ? folder : "/dev/shm") + "/nccl_" + name;
  size_t bytes = HEADER_BYTES + size * slot_bytes() + (size_t)size * size * (sizeof(LetterBox) + LETTER_BYTES);
  int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (size > MOST_RANKS || file < 0 || ftruncate(file, bytes)) return perror(path.c_str()), ncclSystemError;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (address == MAP_FAILED) return perror("mmap"), ncclSystemError;
  comm->shared = (Shared*)address;
  comm->slots = (char*)address + HEADER_BYTES;
  comm->boxes = comm->slots + size * slot_bytes();
  if (!barrier(comm)) return ncclSystemError;
  if (rank == 0) unlink(path.c_str());
  if (schedule() != AT_ONCE) ask_often([comm](std::vector<Position>& wanted) { answer_others(comm, wanted); });
  if (logging()) fprintf(stderr, "[nccl] %s: rank %d of %d on device %d\n", name.c_str(), rank, size, comm->device);
  *out = comm;
  return ncclSuccess;
}

// --- Groups of calls: launched together when the outermost ends ---
struct Piece {  // a part of a message between two ranks
  ncclComm* comm;
  bool sends;
  char* address;
  size_t bytes;
  int peer;
  size_t done = 0;
};
struct Launch {
  ncclComm* comm;
  bool is_letter;
  Stream* stream;
  std::string what;
  std::function<Step()> make;  // anew for each launch of a captured one
};
static thread_local int depth = 0;
static thread_local std::vector<Launch> launches;
static thread_local std::vector<Piece> pieces;
static thread_local Stream* stream_of_pieces;

static void launch(const Launch& launch) {
  auto* comm = launch.comm;
  if (is_capturing(launch.stream)) {
    capture(launch.stream, launch.what, [launch](Stream* into) {
      auto again = launch;
      again.stream = into;
      ::launch(again);
    });
    return;
  }
  auto* waiting = launch.is_letter ? &comm->letters : &comm->collectives;
  auto step = launch.make();
  if (schedule() == AT_ONCE) {
    enqueue(launch.stream, launch.what, step);
    return;
  }
  std::lock_guard<std::mutex> lock(comm->mutex);
  auto number = enqueue(launch.stream, launch.what, [=] {
    if (!step()) return false;
    std::lock_guard<std::mutex> lock(comm->mutex);
    waiting->pop_front();
    return true;
  });
  waiting->push_back({launch.stream, number});
}

// Move what can be moved between this rank and others; true when all of it has been.
static bool move_pieces(std::vector<Piece>& pieces) {
  bool all = true;
  std::vector<std::pair<int, bool>> blocked;  // messages of a pair of ranks keep their order
  for (auto& piece : pieces) {
    if (piece.comm->aborted) return true;
    if (piece.done >= piece.bytes) continue;
    all = false;
    std::pair<int, bool> way{piece.peer, piece.sends};
    if (std::find(blocked.begin(), blocked.end(), way) != blocked.end()) continue;
    blocked.push_back(way);
    int me = piece.comm->rank;
    auto* box = piece.comm->box(piece.sends ? me : piece.peer, piece.sends ? piece.peer : me);
    if (piece.sends && !box->full) {
      box->bytes = std::min(LETTER_BYTES, piece.bytes - piece.done);
      memcpy(box->contents, piece.address + piece.done, box->bytes);
      piece.done += box->bytes;
      box->wanted = 0;
      box->full = 1;
    } else if (!piece.sends && box->full) {
      memcpy(piece.address + piece.done, box->contents, box->bytes);
      piece.done += box->bytes;
      box->full = 0;
    }
    if (!piece.sends && piece.done < piece.bytes && !box->full) box->wanted = 1;
  }
  return all;
}

static void end_of_group() {
  for (auto all = std::move(launches); auto& each : all) launch(each);
  launches.clear();
  if (pieces.empty()) return;
  auto all = std::make_shared<std::vector<Piece>>(std::move(pieces));
  pieces.clear();
  auto make = [all]() -> Step {
    auto moved = std::make_shared<std::vector<Piece>>(*all);
    return [moved] { return move_pieces(*moved); };
  };
  launch({all->front().comm, true, stream_of_pieces, "messages between ranks", make});
}

static void check_device(ncclComm* comm) {
  int device;
  cudaGetDevice(&device);
  if (device != comm->device)
    fprintf(stderr, "[nccl] a communicator of device %d is called with device %d\n", comm->device, device);
}

// Launch a collective: `bytes` at `in` go into this rank's slot; when all ranks have come, `take` reads their slots.
static ncclResult_t collective(ncclComm* comm, Call call, const void* in, size_t bytes, double scale,
                               cudaStream_t stream, std::function<void()> take) {
  check_device(comm);
  if (logging())
    fprintf(stderr, "[nccl] %s rank %d stream %p: %s\n", comm->name.c_str(), comm->rank, stream, call.words().c_str());
  if (bytes > slot_bytes()) {
    fprintf(stderr, "[nccl] %s has %zu bytes: set SOFTWARE_GPU_SLOT_MIB\n", call.words().c_str(), bytes);
    return ncclInvalidArgument;
  }
  auto make = [=]() -> Step {
    long long number = comm->launched++;
    auto begun = std::make_shared<bool>(false);
    return [=] {
      auto* shared = comm->shared;
      if (comm->aborted) return true;
      if (!*begun) {
        for (int r = 0; r < comm->size; r++)
          if (shared->left[r] < number) {
            if (r == comm->rank) comm->held_up = true;
            return false;
          }
        if (in) memcpy(comm->slot(comm->rank), in, bytes);
        shared->call[comm->rank] = call;
        shared->scale[comm->rank] = scale;
        shared->came[comm->rank] = number + 1;
        *begun = true;
      }
      for (int r = 0; r < comm->size; r++)
        if (shared->came[r] <= number) return false;
      for (int r = 0; r < comm->size; r++)
        if (!(shared->call[r] == call)) {
          fprintf(stderr, "[nccl] %s: ranks differ. Rank %d: %s. Rank %d: %s.\n", comm->name.c_str(), comm->rank,
                  call.words().c_str(), r, shared->call[r].words().c_str());
          abort();
        }
      take();
      shared->left[comm->rank] = number + 1;
      return true;
    };
  };
  launches.push_back({comm, false, stream_of(stream, comm->device), comm->name + ": " + call.words(), make});
  if (!depth) end_of_group();
  return ncclSuccess;
}

static double scale_of(ncclComm* comm, int reduction) {
  return reduction >= ncclNumOps ? comm->scales[reduction - ncclNumOps] : 1.0;
}
static int kind_of(int reduction) { return std::min<int>(reduction, ncclNumOps); }

// Elements `begin` to `end` of all slots, reduced in long double and rounded once.
static void reduce(ncclComm* comm, char* out, size_t begin, size_t end, int type, int reduction) {
  for (size_t i = begin; i < end; i++) {
    long double value = get_element(comm->slot(0), type, i) * comm->shared->scale[0];
    for (int r = 1; r < comm->size; r++) {
      long double other = get_element(comm->slot(r), type, i) * comm->shared->scale[r];
      switch (reduction) {
        case ncclMax: value = std::max(value, other); break;
        case ncclMin: value = std::min(value, other); break;
        case ncclProd: value *= other; break;
        default: value += other;
      }
    }
    if (reduction == ncclAvg) value /= comm->size;
    put_element(out, type, i - begin, value);
  }
}

static ncclResult_t message(bool sends, void* address, size_t n, ncclDataType_t type, int peer, ncclComm* comm,
                            cudaStream_t stream) {
  check_device(comm);
  pieces.push_back({comm, sends, (char*)address, n * bytes_of(type), peer});
  stream_of_pieces = stream_of(stream, comm->device);
  if (!depth) end_of_group();
  return ncclSuccess;
}

extern "C" {
ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> made;
  memset(id, 0, sizeof *id);
  snprintf((char*)id, 100, "%d_%d_%ld", getpid(), made++, (long)time(nullptr));
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return connect((char*)&id, size, rank, out);
}
ncclResult_t ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId id, int rank) {
  return connect((char*)&id, size, rank, out);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return connect((char*)&ids[0], size, rank, out);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  auto* calls = comm->shared->split;
  calls[comm->rank] = Call{SPLIT, color, key, 0, 0};
  if (!barrier(comm)) return ncclSystemError;
  int size = 0, rank = 0;
  for (int r = 0; r < comm->size; r++) {
    if (calls[r].type != color) continue;
    size++;
    if (calls[r].reduction < key || (calls[r].reduction == key && r < comm->rank)) rank++;
  }
  if (!barrier(comm)) return ncclSystemError;
  int number = comm->splits++;
  *out = nullptr;
  if (color < 0) return ncclSuccess;
  return connect(comm->name + "_split" + std::to_string(number) + "_" + std::to_string(color), size, rank, out);
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
  *size = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
// Only this rank's: as with NCCL, the others learn nothing of it. NCCL then frees memory of the device, which waits for
// all that runs there: also for what other communicators wait for.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  return cudaDeviceSynchronize() == cudaSuccess ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
// Communicators are not deleted: work in queues may still name them.
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "error of a software GPU's NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = (void*)1;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void** out, size_t bytes) {
  return cudaMalloc(out, bytes) == cudaSuccess ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclMemFree(void* address) { return cudaFree(address) == cudaSuccess ? ncclSuccess : ncclSystemError; }
ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--depth == 0) end_of_group();
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* in, void* out, size_t n, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t bytes = n * bytes_of(type);
  return collective(comm, {ALL_GATHER, type, 0, 0, n}, in, bytes, 1, stream, [=] {
    for (int r = 0; r < comm->size; r++) memcpy((char*)out + r * bytes, comm->slot(r), bytes);
  });
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  Call call{REDUCE_SCATTER, type, kind_of(op), 0, n};
  return collective(comm, call, in, n * comm->size * bytes_of(type), scale_of(comm, op), stream,
                    [=] { reduce(comm, (char*)out, n * comm->rank, n * (comm->rank + 1), type, op); });
}
ncclResult_t ncclAllReduce(const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return collective(comm, {ALL_REDUCE, type, kind_of(op), 0, n}, in, n * bytes_of(type), scale_of(comm, op), stream,
                    [=] { reduce(comm, (char*)out, 0, n, type, op); });
}
ncclResult_t ncclReduce(const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {REDUCE, type, kind_of(op), root, n}, in, n * bytes_of(type), scale_of(comm, op), stream,
                    [=] {
                      if (comm->rank == root) reduce(comm, (char*)out, 0, n, type, op);
                    });
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t bytes = n * bytes_of(type);
  return collective(comm, {BROADCAST, type, 0, root, n}, comm->rank == root ? in : nullptr, bytes, 1, stream,
                    [=] { memcpy(out, comm->slot(root), bytes); });
}
ncclResult_t ncclBcast(void* data, size_t n, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, n, type, root, comm, stream);
}
ncclResult_t ncclSend(const void* data, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return message(true, (void*)data, n, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void* data, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return message(false, data, n, type, peer, comm, stream);
}
ncclResult_t ncclAlltoAll(const void* in, void* out, size_t n, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  ncclGroupStart();
  for (int r = 0; r < comm->size; r++) {
    ncclSend((char*)in + r * n * bytes_of(type), n, type, r, comm, stream);
    ncclRecv((char*)out + r * n * bytes_of(type), n, type, r, comm, stream);
  }
  return ncclGroupEnd();
}
ncclResult_t ncclGather(const void* in, void* out, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  ncclGroupStart();
  ncclSend(in, n, type, root, comm, stream);
  for (int r = 0; comm->rank == root && r < comm->size; r++)
    ncclRecv((char*)out + r * n * bytes_of(type), n, type, r, comm, stream);
  return ncclGroupEnd();
}
// The scalar is read when the operation is made: torch passes one of the host.
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t,
                                      ncclComm_t comm) {
  comm->scales.push_back(get_element((char*)scalar, type, 0));
  *op = (ncclRedOp_t)(ncclNumOps + comm->scales.size() - 1);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
}
