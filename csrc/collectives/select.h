// select.h -- which algorithm an operation uses: what was measured on this machine (tuned.h), else the
// built-in table; printed by pycomm.explain, overridable.
#pragma once

#include <array>
#include <string>

#include "../op/op.h"
#include "tuned.h"

namespace pycomm {

// What the choice may depend on; equal on all ranks.
struct Situation {
  int world_size;
  int cores;  // that the ranks of the group may run on
  bool kernel_ahead;  // one copy by the kernel beats two through shared memory (transport/layout.h)
  bool mapped;  // all buffers of the operation are addressable by all ranks (threads of one process,
                // registered)
  bool kernel_reads;  // process_vm_readv works between all ranks
  const TunedTable* tuned = nullptr;  // of the group; asked before the built-in table
};

struct Choice {
  Algorithm algorithm;
  size_t block;  // bytes per pipeline step and rank (staged, two_shot, ring); 0 where it has no meaning
  const char* reason;
  bool measured = false;  // by the group's own table
};

// nbytes: the size of a rank's whole buffer (all_gather: of one rank's part; reduce_scatter, all_to_all,
// scatter: of one part).
Choice select(OpKind kind, size_t nbytes, const Situation& situation,
              Algorithm requested = Algorithm::automatic);

// True when the operation is so small that its payload travels with the header.
bool fits_payload(OpKind kind, size_t nbytes, int world_size);

// Algorithms that `kind` has, for error messages and tests.
bool has_algorithm(OpKind kind, Algorithm algorithm);

}  // namespace pycomm
