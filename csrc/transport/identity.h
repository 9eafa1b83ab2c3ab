// identity.h -- who this rank is in its group, and the errors that it raises.
#pragma once

#include <string>
#include <vector>

#include "../error.h"

namespace pycomm {

// The group of which the ranks on this host are a part (hosts/join.h). Users know ranks by their numbers in
// it; everything else here counts the ranks of the host.
struct Whole {
  int world_size = 0;
  std::vector<int> ranks;  // of this host, ascending
  std::string host;  // its name
};

struct Identity {
  std::string group;
  int rank = 0;
  int world_size = 1;
  Whole whole;  // without ranks: this is all of the group

  bool part() const { return !whole.ranks.empty(); }
  int number(int peer) const { return part() && peer >= 0 ? whole.ranks[peer] : peer; }
  std::string name(int peer) const;  // "rank 5", or "rank 5 (host1)"
  std::string where(const OpInfo& op) const;  // "[rank 2/4] all_reduce #17: "
  // `peer` counts as `rank` does; the error and its text speak of numbers.
  [[noreturn]] void raise(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) const;
  CommError error_about(ErrorKind kind, const OpInfo& op, int number, const std::string& text) const;
};

}  // namespace pycomm
