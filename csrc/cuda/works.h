// works.h -- the handles of operations on the device, and those of them that complete by themselves.
//
// Works takes the group's lock (lock.h) in what handles and callers use; take_ended() and take_all() expect
// it, since the watching thread holds it. A work completes outside of the lock: that runs callbacks.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "../communicator/work.h"
#include "faults.h"
#include "lock.h"

namespace pycomm::cuda {

class Works;

// The handle of an operation on a device, whoever runs it: kernels of ours, or NCCL between hosts
// (torch/nccl_side.h).
class DeviceWork : public Work {
 public:
  virtual const OpInfo& info() const = 0;
  virtual Device device() const = 0;
  virtual void order(Stream stream) = 0;  // orders any stream behind the operation
};
using DeviceWorkPtr = std::shared_ptr<DeviceWork>;

class CudaWork final : public DeviceWork {
 public:
  // `current` says which stream wait() is to order; `end`: the operation's end; `keep` owns what it uses.
  CudaWork(Works& works, OpInfo info, std::function<Stream()> current, Mark end, std::function<void()> keep)
      : works_(works),
        info_(info),
        current_(std::move(current)),
        end_(std::move(end)),
        keep_(std::move(keep)) {}

  // Orders the current stream behind the operation; with a timeout (seconds) blocks the host until it has
  // ended. Throws what is known of errors.
  void wait(double timeout = 0) override;
  bool poll() override;
  void help(bool) override {}  // the watching thread completes it
  void order(Stream stream) override;
  Device device() const override;
  // The operation has ended: lets go of what it used, then tells the callbacks. Only the first call counts.
  void complete(std::exception_ptr error);

  const OpInfo& info() const override { return info_; }
  const Mark& end() const { return end_; }
  Stream stream() const { return end_.stream; }
  bool captured() const { return end_.capture.active; }  // it runs when the graph is replayed

 private:
  Works& works_;
  const OpInfo info_;
  const std::function<Stream()> current_;
  const Mark end_;
  std::function<void()> keep_;
  std::atomic<bool> completed_{false};
};

using CudaWorkPtr = std::shared_ptr<CudaWork>;

class Works {
 public:
  Works(GroupLock& lock, const Setup& setup, const HostWords& words, Faults& faults)
      : lock_(lock), setup_(setup), words_(words), faults_(faults) {}
  Device device() const { return setup_.device; }

  struct Ended {
    CudaWorkPtr work;
    std::exception_ptr error;
    void complete() { work->complete(error); }
  };

  // --- with the group's lock held ---
  // The watching thread is to complete it.
  void watch(CudaWorkPtr work) { pending_.push_back(std::move(work)); }
  // Those of the watched that have ended; they are watched no longer.
  std::vector<Ended> take_ended();
  // All; those that have not ended fail, as the communicator is closed.
  std::vector<Ended> take_all();

  // --- these take it ---
  // Blocks the host until the device has come to the end of this work, `timeout` seconds and a margin at
  // most.
  void wait_for_end(CudaWork& work, double timeout);
  bool poll(CudaWork& work);
  void order(const CudaWork& work, Stream stream);
  void look_for_fault(const CudaWork& work);  // throws what is known
  [[noreturn]] void rethrow(const CudaWork& work);  // the error of a work that is done

 private:
  GroupLock& lock_;
  const Setup& setup_;
  const HostWords& words_;
  Faults& faults_;
  std::list<CudaWorkPtr> pending_;
};

}  // namespace pycomm::cuda
