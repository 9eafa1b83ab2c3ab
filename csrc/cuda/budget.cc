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

}  // namespace pycomm::cuda
