// group_memory.h -- the shared memory of a group, as one rank has mapped it: where its parts are (layout.h).
#pragma once

#include <memory>

#include "../memory/shared_memory.h"
#include "layout.h"

namespace pycomm {

class GroupMemory {
 public:
  GroupMemory(std::unique_ptr<SharedMemory> memory, const Layout& layout)
      : memory_(std::move(memory)),
        base_(memory_->data()),
        controls_(reinterpret_cast<RankControl*>(base_ + layout.controls())),
        pages_(reinterpret_cast<StorePage*>(base_ + layout.pages())),
        world_size_(layout.world_size),
        ranks_(layout.ranks()),
        rank_stride_(layout.rank_stride()),
        channels_(layout.channels()),
        channel_stride_(layout.channel_stride()),
        layout_(layout) {}

  GroupHeader& header() const { return *reinterpret_cast<GroupHeader*>(base_); }
  RankControl& control(int rank) const { return controls_[rank]; }
  StorePage& page(int rank) const { return pages_[rank]; }
  OpSlot& slot(int rank, uint64_t sequence) const {
    return *reinterpret_cast<OpSlot*>(rank_base(rank) + (sequence & 1) * sizeof(OpSlot));
  }
  PartRef* parts(int rank, uint64_t sequence, bool output) const {
    return reinterpret_cast<PartRef*>(rank_base(rank) + 2 * sizeof(OpSlot)) +
           ((sequence & 1) * 2 + output) * world_size_;
  }
  std::byte* staging(int rank) const { return rank_base(rank) + 2 * sizeof(OpSlot) + layout_.tables_bytes(); }
  Channel& channel(int src, int dst) const {  // of two ranks
    const size_t index = static_cast<size_t>(src) * (world_size_ - 1) + dst - (dst > src);
    return *reinterpret_cast<Channel*>(base_ + channels_ + index * channel_stride_);
  }
  std::byte* ring(int src, int dst) const {
    return reinterpret_cast<std::byte*>(&channel(src, dst)) + sizeof(Channel);
  }

  int world_size() const { return world_size_; }
  size_t staging_bytes() const { return layout_.staging_bytes; }
  size_t ring_bytes() const { return layout_.ring_bytes; }
  SharedMemory& shared() const { return *memory_; }

 private:
  std::byte* rank_base(int rank) const { return base_ + ranks_ + rank * rank_stride_; }

  std::unique_ptr<SharedMemory> memory_;
  std::byte* const base_;
  RankControl* const controls_;
  StorePage* const pages_;
  const int world_size_;
  const size_t ranks_, rank_stride_, channels_, channel_stride_;
  const Layout layout_;
};

}  // namespace pycomm
