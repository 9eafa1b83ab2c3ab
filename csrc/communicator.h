// communicator.h -- a group of ranks: its transport, the order of its operations, and who runs them.
//
// [Note: who runs an operation] Operations of one group run one after the other, in the order of issue. A synchronous call on an idle
// group runs in the caller's thread, without any hand-off. An asynchronous one is queued; the worker thread runs the queue,
// and a caller that waits runs it too while the worker is not at it. A small operation is published when it is issued (its data
// lie in shared memory, so peers can finish theirs) and usually finished by the caller in wait(): the worker is not even woken.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "transport/transport.h"
#include "work.h"

namespace pycomm {

class Communicator;

// One operation in the queue of a communicator. Subclasses say what it does (collectives/collectives.h).
class Task : public Work {
 public:
  explicit Task(Communicator& comm) : comm_(comm) {}
  void wait(double timeout = 0) override;
  bool poll() override;
  void help(bool nobody_waits = false) override;
  uint64_t sequence() const { return sequence_; }

 protected:
  virtual bool small() const = 0;              // publish() never blocks
  virtual void publish() = 0;                  // make own data visible to peers
  virtual bool ready() const = 0;              // published, and finish() would not block
  virtual void finish(bool patient) = 0;       // wait for the peers, write the result
  // Published and not ready: throws if it never will be (a dead peer), or, `late` seconds after its issue if that is not 0, names who is
  // missing.
  virtual void look(double late) const = 0;

  Communicator& comm_;
  double wait_timeout_ = 0;                    // seconds, set by a waiter that runs the task itself; 0: none

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
  virtual bool progress() = 0;             // true: something moved
  virtual bool wants_worker() const = 0;   // unfinished messages that need this rank's help
  virtual bool owes() const = 0;           // peers wait for something that only progress() here can give them
  virtual void fail_all(std::exception_ptr error) = 0;  // ends everything unfinished
};

// The same on a device (cuda/group.h): made by the first operation on device memory.
class DeviceEngine {
 public:
  virtual ~DeviceEngine() = default;
  virtual void close() = 0;  // nothing of this rank runs on the device afterwards
  virtual bool on_own_thread() const = 0;  // is this a thread of the engine's, in a callback?
};

// The pipeline position of one lane; see collectives/pipeline.h.
struct LaneState {
  uint64_t steps = 0;        // done so far, the same on all ranks
  uint64_t drained = 0;      // what every peer must have drained before this rank may fill its staging again
};

class Communicator {
 public:
  Communicator(std::unique_ptr<Transport> transport);
  ~Communicator();
  Communicator(const Communicator&) = delete;

  Transport& transport() { return *transport_; }
  const Transport& transport() const { return *transport_; }
  int rank() const { return transport_->rank(); }
  int world_size() const { return transport_->world_size(); }

  void run(Task& task);                        // to completion; throws what the operation threw
  void issue(std::shared_ptr<Task> task);      // returns at once
  void wait(Task& task, double timeout = 0);   // seconds, 0: the operation's own; throws what the operation threw
  bool poll(Task& task);                       // done()? finishes it on the way if that does not block
  void help(Task& task);                       // wake the worker: nobody will wait for this one
  uint64_t next_sequence() const { return next_sequence_; }

  void abort(const std::string& reason);
  void close();
  bool on_worker_thread() const { return worker_.get_id() == std::this_thread::get_id(); }
  bool on_own_thread() const { return on_worker_thread() || (device_engine_ && device_engine_->on_own_thread()); }

  void attach(std::unique_ptr<BackgroundProgress> progress);
  BackgroundProgress* background() { return background_.get(); }
  void attach(std::unique_ptr<DeviceEngine> engine);
  DeviceEngine* device_engine() { return device_engine_.get(); }
  std::mutex& making_device_engine() { return making_device_engine_; }
  void wake_worker();

  // What collectives/select.h is to take for an operation that asks for no algorithm; 0: its table. Set before the first operation.
  uint8_t default_algorithm(OpKind kind) const { return default_algorithms_[static_cast<int>(kind)]; }
  void set_default_algorithm(OpKind kind, uint8_t algorithm) { default_algorithms_[static_cast<int>(kind)] = algorithm; }

  LaneState& lane(int index) { return lanes_[index]; }
  // Runs body(0) ... body(count-1) at once on that many threads; rethrows the first error.
  void on_lanes(int count, const std::function<void(int)>& body);

 private:
  void execute_head(std::unique_lock<std::mutex>& lock, bool patient);
  void start_worker();
  void end_worker();
  void settle_debts();
  void look_at_head(std::unique_lock<std::mutex>& lock);
  void refuse_forked() const;
  void worker_loop();
  static void settle(Task& task, std::exception_ptr error);

  std::unique_ptr<Transport> transport_;
  std::unique_ptr<BackgroundProgress> background_;
  std::unique_ptr<DeviceEngine> device_engine_;
  std::mutex making_device_engine_;
  LaneState lanes_[max_lanes];
  uint8_t default_algorithms_[16] = {};

  // On the heap, because a forked child must leave it alone: the copy may be locked, and counts a worker that the child has not.
  struct Threading {
    std::mutex mutex;
    std::condition_variable changed;
    std::thread worker;
  };
  std::unique_ptr<Threading> threading_ = std::make_unique<Threading>();
  std::mutex& mutex_ = threading_->mutex;
  std::condition_variable& changed_ = threading_->changed;
  std::thread& worker_ = threading_->worker;

  std::deque<Task*> queue_;
  bool busy_ = false;            // somebody runs the head of the queue, or a synchronous call runs beside an empty queue
  bool help_wanted_ = false;     // the worker should run the queue
  bool stop_ = false;
  uint64_t next_sequence_ = 1;
  std::chrono::steady_clock::time_point next_look_{};  // of poll() at the peers' lives
  std::atomic<bool> worker_asleep_{false};
};

// Deleter for shared_ptr<Communicator>, for any thread.
void release_communicator(Communicator* comm);

}  // namespace pycomm
