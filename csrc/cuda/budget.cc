// budget.cc -- see budget.h.
#include "budget.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

namespace pycomm::cuda {

namespace {

struct Count {
  int room = 0;  // of this process
  int taken = 0;
  int callers = 0;  // ranks of this process, each with a stream
  int streams = 0;  // of lines
};

struct Counts {
  std::mutex mutex;
  std::map<std::string, Count> of_device;
};

// Never destroyed: groups may end later than static objects do.
Counts& counts() {
  static auto* all = new Counts;
  return *all;
}

std::string key_of(const Uuid& device) { return {device.bytes, sizeof(device.bytes)}; }

}  // namespace

Places::Places(const Place& here, int ranks_here, int ranks_on_device, int wanted) : device_(here.uuid) {
  Counts& all = counts();
  std::lock_guard lock(all.mutex);
  Count& count = all.of_device[key_of(device_)];
  const int room = here.multiprocessors * ranks_here / ranks_on_device;
  count.room = count.room ? std::min(count.room, room) : room;
  count_ = std::clamp(count.room - count.taken, 0, wanted);
  count.taken += count_;
}

void Places::keep(int count) {
  if (count >= count_) return;
  Counts& all = counts();
  std::lock_guard lock(all.mutex);
  all.of_device[key_of(device_)].taken -= count_ - count;
  count_ = count;
}

int queues_of(const Place& place) {
  return place.connections > 0 ? std::min(place.connections, max_connections) : default_connections;
}

bool LineStreams::take(const Place& here, int ranks_here, bool of_messages) {
  Counts& all = counts();
  std::lock_guard lock(all.mutex);
  device_ = here.uuid;
  Count& count = all.of_device[key_of(device_)];
  count.callers = std::max(count.callers, ranks_here);
  const bool matters = of_messages || count.callers > 1;
  if (matters && count.callers + count.streams + 1 > queues_of(here)) return false;
  ++count.streams;
  ++count_;
  return true;
}

void LineStreams::give_back() {
  if (!count_) return;
  Counts& all = counts();
  std::lock_guard lock(all.mutex);
  all.of_device[key_of(device_)].streams -= count_;
  count_ = 0;
}

}  // namespace pycomm::cuda
