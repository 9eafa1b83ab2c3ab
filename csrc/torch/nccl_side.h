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
// [Note: one thread in NCCL at a time] A communicator of NCCL's is for one thread, and abort frees it. So
// calls are made with the turn (Turn), and what ends the engine takes the turn first: whoever comes later is
// refused (Engine::ended). A thread may be stuck in a call of NCCL's, to which abort is the only way out: so
// the turn is waited for one second, not for ever. abort() and shutdown() themselves may hang: both run in a
// thread that is left behind then, with the engine (nccl_end.cc).
//
// [Note: memory behind an error] By an error a call of NCCL's is complete for torch, while its kernel may go
// on reading and writing. So tensors are let go of when the device has passed the operation, never because of
// an error. The caller hears of the error two seconds after the abort at the latest; what the device has not
// passed by then is held until it has, or for ever.
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

#include <c10/core/Event.h>

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
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
  bool on_own_thread() const override { return watcher_.load() == std::this_thread::get_id(); }

 private:
  friend class NcclWork;
  using WorkPtr = std::shared_ptr<NcclWork>;
  using Clock = std::chrono::steady_clock;

  static constexpr std::chrono::seconds until_stopped{2};  // for the device, after NCCL was aborted

  enum class Engine { none, made, ended };  // ended: closed or aborted, or about to be
  // The right to call NCCL, and the order of numbers ([Note: one thread in NCCL at a time]).
  class Turn {
   public:
    explicit Turn(NcclSide& side) : lock_(side.turn_), holder_(side.holder_) {
      holder_.store(std::this_thread::get_id());
    }
    ~Turn() { holder_.store({}); }

   private:
    std::lock_guard<std::timed_mutex> lock_;
    std::atomic<std::thread::id>& holder_;
  };
  // NCCL's call of an operation, from which this thread may not come back by itself: a first message connects
  // its two ranks. The watch knows of it.
  class Call {
   public:
    Call(NcclSide& side, const OpInfo& op, double timeout);
    ~Call();

   private:
    NcclSide& side_;
  };
  struct Calling {
    OpInfo op;
    double timeout;
    Clock::time_point since;
  };
  // Tensors that the device may still use.
  struct Held {
    std::shared_ptr<c10::Event> passed;  // null: not known when
    Tensors keep;
    CopyBack copy_back;
  };

  // With the turn:
  c10d::Backend& engine(c10::Device device);
  void make_engine(c10::Device device);
  void compare(NcclWork& work, const Op& op);
  template <class Start>
  void start(const WorkPtr& work, const Start& start);
  void follow(const WorkPtr& work);
  [[noreturn]] void end_unfollowed(const OpInfo& op, const WorkPtr* first, const WorkPtr* last);
  std::exception_ptr closed_error(const OpInfo& op) const;

  // Breaks the group. mark(): without the throw.
  void mark(ErrorKind kind, const OpInfo& op, int peer, const std::string& text);
  [[noreturn]] void fail(ErrorKind kind, const OpInfo& op, int peer, const std::string& text);
  void watch();
  bool look_at(NcclWork& work);  // true: it has ended, and is settled
  bool look_at_broken(NcclWork& work);  // in the handler of the error
  bool look_at_running(NcclWork& work);
  void look_at_call(const Calling& calling);
  bool look_at_end(NcclWork& work);
  void look_at_limit(NcclWork& work);
  bool drained(Clock::time_point limit);

  // nccl_end.cc:
  bool end_engine();  // nobody calls it from now on; false: there is none, or it has been ended
  void abort_engine();
  void shut_engine_down();
  void give_up(NcclWork& work, std::exception_ptr error);  // settles it and holds what the device may use
  // The same, when the device has stopped; at the limit, whether it has or not.
  void give_up_by(Clock::time_point limit, NcclWork& work, const std::exception_ptr& error);
  void let_go_of_held();
  double limit_of(double timeout) const { return timeout > 0 ? timeout : comm_.transport().timeout(); }
  std::string self() const { return place_.placement.name(comm_.rank()); }

  Communicator& comm_;
  const NcclPlace place_;
  const MakeNccl make_;
  const Checks checks_;
  c10::intrusive_ptr<c10d::Backend> backend_;  // set before engine_ is `made`
  c10::Device device_{c10::kCUDA, 0};
  std::atomic<Engine> engine_{Engine::none};
  std::timed_mutex turn_;
  std::atomic<std::thread::id> holder_{};  // of the turn
  uint64_t unchecked_ = 0;  // numbers where nothing is compared
  uint64_t messages_ = 0;
  const std::shared_ptr<std::atomic<int>> comparing_ = std::make_shared<std::atomic<int>>(0);
  bool batch_open_ = false;
  std::vector<WorkPtr> batch_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::list<WorkPtr> pending_;
  std::list<Held> held_;
  std::optional<Calling> calling_;
  bool stop_ = false;
  std::atomic<bool> aborted_{false};
  Clock::time_point stopped_by_{};  // after an abort the device should be, or what it uses is held
  std::atomic<std::thread::id> watcher_{};  // the id of thread_, once it runs
  std::thread thread_;
};

}  // namespace pycomm
