// nccl_side.h -- CUDA tensors of a group that spans hosts. They go whole to an engine that exists, torch's
// ProcessGroupNCCL as a c10d::Backend; names, checks, limits and errors stay pycomm's.
//
//   call     -> checked on this rank (tensors.h, nccl_calls.h)
//            -> a number in the group's order, and its header on the way to all ranks, by the CPU side of the
//               group (hosts/agree.h): `Checks` says who waits for that
//            -> NCCL, in a stream of its own between two of the caller's
//   watch    a thread asks NCCL and the group every few milliseconds: what has ended lets go of its tensors;
//            an error, a limit or a broken group ends NCCL (abort), and all that is under way, in one
//            sentence, on all ranks
//
// NCCL ends the process over errors and limits by default; it is made so that it does neither
// (pycomm/hosts/nccl_engine.py), and its own limit is years.
//
// [Note: headers beside NCCL] A header before every operation would hold up the host for one latency of the
// engine, 0.1 to 0.3 ms, where NCCL takes 0.02. So by default headers go beside: the host does not wait. A
// mismatch is then found while NCCL may be in it already. So it breaks the group, on all ranks, with the
// sentence that says who differs. With Checks::before the group goes on after a mismatch, as on the CPU.
// Headers also name who did not come when a limit passes.
//
// Messages are not compared. Nor are operations of a captured graph when it is replayed.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "../cuda/prepare.h"
#include "../hosts/placement.h"
#include "tensors.h"

namespace pycomm {

// Where the ranks of a group are, and a word that no other group has.
struct NcclPlace {
  Placement placement;
  std::string attempt;
};

// Collective: makes the engine. `look` throws what ends it meanwhile. Throws what is the matter, as
// std::exception, on all ranks the same.
struct NcclRequest {
  const NcclPlace& place;
  int rank, device;
  double timeout;  // seconds
  std::function<void()> look;
};
using MakeNccl = std::function<c10::intrusive_ptr<c10d::Backend>(const NcclRequest&)>;

enum class Checks { before, beside, off };  // when calls are compared

class NcclWork;

class NcclSide final : public DeviceSide {
 public:
  // An empty `make`: there is no way.
  NcclSide(Communicator& comm, NcclPlace place, MakeNccl make, Checks checks);
  ~NcclSide() override;
  // Null: the group is on one host.
  static NcclSide* of(Communicator& comm) {
    return comm.hosts_side() ? static_cast<NcclSide*>(comm.device_side()) : nullptr;
  }

  // As on one host (device.h).
  cuda::DeviceWorkPtr issue(Request request, bool async_op);
  cuda::DeviceWorkPtr send(const at::Tensor& dense, const MessageOptions& options, bool async_op);
  cuda::DeviceWorkPtr recv(const at::Tensor& dense, const at::Tensor& target, const MessageOptions& options,
                           bool async_op);
  // Blocks the host until what is in the current stream has run; nothing to do where no engine was made.
  void drain(double timeout);
  // What is issued in between starts as one (ncclGroupStart), at the end. By one thread.
  void start_batch(c10::Device device);
  void end_batch();
  bool in_batch() const { return batch_open_; }

  void close() override;
  bool on_own_thread() const override { return thread_.get_id() == std::this_thread::get_id(); }

 private:
  friend class NcclWork;
  using WorkPtr = std::shared_ptr<NcclWork>;
  using Clock = std::chrono::steady_clock;

  // With issuing_ held:
  c10d::Backend& engine(c10::Device device);
  void make_engine(c10::Device device);
  void compare(NcclWork& work, const Op& op);
  template <class Start>
  void start(const WorkPtr& work, const Start& start);
  void follow(const WorkPtr& work);

  // Breaks the group. mark(): without the throw.
  void mark(ErrorKind kind, const OpInfo& op, int peer, const std::string& text);
  [[noreturn]] void fail(ErrorKind kind, const OpInfo& op, int peer, const std::string& text);
  void watch();
  bool look_at(NcclWork& work);  // true: it has ended, and is settled
  bool look_at_end(NcclWork& work);
  void look_at_limit(NcclWork& work);
  void abort_engine();
  bool drained(Clock::time_point limit);
  double limit_of(double timeout) const { return timeout > 0 ? timeout : comm_.transport().timeout(); }
  std::string self() const { return place_.placement.name(comm_.rank()); }

  Communicator& comm_;
  const NcclPlace place_;
  const MakeNccl make_;
  const Checks checks_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10::Device device_{c10::kCUDA, 0};
  std::mutex issuing_;  // the order of numbers is the order of NCCL's
  uint64_t unchecked_ = 0;  // numbers where nothing is compared
  uint64_t messages_ = 0;
  const std::shared_ptr<std::atomic<int>> comparing_ = std::make_shared<std::atomic<int>>(0);
  bool batch_open_ = false;
  std::vector<WorkPtr> batch_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::list<WorkPtr> pending_;
  bool stop_ = false;
  std::atomic<bool> aborted_{false};
  std::thread thread_;
};

}  // namespace pycomm
