// regions.cc -- see regions.h.
#include "regions.h"

namespace pycomm {

uint32_t Regions::next() const {
  std::lock_guard lock(mutex_);
  return last_ + 1;
}

void Regions::add(uint32_t region, std::shared_ptr<SharedMemory> memory, size_t stride,
                  std::vector<uint64_t> bases) {
  std::lock_guard lock(mutex_);
  unmap_dropped();
  last_ = region;
  regions_[region] = {std::move(memory), stride, std::move(bases)};
  live_.fetch_add(1);
}

uint32_t Regions::find(const void* address, size_t nbytes) const {
  if (live_.load(std::memory_order_relaxed) == 0) return 0;
  std::lock_guard lock(mutex_);
  const auto begin = reinterpret_cast<uint64_t>(address);
  for (const auto& [id, region] : regions_) {
    if (region.dropped) continue;
    const uint64_t base = region.bases[identity_.rank];
    if (begin >= base && begin + nbytes <= base + region.stride) return id;
  }
  return 0;
}

std::byte* Regions::map(uint32_t region, int peer, uint64_t address) const {
  if (region == 0) return nullptr;
  std::lock_guard lock(mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end()) return nullptr;
  return found->second.at(peer, address - found->second.bases[peer]);
}

std::byte* Regions::at_peer(uint32_t region, int peer, const void* address) const {
  std::lock_guard lock(mutex_);
  const Region& entry = regions_.at(region);
  return entry.at(peer, reinterpret_cast<uint64_t>(address) - entry.bases[identity_.rank]);
}

void Regions::drop(uint32_t region) {
  if (health_.forked()) return;  // the memory is the parent's
  std::lock_guard lock(mutex_);
  Region& entry = regions_.at(region);
  entry.dropped = true;
  live_.fetch_sub(1);
  entry.memory->give_back(identity_.rank * entry.stride, entry.stride);
  num_dropped(entry).fetch_add(1, std::memory_order_acq_rel);
  unmap_dropped();
}

std::atomic_ref<uint32_t> Regions::num_dropped(const Region& region) const {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(region.at(identity_.world_size, 0)));
}

// Whoever has counted its drop had known by then that its operation has ended, so look at that after the
// count.
void Regions::unmap_dropped() {
  auto ended_early = [this] {
    for (int p = 0; p < identity_.world_size; ++p)
      if (p != identity_.rank && health_.peer_closed(p)) return true;
    return health_.broken();
  };
  std::erase_if(regions_, [&](const auto& entry) {
    const Region& region = entry.second;
    return region.dropped &&
           num_dropped(region).load(std::memory_order_acquire) ==
               static_cast<uint32_t>(identity_.world_size) &&
           !ended_early();
  });
}

}  // namespace pycomm
