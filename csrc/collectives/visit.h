// visit.h -- reading and writing peers' buffers where they lie, and the end of that when the group ends.
//
// An operation that takes the direct route ends when all ranks have left it (leave_direct, pipeline.h), so no
// buffer is touched after it. But an operation may also end with an error: the group is broken, or this rank
// has closed it. Then its buffers are the caller's again, who may write them or unmap them, while peers that
// have not yet heard of the error still copy. So
//   peer    visits += 1; does the group still work, has nobody closed it? copy; ask again; visits -= 1
//   owner   the group is broken or closed; wait until no peer visits; raise
// With a fence (seq_cst) between each first and second step, one of the two sees the other: a visit that
// begins after the owner has looked finds the group broken and raises. What a visitor may have read after
// that is no result: it asks again after its copy and before it says that it has left the operation (until
// then nobody closes the group but by giving up), and raises.
//
// Between threads of one process the owner waits for as long as the copies take, a fault of memory would end
// the process. A visitor in another process may be dead or stopped: dead ones are not waited for, and others
// for a limited time. Reading late does no harm there: the kernel serves it, or the reader's own mapping,
// which stays while the group is broken or left (transport/regions.h). A rank that was stopped in the middle
// of a block that it writes, and is continued later, finishes that block: the one thing that this cannot
// prevent (docs/limits.md).
#pragma once

#include "call.h"

namespace pycomm {

class Visit {
 public:
  explicit Visit(const Call& call);
  ~Visit() { visits_.fetch_sub(1, std::memory_order_release); }
  Visit(const Visit&) = delete;
  void finish() const;  // throws where what was read may be no result

 private:
  void look() const;

  const Call& call_;
  std::atomic<uint32_t>& visits_;
};

// For a rank whose operation ends with an error: returns when its buffers are its own again.
void await_visitors(const Call& call);

}  // namespace pycomm
