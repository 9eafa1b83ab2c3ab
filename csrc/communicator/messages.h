// messages.h -- point-to-point messages as callers see them: send, recv, any source, tags. Within a host they
// go through shared memory (collectives/send_recv.h), in a group that spans hosts also over the wire
// (hosts/messages.h).
#pragma once

#include <memory>

#include "communicator.h"

namespace pycomm {

inline constexpr int any_source = -1;

// Who has a message for a recv that waits for one in two places: in the memory of this host and on the wire.
// The first to ask gets it; the other forgets the recv.
class Claim {
 public:
  enum class By : uint8_t { nobody, host, wire };
  bool take(By by) {
    By none = By::nobody;
    return by_.compare_exchange_strong(none, by, std::memory_order_acq_rel);
  }
  By by() const { return by_.load(std::memory_order_acquire); }

 private:
  std::atomic<By> by_{By::nobody};
};

// What the caller says about a message.
struct MessageSpec {
  DType dtype = DType::u8;
  size_t count = 0;
  int peer = 0;  // destination or source; any_source for a recv from whoever comes first
  int tag = 0;
  double timeout = 0;  // seconds, 0: the group's
  std::shared_ptr<Claim> claim{};  // of a recv that waits on the wire, too

  size_t nbytes() const { return count * size_of(dtype); }
};

class MessageWork : public Work {
 public:
  virtual int source() const = 0;  // of a completed recv
};
using MessageWorkPtr = std::shared_ptr<MessageWork>;

class Messages : public BackgroundProgress {
 public:
  // Throw std::invalid_argument for a bad peer. `data` must stay valid until the message is done; `finalizer`
  // runs just before.
  virtual MessageWorkPtr send(const std::byte* data, const MessageSpec& spec,
                              std::function<void()> finalizer) = 0;
  virtual MessageWorkPtr recv(std::byte* data, const MessageSpec& spec, std::function<void()> finalizer) = 0;
};

// Those of a group that was made by make_communicator (collectives.h) or join_hosts (hosts/join.h).
inline Messages& messages_of(Communicator& comm) { return static_cast<Messages&>(*comm.background()); }

// Throws where the peer of a message is none.
inline void refuse_bad_peer(const Communicator& comm, OpKind kind, int peer) {
  const OpInfo info{kind, 0};
  const int n = comm.world_size();
  if (peer == comm.rank() || peer < (kind == OpKind::send ? 0 : any_source) || peer >= n)
    throw std::invalid_argument(comm.transport().where(info) + "peer rank " + std::to_string(peer) +
                                " must be another rank of the group, in [0, " + std::to_string(n) + ")");
  if (n == 1) throw std::invalid_argument(comm.transport().where(info) + "the group has no other rank");
}

}  // namespace pycomm
