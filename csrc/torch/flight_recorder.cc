// flight_recorder.cc -- see flight_recorder.h.
#include "flight_recorder.h"

#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <algorithm>
#include <chrono>
#include <thread>

namespace pycomm {

namespace {

constexpr int default_entries = 2000;  // as torch's own recorder

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void copy_sizes(c10::SmallVector<RecordedTensor, 1>& to, at::TensorList tensors) {
  to.resize(std::min(tensors.size(), max_recorded_tensors));
  for (size_t i = 0; i < to.size(); ++i) {
    to[i].dtype = tensors[i].scalar_type();
    auto sizes = tensors[i].sizes();
    to[i].sizes.assign(sizes.begin(), sizes.end());
  }
}

}  // namespace

class FlightRecorder::Hold {
 public:
  explicit Hold(const Entry& entry) : entry_(entry) {
    while (entry_.busy.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }
  ~Hold() { entry_.busy.clear(std::memory_order_release); }

 private:
  const Entry& entry_;
};

FlightRecorder& FlightRecorder::instance() {
  static FlightRecorder* recorder = new FlightRecorder();
  return *recorder;
}

// The variable is torch's, so torch's function reads it, with the meaning it has for torch's own recorder.
FlightRecorder::FlightRecorder()
    : num_entries_(std::max(
          0, c10d::getCvarInt({"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}, default_entries))),
      entries_(num_entries_ ? new Entry[num_entries_] : nullptr) {}

uint64_t FlightRecorder::begin(const FlightRecord& head, at::TensorList inputs, at::TensorList outputs) {
  if (!enabled()) return 0;
  const uint64_t id = next_id_.fetch_add(1, std::memory_order_relaxed);
  Entry& entry = entries_[id % num_entries_];
  Hold hold(entry);
  FlightRecord& record = entry.record;
  record.id = id;
  if (record.group != head.group) record.group = head.group;
  record.name = head.name;
  record.peer = head.peer;
  record.is_p2p = head.is_p2p;
  record.sequence = head.sequence;
  record.timeout_ms = head.timeout_ms;
  record.created_ns = now_ns();
  record.completed_ns = 0;
  record.failed = false;
  copy_sizes(record.inputs, inputs);
  copy_sizes(record.outputs, outputs);
  return id;
}

void FlightRecorder::end(uint64_t id, bool failed) {
  if (id == 0) return;
  Entry& entry = entries_[id % num_entries_];
  Hold hold(entry);
  if (entry.record.id != id) return;  // overwritten meanwhile
  if (failed) entry.record.failed = true;
  else entry.record.completed_ns = now_ns();
}

std::vector<FlightRecord> FlightRecorder::entries() const {
  std::vector<FlightRecord> found;
  for (size_t i = 0; i < num_entries_; ++i) {
    Hold hold(entries_[i]);
    if (entries_[i].record.id) found.push_back(entries_[i].record);
  }
  std::sort(found.begin(), found.end(),
            [](const FlightRecord& a, const FlightRecord& b) { return a.id < b.id; });
  return found;
}

}  // namespace pycomm
