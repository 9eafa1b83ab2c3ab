// flight_recorder.h -- the last operations of this process, for torch's flight-recorder tools.
//
// torch has a recorder of its own (c10d/FlightRecorder.hpp), but in torch 2.13 its instance is a hidden
// symbol of libtorch_cpu, which a backend built elsewhere cannot reach, and an entry there takes the Python
// stack and several strings: more than a small all_reduce. Ours is a ring of fixed entries; one costs about
// 0.1 us, so it is always on. pycomm/torch_backend.py puts the entries, in torch's format, into what torch's
// dump functions return. TORCH_FR_BUFFER_SIZE sets the number of entries, 0 switches it off.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace pycomm {

struct RecordedGroup {
  int64_t id = 0;
  int rank = 0;
  std::string name, desc;
  std::vector<uint64_t> global_ranks;
};

struct RecordedTensor {
  at::ScalarType dtype;
  c10::SmallVector<int64_t, 4> sizes;
};

struct FlightRecord {
  uint64_t id = 0;  // from 1; 0: empty entry
  std::shared_ptr<const RecordedGroup> group;
  const char* name = "";
  int peer = -1;              // of a send or recv; -1: any
  bool is_p2p = false;
  uint64_t sequence = 0;      // in its group; collectives and messages are counted apart
  int64_t timeout_ms = 0;
  int64_t created_ns = 0;     // since the epoch
  int64_t completed_ns = 0;   // 0: not completed
  bool failed = false;
  c10::SmallVector<RecordedTensor, 1> inputs, outputs;  // at most the first max_recorded_tensors
};

inline constexpr size_t max_recorded_tensors = 8;

class FlightRecorder {
 public:
  // Never destroyed: a worker thread may complete an operation while the process ends.
  static FlightRecorder& instance();

  bool enabled() const { return num_entries_ > 0; }
  // `head` has everything but id, times and tensors. Returns the id, for end(); 0 when switched off.
  uint64_t begin(const FlightRecord& head, at::TensorList inputs, at::TensorList outputs);
  void end(uint64_t id, bool failed);
  std::vector<FlightRecord> entries() const;  // oldest first

 private:
  // The lock is held for some 50 ns, by the thread that writes the entry and by a dump; two writers meet only
  // if the ring goes round within that time.
  struct Entry {
    mutable std::atomic_flag busy = ATOMIC_FLAG_INIT;
    FlightRecord record;
  };
  class Hold;

  FlightRecorder();

  size_t num_entries_;
  std::unique_ptr<Entry[]> entries_;
  std::atomic<uint64_t> next_id_{1};
};

}  // namespace pycomm
