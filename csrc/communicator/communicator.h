// communicator.h -- a group of ranks: its transport, the order of its operations, and who runs them.
//
// [Note: who runs an operation] Operations of one group run one after the other, in the order of issue. A
// synchronous call on an idle group runs in the caller's thread, without any hand-off. An asynchronous one is
// queued; the worker thread runs the queue, and a caller that waits runs it too while the worker is not at
// it. A small operation is published when it is issued (its data lie in shared memory, so peers can finish
// theirs) and usually finished by the caller in wait(): the worker is not even woken.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../op/op.h"
#include "../trace/counters.h"
#include "../trace/recorder.h"
#include "../transport/transport.h"
#include "lanes.h"
#include "work.h"

namespace pycomm {

class Communicator;
class Continuation;  // hosts/wire.h

// monitored_barrier.h, of a group that spans hosts: what the ranks of this host know of each rank, and of
// those that did not come (a bit each).
struct BarrierLine {
  std::atomic<uint64_t> calls, arrival, verdict, withdrawn;
};
struct BarrierBoard {
  BarrierLine* lines;
  std::atomic<uint64_t>* missing;
};

// One operation in the queue of a communicator. Subclasses say what it does (collectives/collectives.h).
class Task : public Work {
 public:
  explicit Task(Communicator& comm) : comm_(comm) {}
  void wait(double timeout = 0) override;
  bool poll() override;
  void help(bool nobody_waits = false) override;
  uint64_t sequence() const { return sequence_; }

 protected:
  virtual bool small() const = 0;  // publish() never blocks
  virtual void publish() = 0;  // make own data visible to peers
  virtual bool ready() const = 0;  // published, and finish() would not block
  virtual void finish(bool patient) = 0;  // wait for the peers, write the result
  // Published and not ready: throws if it never will be (a dead peer), or, `late` seconds after its issue if
  // that is not 0, names who is missing.
  virtual void look(double late) const = 0;
  virtual trace::Subject subject() const = 0;  // what it is, for who traces it

  Communicator& comm_;
  trace::Times times_;
  // Set by a waiter that runs the task: the waiter's limit in seconds (0: none) and when it ends. It replaces
  // the operation's own limit where the waiter waits for this very task, else it may only shorten it.
  double wait_timeout_ = 0;
  std::chrono::steady_clock::time_point wait_deadline_{};
  bool wait_is_own_ = false;

