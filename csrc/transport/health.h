// health.h -- whether a group works: who is alive, why it is broken, and whether this rank has left it.
//
// [Note: who writes the reason] Whoever sees first that the group is broken writes why into its header, once.
// The word `broken` goes from 0 to the claim of a rank, which then writes the reason, and from there to
// `told`, with release order. A rank may die in between: others that want to write and find it dead take its
// claim over and write all of the reason anew. Nobody reads a reason before `told`.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../memory/life.h"
#include "group_memory.h"
#include "identity.h"
#include "process.h"

namespace pycomm {

// The locks by which the ranks of a group prove that they live. No life: they are threads of one process.
struct Lives {
  std::shared_ptr<Life> life;
  std::vector<int> bytes;  // by rank

  bool alive(int rank) const { return !life || life->held(bytes[rank]); }
};

// Why a group is broken, in a form that can go to another host.
struct Reason {
  ErrorKind kind = ErrorKind::none;
  OpInfo op;
  int number = -1;  // of the rank that it is about (Identity::number)
  std::string text;  // with who has seen it
};

class Health {
 public:
  Health(const Identity& identity, GroupMemory& memory, Lives lives);

  void check(const OpInfo& op) const;  // throws if the group is broken, closed or was carried over a fork
  [[noreturn]] void fail(ErrorKind kind, const OpInfo& op, int peer,
                         const std::string& text);  // breaks the group, then throws
  void abort(const std::string& reason);
  // As fail(), for an error that this rank raises itself.
  void mark_broken(ErrorKind kind, const OpInfo& op, int peer, const std::string& text);
  void mark_broken(const Reason& reason);  // as another host has found
  std::optional<Reason> reason() const;
  // Called before this rank raises why the group is broken, and before it ends a call of abort(): by the
  // thread that does, and not by two at once. Nothing: none from now on.
  void set_before_raising(std::function<void()> hook);
  std::string name(int peer) const { return identity_.name(peer); }
  std::string names(const std::vector<int>& peers) const;  // "ranks 2, 3"
  const Lives& lives() const { return lives_; }
  void set_lives(Lives lives) { lives_ = std::move(lives); }  // before the group is used
  bool close();  // this rank leaves, and says so; false: it had left already

  bool broken() const { return header_.broken.load(std::memory_order_acquire) == told; }
  bool closed() const { return closed_.load(std::memory_order_relaxed); }
  // This process is a forked child of the one that joined.
  bool forked() const { return fork_generation_ != fork_generation(); }
  bool peer_alive(int peer) const;
  bool peer_closed(int peer) const {
    return memory_.control(peer).state.load(std::memory_order_acquire) == RankState::closed;
  }

 private:
  static constexpr uint32_t told = 2;
  static uint32_t claim_of(int rank) { return 2 * static_cast<uint32_t>(rank) + 1; }
  static constexpr int elsewhere = -1;  // as reporter
  bool claim_reason();
  void write_reason(const Reason& reason, int reporter);
  [[noreturn]] void raise_broken(const OpInfo& op) const;
  void prepare_raising() const;

  const Identity& identity_;
  GroupMemory& memory_;
  GroupHeader& header_;
  Lives lives_;
  const uint64_t fork_generation_;
  std::atomic<bool> closed_{false};
  mutable std::mutex raising_;
  std::function<void()> before_raising_;  // with the lock `raising_`
};

}  // namespace pycomm
