// visit.cc -- see visit.h.
#include "visit.h"

#include <chrono>
#include <thread>

namespace pycomm {

namespace {

constexpr auto patience_with_processes = std::chrono::milliseconds(200);

}  // namespace

Visit::Visit(const Call& call) : call_(call), visits_(call.transport.control(call.rank).visits) {
  visits_.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  try {
    look();
  } catch (...) {
    visits_.fetch_sub(1, std::memory_order_release);
    throw;
  }
}

void Visit::look() const {
  Transport& transport = call_.transport;
  transport.check(call_.scope.op);
  for (int p = 0; p < call_.world_size; ++p)
    if (p != call_.rank && transport.peer_closed(p))
      transport.fail(ErrorKind::peer, call_.scope.op, p,
                     transport.name(p) + " closed the group in the middle of this operation");
}

void Visit::finish() const {
  std::atomic_thread_fence(std::memory_order_acquire);  // the loads of the copy come before this look
  look();
}

void await_visitors(const Call& call) {
  Transport& transport = call.transport;
  const bool threads = transport.reach() == Transport::Reach::pointer;
  const auto end = std::chrono::steady_clock::now() + patience_with_processes;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int p = 0; p < call.world_size; ++p)
    while (p != call.rank && transport.control(p).visits.load(std::memory_order_acquire) != 0 &&
           (threads || (std::chrono::steady_clock::now() < end && transport.peer_alive(p))))
      std::this_thread::yield();
}

}  // namespace pycomm