 private:
  friend class Communicator;
  std::atomic<bool> published_{false};
  uint64_t sequence_ = 0;
  std::shared_ptr<Task> self_;  // keeps an asynchronous task alive while it is queued
};

// Something that makes progress beside the queue (point-to-point messages).
class BackgroundProgress {
 public:
  virtual ~BackgroundProgress() = default;
  virtual bool progress() = 0;  // true: something moved
  virtual void look_at_peers() = 0;  // ends what nobody waits for and what cannot complete any more
  virtual bool wants_worker() const = 0;  // there is something that the worker may have to move
  virtual bool keen() const = 0;  // and it should look at every flag
  virtual bool owes() const = 0;  // peers wait for something that only progress() here can give them
  virtual void fail_all(std::exception_ptr error) = 0;  // ends everything unfinished
  virtual void leave() {}  // says to whom it concerns that this rank closes the group
  virtual bool on_own_thread() const { return false; }
  // Throws the error of a message that was complete on this rank before the error was found. Called before a
  // user's call begins, and after the group is closed.
  virtual void raise_deferred_error() = 0;
  // hold = true: calls of this thread do not raise such errors, until the next call with false.
  virtual void hold_deferred_errors(bool hold) = 0;
  // Messages that can no longer be received when this rank closes the group, as text.
  virtual std::vector<std::string> unreceived() = 0;
};

// The same on a device (cuda/group.h): made by the first operation on device memory.
class DeviceSide {
 public:
  virtual ~DeviceSide() = default;
  virtual void close() = 0;  // nothing of this rank runs on the device afterwards
  virtual bool on_own_thread() const = 0;  // is this a thread of the device side, in a callback?
};

// What a group does that spans hosts (hosts/across.h). Its Communicator counts all ranks, while the transport
// is that of this host's; a second Communicator on the same transport runs the operations inside the host.
class HostsSide {
 public:
  virtual ~HostsSide() = default;
  // One collective, in the order of the group, from the thread that runs it.
  virtual void run(const Op& op, const WaitScope& scope) = 0;
  virtual void leave() = 0;  // says to the other hosts that this rank closes the group
  virtual bool on_own_thread() const = 0;
  virtual std::string describe() const = 0;  // "2 hosts x 4"
  virtual Communicator& inside() = 0;  // the group of this host's ranks
  virtual int local(int rank) const = 0;  // its number in inside(), -1: it is on another host
  // `late` seconds were too many for whoever waits for this operation, which runs: throws who is missing, if
  // the hosts can tell.
  virtual void blame(const OpInfo& op, double late) = 0;
  virtual std::string name(int rank) const = 0;  // "rank 5 (host1)"
  virtual bool closed(int rank) const = 0;  // it has closed the group
  // Throws if the group is broken, or the leader of this host, who looks at all others, has died.
  virtual void look_at_lives(const OpInfo& op) = 0;
  virtual BarrierBoard barrier_board() = 0;
  virtual std::shared_ptr<Continuation> after() = 0;  // null: such a group cannot be shrunk
};

// The pipeline position of one lane; see collectives/pipeline.h.
struct LaneState {
  uint64_t steps = 0;  // done so far, the same on all ranks
  uint64_t drained = 0;  // what every peer must have drained before this rank may fill its staging again
};

class Communicator {
 public:
  // What runs a collective on the CPU to completion (collectives/collectives.h), for those below it.
  using RunOp = void (*)(Communicator&, Op);

  Communicator(std::shared_ptr<Transport> transport, RunOp run_op);
  // `rank` and `world_size`: where not the transport's (HostsSide).
  Communicator(std::shared_ptr<Transport> transport, RunOp run_op, int rank, int world_size);
  ~Communicator();
  Communicator(const Communicator&) = delete;

