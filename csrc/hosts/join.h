// join.h -- how a group of ranks on several hosts comes together.
//
//   1  the ranks have met in the store and know of each other on which host they are (transport/join.h)
//   2  the ranks of each host make a group of their own, in shared memory, under keys of this very try
//   3  the engine connects all ranks (make_wires), and the leaders once more
//   4  the records leave the store
//
// Whoever fails tells all ranks through the store; the engine's maker looks there, too.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "../transport/join.h"
#include "placement.h"
#include "wire.h"

namespace pycomm {

class Communicator;

// Collective: connects this rank to all others. `attempt` is a word that no other try has; `look` throws what
// ends the try meanwhile. Throws what is the matter, as std::exception.
struct WireRequest {
  const Placement& placement;
  int rank;
  std::string group, attempt;
  double timeout;  // seconds
  std::function<void()> look;
};
// What make_wires() throws where it is known that another rank has died or failed.
struct RankLost : std::runtime_error {
  RankLost(int rank, const std::string& text) : std::runtime_error(text), rank(rank) {}
  int rank;
};
using MakeWires = std::function<Wires(const WireRequest&)>;

std::shared_ptr<Communicator> join_hosts(Joining& joining, Store& store, const TransportOptions& options,
                                         const MakeWires& make_wires);

}  // namespace pycomm
