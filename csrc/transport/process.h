// process.h -- what all groups of this process share: its token, its forks, and which group is its first.
#pragma once

#include <atomic>
#include <cstdint>

namespace pycomm {

// Random per process and renewed in a forked child, so that it tells processes apart across pid namespaces.
// It stays at one address for the life of the process: peers read it there to try whether they can.
const uint64_t& process_token();
// A word, at one address likewise, that nobody reads: peers write there to try whether they can.
uint64_t& probe_target();

// Is a process on its way out? Its memory goes first, before its record locks, and that takes a second per GB
// on some machines. `address`: any that it has. Asks by process_vm_readv, which must be allowed.
bool process_ends(int pid, uint64_t address);

// Bumped in the child of every fork, once process_token() has been called.
inline std::atomic<uint64_t> num_forks{0};
inline uint64_t fork_generation() { return num_forks.load(std::memory_order_relaxed); }

// The first group of a process gets more staging memory than further ones. Counted while it lives.
bool has_primary_group();
void begin_primary_group();
void end_primary_group();

}  // namespace pycomm