  Transport& transport() { return *transport_; }
  const Transport& transport() const { return *transport_; }
  const std::shared_ptr<Transport>& shared_transport() const { return transport_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  void run(Task& task);  // to completion; throws what the operation threw
  void run(Op op) { run_op_(*this, std::move(op)); }
  void issue(std::shared_ptr<Task> task);  // returns at once
  void wait(Task& task,
            double timeout = 0);  // seconds, 0: the operation's own; throws what the operation threw
  bool poll(Task& task);  // done()? finishes it on the way if that does not block
  void help(Task& task);  // wake the worker: nobody will wait for this one
  void help_queue();  // the same for all that is queued
  uint64_t next_sequence() const { return next_sequence_; }

  // Throws std::invalid_argument where op is malformed on this rank alone (op/validate.h).
  void refuse_malformed(const Op& op) const;

  void look_at_lives();  // throws where the group is broken, or a rank of it has died
  void abort(const std::string& reason);
  void close();
  // For users: closes the group, then throws all deferred errors as one. Returns a sentence about messages
  // that were never received (BackgroundProgress::unreceived), or nothing.
  std::string close_and_report();
  void raise_deferred_error() {
    if (background_) background_->raise_deferred_error();
  }
  bool on_worker_thread() const { return worker_id_.load() == std::this_thread::get_id(); }
  bool on_own_thread() const {
    return on_worker_thread() || (device_side_ && device_side_->on_own_thread()) ||
           (hosts_side_ && hosts_side_->on_own_thread()) || (background_ && background_->on_own_thread());
  }
  // Of this rank alone; `peer` is a rank of this group.
  [[noreturn]] void raise(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) const;

  void attach(std::unique_ptr<BackgroundProgress> progress);
  // This thread makes progress beside an operation, of whatever group, in which it waits. A callback that
  // runs now must not wait for that group: the operation would wait for it.
  static bool progress_inside_a_wait();
  BackgroundProgress* background() { return background_.get(); }
  void attach(std::unique_ptr<DeviceSide> side);
  DeviceSide* device_side() { return device_side_.get(); }
  void attach(std::unique_ptr<HostsSide> side);
  HostsSide* hosts_side() const { return hosts_side_.get(); }
  // While an operation of a group that spans hosts runs a part of itself here: that operation, for errors and
  // limits.
  void serve(const WaitScope* scope) { served_ = scope; }
  const WaitScope* served() const { return served_; }
  std::mutex& making_device_side() { return making_device_side_; }
  // The worker is there from now on and looks at what background() wants of it when its bell rings. Where the
  // system refuses a thread, whoever waits does the work; if nobody will, this throws.
  void lend_worker(bool nobody_waits);

  // What an operation takes that asks for no algorithm; automatic: the table in collectives/select.h. Set
  // before the first operation.
  Algorithm default_algorithm(OpKind kind) const { return default_algorithms_[static_cast<int>(kind)]; }
  void set_default_algorithm(OpKind kind, Algorithm algorithm) {
    default_algorithms_[static_cast<int>(kind)] = algorithm;
  }

  // What this rank has done in the group; on a device, where any thread counts, apart.
  trace::Counters& counters() { return counters_; }
  trace::Counters& device_counters() { return device_counters_; }
  trace::GroupName& traced_as() { return traced_as_; }

  LaneState& lane(int index) { return lanes_[index]; }
  // Runs body(0) ... body(count-1) at once on that many threads; rethrows the first error.
  void on_lanes(int count, const std::function<void(int)>& body) {
    if (count <= 1) body(0);
    else threading_->lanes.run(count, body);
  }

 private:
  void execute_head(std::unique_lock<std::mutex>& lock, bool patient);
  bool start_worker();
  void end_worker();
  std::exception_ptr closed_error() const;
  void wake_all();
  bool runnable() const { return help_wanted_ && !busy_ && !queue_.empty(); }
  void settle_debts();
  void look_at_head(std::unique_lock<std::mutex>& lock);
  void refuse_forked() const;
  bool runs_here() const { return busy_ && runner_ == std::this_thread::get_id(); }
  void refuse_nested() const;
  void worker_loop();
  void settle(Task& task, std::exception_ptr error);
  void begin_measuring(Task& task, bool blocks);
  void end_measuring(Task& task, bool failed);

  std::shared_ptr<Transport> transport_;
  const RunOp run_op_;
  const int rank_, world_size_;
  const WaitScope* served_ = nullptr;
  std::unique_ptr<BackgroundProgress> background_;
  std::unique_ptr<DeviceSide> device_side_;
  std::unique_ptr<HostsSide> hosts_side_;
  std::mutex making_device_side_;
  LaneState lanes_[max_lanes];
  Algorithm default_algorithms_[num_op_kinds] = {};
  trace::Counters counters_, device_counters_;
  trace::GroupName traced_as_;

  // On the heap, because a forked child must leave it alone: the copy may be locked, and counts a worker that
  // the child has not.
  struct Threading {
    std::mutex mutex;
    std::condition_variable changed;
    std::thread worker;
    Lanes lanes;
  };
  std::unique_ptr<Threading> threading_ = std::make_unique<Threading>();
  std::mutex& mutex_ = threading_->mutex;
  std::condition_variable& changed_ = threading_->changed;
  std::thread& worker_ = threading_->worker;

  std::deque<Task*> queue_;
  bool busy_ =
      false;  // somebody runs the head of the queue, or a synchronous call runs beside an empty queue
  std::thread::id runner_;  // who, while busy_
  bool help_wanted_ = false;  // the worker should run the queue
  bool stop_ = false;
  uint64_t next_sequence_ = 1;
  std::chrono::steady_clock::time_point next_look_{};  // of poll() at the peers' lives
  std::atomic<std::thread::id> worker_id_{};
  std::atomic<bool> has_worker_{false};
};

// Deleter for shared_ptr<Communicator>, for any thread.
void release_communicator(Communicator* comm);

}  // namespace pycomm
