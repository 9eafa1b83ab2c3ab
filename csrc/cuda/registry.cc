// registry.cc -- see registry.h.
#include "registry.h"

#include <algorithm>
#include <bitset>
#include <stdexcept>

#include "../communicator/agree.h"
#include "device/device_memory.h"
#include "device/spare.h"

namespace pycomm::cuda {

namespace {
constexpr size_t max_regions = 512;
constexpr size_t row_bytes = max_ranks * sizeof(uint64_t), table_bytes = max_regions * row_bytes;
constexpr OpInfo allocation{OpKind::alloc, 0};
}  // namespace

void Registry::make() {
  table_ = allocate_block(setup_.device, table_bytes);
  zero_now(setup_.device, reinterpret_cast<void*>(table_), table_bytes);
}

Registered Registry::allocate(size_t nbytes) {
  const size_t id = free_id();
  const bool multicast = setup_.topology.own_devices() && setup_.topology.here().multicast;
  std::shared_ptr<PeerMemory> memory =
      PeerMemory::create(setup_.comm, setup_.topology, std::max<size_t>(nbytes, 1), multicast);
  std::byte* data = memory->address(setup_.rank());
  Verdict copied;
  {
    const auto held = lock_.take(allocation);
    if (regions_.size() <= id) regions_.resize(id + 1);
    regions_[id] = {memory, data, memory->nbytes()};
    if (memory->multicast()) multicast_ = true;
    copied = attempt([&] { write_row(id, *memory); });
  }
  // Until all have agreed, a peer's kernel could look a handle up before this rank's table has it.
  try {
    agree(setup_.comm, copied);
  } catch (...) {
    const auto held = lock_.take(allocation);
    regions_[id] = {};
    throw;
  }
  return {std::move(memory), data};
}

void Registry::write_row(size_t id, const PeerMemory& memory) {
  uint64_t bases[max_ranks] = {};
  static_assert(sizeof(bases) == row_bytes);
  for (int p = 0; p < setup_.world_size(); ++p) bases[p] = reinterpret_cast<uint64_t>(memory.address(p));
  copy_now(setup_.device, reinterpret_cast<std::byte*>(table_) + id * row_bytes, bases, row_bytes);
}

// The lowest id that no rank uses; collective. What all ranks have dropped is unmapped here.
size_t Registry::free_id() {
  using Ids = std::bitset<max_regions>;
  Ids used;
  {
    const auto held = lock_.take(allocation);
    for (size_t id = 0; id < regions_.size(); ++id) used[id] = regions_[id].base && !regions_[id].dropped;
  }
  Ids used_anywhere;
  for (const Ids& of_rank : all_gather_value(setup_.comm, used)) used_anywhere |= of_rank;
  const auto held = lock_.take(allocation);
  size_t id = max_regions;
  for (size_t i = max_regions; i-- > 0;) {
    if (used_anywhere[i]) continue;
    if (i < regions_.size()) regions_[i] = {};
    id = i;
  }
  if (id == max_regions)
    throw std::runtime_error("more than " + std::to_string(max_regions) + " registered buffers in one group");
  return id;
}

void Registry::drop(const std::byte* data) {
  for (Region& region : regions_)
    if (region.base == data) region.dropped = true;
}

std::optional<Registry::Found> Registry::find(const void* data, size_t nbytes) const {
  const auto* p = static_cast<const std::byte*>(data);
  for (size_t id = 0; id < regions_.size(); ++id) {
    const Region& region = regions_[id];
    if (!region.base || region.dropped || p < region.base || p + nbytes > region.base + region.nbytes)
      continue;
    return Found{&region, id, static_cast<size_t>(p - region.base)};
  }
  return std::nullopt;
}

std::byte* Registry::at_peer(const void* data, size_t nbytes, int peer) const {
  const auto found = find(data, nbytes);
  return found ? found->region->memory->address(peer) + found->offset : nullptr;
}

BufferLookup Registry::lookup() const {
  BufferLookup lookup;
  lookup.handle = [this](const void* data, size_t nbytes) -> std::optional<uint64_t> {
    const auto found = find(data, nbytes);
    return found ? std::optional(handle_of_region(found->id, found->offset)) : std::nullopt;
  };
  lookup.multicast = [this](const void* data) -> std::byte* {
    const auto found = find(data, 1);
    std::byte* const base = found ? found->region->memory->multicast() : nullptr;
    return base ? base + found->offset : nullptr;
  };
  lookup.at_peer = [this](const void* data, int peer) { return at_peer(data, 1, peer); };
  return lookup;
}

void Registry::give_back() {
  regions_.clear();
  if (table_) free_block(setup_.device, table_, table_bytes);
}

void Registry::keep_for_ever() { (void)new std::vector<Region>(std::move(regions_)); }

}  // namespace pycomm::cuda
