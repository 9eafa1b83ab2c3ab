// ucx_worker.h -- a worker of UCX for the tickets of a wire (ucx_wire.h), and the threads that wait for them.
//
// Tags: UCX's have 64 bits and are matched over all senders; the sender's rank is above our 32.
//
// Who moves the bytes. A UCX worker moves only while somebody calls its progress(), and it owes its peers
// answers even where its own rank waits for nothing (acknowledgements, the parts of a long message that did
// not fit into a socket). So:
//
//   waiter   drives, unless another does: progress() until its ticket is done, a short spin where cores are
//            free, then poll() on the worker's descriptor. One wake-up of the scheduler per message, not two
//   waiter   beside a driver: sleeps on its ticket's condition; whoever drives wakes it
//   pump     the wire's own thread: drives while no waiter does, asleep in epoll
//
//   no waiter        a waiter drives              it has waited for `long_wait`
//   pump in epoll -> pump's entry is disabled  -> enabled again; the waiter sleeps like all others
//
// The entry is EPOLLONESHOT: to take over from the pump and to give back cost one system call each, and
// wake nobody. A descriptor tells of events only after worker_arm(), which refuses while some are left: who
// stops driving makes progress until it succeeds. The one lock serialises all calls of UCX.
//
// Ends. nudge() sets a flag; a driver that polls is fetched by an eventfd. Time limits and aborts are those
// of whoever nudges (ticker.h).
//
// A dead peer. Endpoints have UCX's error handling: an ended connection calls back, and from then on all
// tickets with that peer end in WireError, but those whose message is there already. UCX ties no receive to a
// peer: they are cancelled here. A lost link is found by the speakers, as over Gloo.
//
// Memory. A ticket that ends unfinished is cancelled; where UCX refuses (a long message under way), the
// endpoint is closed by force, which ends all that it had under way. So a broken operation costs the
// connection, and a group is broken then anyway.
//
// Fork: the child has no pump and must not touch UCX; Across leaks its wires there.
//
// What lost: a thread that alone makes progress, as Gloo has it (two wake-ups per message); waiters alone
// (a peer would wait for the end of this rank's computation); UCX's thread mode "multi" (its lock is ours,
// and a waiter would need one more to sleep); its listener and client-server connections (one address for all
// devices, no IB without IP).
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ucx_wire.h"

namespace pycomm {

class UcxTicket;

// What the tickets share with their wire, which may end before them.
class UcxWorker {
 public:
  UcxWorker(std::shared_ptr<UcxContext> context, int rank, int world_size, int spins);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;

  std::string address();
  void connect(int peer, const std::string& address);
  TicketPtr send(const std::shared_ptr<UcxWorker>& self, int dst, uint32_t tag, const std::byte* data,
                 size_t nbytes);
  TicketPtr recv(const std::shared_ptr<UcxWorker>& self, int src, uint32_t tag, std::byte* data,
                 size_t nbytes);
  bool done(const Ticket& ticket);  // without waiting; throws WireError
  void end();  // closes all connections; every ticket ends

 private:
  friend class UcxTicket;
  using Lock = std::unique_lock<std::mutex>;
  struct Peer {
    UcxWorker* worker = nullptr;
    ucx::Endpoint* endpoint = nullptr;
    bool lost = false;
    std::string why;
  };

  static void on_error(void* peer, ucx::Endpoint*, ucx::Status status);
  static void on_sent(void* request, ucx::Status status, void* ticket);
  static void on_received(void* request, ucx::Status status, const ucx::TagInfo* info, void* ticket);
  static void on_ended(void* request, ucx::Status status, void* worker);

  // All with the lock held.
  void post(UcxTicket& ticket, void* result);
  void finish(UcxTicket& ticket, std::string error);
  void wake(UcxTicket& ticket);
  bool ended(const UcxTicket& ticket) const;
  void wait(UcxTicket& ticket, Lock& lock);
  void drive(UcxTicket& ticket, Lock& lock);
  bool sleep_until_event(Lock& lock);  // false: long_wait has passed
  bool progress(Lock& lock);  // gives others the lock in between
  template <class Done>
  void progress_until(const Done& done, std::chrono::milliseconds limit, Lock& lock);
  void enable_pump();
  void withdraw(UcxTicket& ticket, Lock& lock);
  void fail(Peer& peer, const std::string& why);
  void close(Peer& peer);
  void spoil();  // UCX keeps what it should have ended, which has never been seen: it is not called again

  void set_entry(uint32_t events);
  void pump();
  void release();

  const std::shared_ptr<UcxContext> context_;
  const ucx::Library& library_;
  const int rank_, spins_;
  std::vector<Peer> peers_;
  ucx::Worker* worker_ = nullptr;
  int descriptor_ = -1;  // the worker's own
  int epoll_ = -1, wake_pump_ = -1, wake_driver_ = -1;  // ours
  std::mutex mutex_;
  std::vector<UcxTicket*> pending_;
  const UcxTicket* driver_ = nullptr;
  bool polling_ = false;  // the driver is in poll()
  int ending_ = 0;  // flushes and closes under way
  bool stop_ = false, over_ = false, spoiled_ = false;
  std::thread thread_;
};

}  // namespace pycomm
