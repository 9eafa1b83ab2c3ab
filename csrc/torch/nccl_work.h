// nccl_work.h -- an operation of NCCL's under way (nccl_side.h).
#pragma once

#include <c10/core/Event.h>

#include <memory>

#include "nccl_side.h"

namespace pycomm {

// How the comparison of the headers of an operation went. Outlives whoever asked for it.
struct Comparison {
  std::exception_ptr error;  // set before `done`
  std::atomic<bool> done{false};
};

class NcclWork final : public cuda::DeviceWork {
 public:
  NcclWork(NcclSide& side, OpInfo info, c10::Device device, double timeout);

  void wait(double timeout = 0) override;
  bool poll() override { return done(); }
  void help(bool) override {}  // the watching thread completes it
  void order(cuda::Stream stream) override;
  const OpInfo& info() const override { return info_; }
  cuda::Device device() const override { return device_.index(); }

 private:
  friend class NcclSide;
  using Clock = std::chrono::steady_clock;

  void order_current();
  bool ended() const;  // on the device, or by an error
  bool
  passed();  // the device uses none of the tensors any more, nor will it ([Note: memory behind an error])
  std::shared_ptr<c10::Event> mark_behind(const std::function<void()>& then) const;
  void complete(std::exception_ptr error) {
    if (!completed_.exchange(true)) settle(std::move(error));
  }
  void release() override { let_go(keep_, copy_back_); }

  NcclSide& side_;
  OpInfo info_;
  const c10::Device device_;
  const double timeout_;
  const Clock::time_point began_ = Clock::now();
  c10::intrusive_ptr<c10d::Work> running_;  // null until its batch ends
  std::shared_ptr<c10::Event> copied_;  // the end, where results are copied after NCCL; else null
  std::shared_ptr<c10::Event> passed_;  // the end, of a work that failed; of who watches
  std::atomic<bool> completed_{false};
  std::shared_ptr<Comparison> comparison_;  // null: not compared
  bool captured_ = false;
  Clock::time_point over_since_{};  // when it was first seen to have failed
  Tensors keep_;
  CopyBack copy_back_;
};

}  // namespace pycomm
