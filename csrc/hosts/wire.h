// wire.h -- what carries bytes between the ranks of a group on different hosts: the four calls that an engine
// must offer (send, recv, wait, nudge). Engines: Gloo's point-to-point calls, as every torch has them
// (torch/c10d_wire.h); threads of one process, for tests (loop_wire.h).
//
// Messages of one tag from one rank to another arrive in the order of sending. A message and its receive have
// the same size: the engine may end the process over a difference, so sizes are agreed on before (agree.h).
// All calls are safe from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace pycomm {

// The engine has lost a peer; it says what it saw.
struct WireError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A message under way. Its end lets go of the memory, whatever has become of the message.
class Ticket {
 public:
  virtual ~Ticket() = default;
  // Blocks until the message is there (sent: its memory may be written again). False: nudged, it may be there
  // or not; call again. Throws WireError. One thread at a time.
  virtual bool wait() = 0;
  virtual void nudge() = 0;  // the wait() under way, or the next, returns; from any thread
};
using TicketPtr = std::unique_ptr<Ticket>;

class Wire {
 public:
  virtual ~Wire() = default;
  // The memory stays valid until the ticket ends. nbytes > 0. Throw WireError.
  virtual TicketPtr send(int dst, uint32_t tag, const std::byte* data, size_t nbytes) = 0;
  virtual TicketPtr recv(int src, uint32_t tag, std::byte* data, size_t nbytes) = 0;
};

class Communicator;
struct Shrunk {
  std::shared_ptr<Communicator> comm;
  std::vector<int> ranks;  // in the old group, by rank in the new one
};

// How a group that has lost ranks goes on with those that are left (pycomm/survivors/).
class Continuation {
 public:
  virtual ~Continuation() = default;
  // As shrink() in torch/shrink.h.
  virtual Shrunk shrink(const std::shared_ptr<Communicator>& comm, const std::vector<int>& exclude,
                        bool exactly, double timeout) = 0;
  virtual void leave() = 0;  // this rank has closed the group
};

// Of one rank of a group: over all ranks, and over the leaders of the hosts (null on the others), where a
// host's index is the rank. `after`: null where the engine has none.
struct Wires {
  std::shared_ptr<Wire> data, control;
  std::shared_ptr<Continuation> after = nullptr;
};

}  // namespace pycomm
