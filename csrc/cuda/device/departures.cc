// departures.cc -- see departures.h.
#include "departures.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "../../communicator/registered.h"

namespace pycomm::cuda {

Departures::Departures(Communicator& comm) : rank_(comm.rank()), lives_(comm.transport().lives()) {
  const RegisteredBuffer buffer = allocate_registered(comm, sizeof(uint32_t));
  comm.transport().drop_region(buffer.region);  // it is no buffer of collectives; the memory stays mapped
  memory_ = buffer.memory;
  stride_ = buffer.stride;
}

std::atomic_ref<uint32_t> Departures::word(int rank) const {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(memory_->data() + rank * stride_));
}

// `by_death`: the end of its process counts, too.
bool Departures::departed(int rank, bool by_death) const {
  return word(rank).load(std::memory_order_acquire) || (by_death && !lives_.alive(rank));
}

bool Departures::complete(const Topology& topology) const {
  for (size_t p = 0; p < topology.places.size(); ++p)
    if (static_cast<int>(p) != topology.rank &&
        !departed(static_cast<int>(p), !topology.places[p].same_process(topology.here())))
      return false;
  return true;
}

// --- parked memory

namespace {

struct Parked {
  DeviceMemory memory;
  std::shared_ptr<Departures> departures;
  Topology topology;
};

std::mutex parked_mutex;
// Never destroyed: the driver may be gone before static objects are.
std::vector<Parked>& parked_blocks() {
  static auto* blocks = new std::vector<Parked>;
  return *blocks;
}

}  // namespace

void park(DeviceMemory memory, std::shared_ptr<Departures> departures, const Topology& topology) {
  std::lock_guard lock(parked_mutex);
  parked_blocks().push_back({std::move(memory), std::move(departures), topology});
}

int free_parked() {
  std::lock_guard lock(parked_mutex);
  auto& blocks = parked_blocks();
  std::erase_if(blocks, [](const Parked& each) {
    return !each.memory.from_this_process() || each.departures->complete(each.topology);
  });
  return static_cast<int>(blocks.size());
}

}  // namespace pycomm::cuda
