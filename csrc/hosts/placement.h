// placement.h -- which rank is on which host, and who sends which piece of a buffer to whom.
//
//   ranks   0 1 2 3 4     hosts are numbered by their lowest rank, and their ranks counted from 0: rank 3 is
//   host    0 0 1 0 1     local rank 2 of host 0. The lowest rank of a host is its leader.
//   local   0 1 0 2 1
//
// [Note: cuts] A host of k ranks cuts a buffer evenly into k slices, one for each of its ranks (chunk_of).
// Hosts of unequal size have unequal slices, so what one slice holds may belong to several of the other
// host's ranks: the messages between two hosts are the intersections of their slices, k_a + k_b - 1 at most.
// Hosts of equal size get one message for each pair of ranks with the same local number.
//
//   host 0, 2 ranks   |------ 0 ------|------ 1 ------|
//   host 1, 3 ranks   |--- 0 ---|--- 1 ---|--- 2 ---|          messages 0-0 0-1 1-1 1-2
#pragma once

#include <string>
#include <vector>

#include "../op/chunk.h"

namespace pycomm {

struct Placement {
  std::vector<int> host_of, local_of;   // by rank
  std::vector<std::vector<int>> ranks;  // by host, ascending
  std::vector<std::string> names;       // by host

  // From what ranks say of their hosts, and what people call these. Equal names get a number.
  static Placement of(const std::vector<std::string>& hosts, const std::vector<std::string>& labels);
  int hosts() const { return static_cast<int>(ranks.size()); }
  int size_of(int host) const { return static_cast<int>(ranks[host].size()); }
  int world_size() const { return static_cast<int>(host_of.size()); }
  int largest() const;  // ranks of the largest host
  std::string name(int rank) const;  // "rank 5 (host1)"
  std::string describe() const;  // "2 hosts x 4", "hosts of 3 + 5"
};

// A piece of a cut buffer that the local rank `peer` of another host has in its slice.
struct Crossing {
  int peer;
  Range range;
};
// The slice [own.begin, own.end) of `count` elements against the slices of a host with `ranks` ranks.
std::vector<Crossing> crossings(Range own, size_t count, int ranks, size_t item);

}  // namespace pycomm
