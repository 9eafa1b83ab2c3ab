// collectives.h -- the entry to all collectives: validation, choice of the algorithm, and the task that the
// communicator runs.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "call.h"
#include "select.h"

namespace pycomm {

inline constexpr int max_world_size = 1024;

// One per file. The header has been published; each must call match() before it writes any result, and end
// with all its reads of peers' memory done.
void all_reduce(Call& call, const Choice& choice, Route route);
void reduce_to_root(Call& call, const Choice& choice, Route route);
void broadcast(Call& call, const Choice& choice, Route route);
void all_gather(Call& call, const Choice& choice, Route route);
void reduce_scatter(Call& call, const Choice& choice, Route route);
void all_to_all(Call& call, const Choice& choice, Route route);
void gather(Call& call, const Choice& choice, Route route);
void scatter(Call& call, const Choice& choice, Route route);

class CollectiveTask : public Task {
 public:
  // Throws std::invalid_argument when op is malformed on this rank alone.
  CollectiveTask(Communicator& comm, Op op);

  const Op& op() const { return op_; }

 protected:
  // All to all may need more of this rank than its header: see [Note: sizes on some ranks].
  bool small() const override { return route_ == Route::payload && op_.kind != OpKind::all_to_all; }
  void publish() override;
  bool ready() const override { return call_ && call_->headers_ready(); }
  void finish(bool patient) override;
  void look(double late) const override;
  trace::Subject subject() const override;

 private:
  void separate_overlap();
  Situation situation(bool mapped) const;
  bool may_go_by_kernel();  // as far as this rank knows alone
  bool measures_hand_off() const;
  Choice choose();
  bool kernel_serves();  // it can copy all buffers of this operation
  void complete(bool patient);
  void move(const Choice& choice);
  void move_mixed();
  void run_across(bool patient);
  void limit(WaitScope& scope) const;
  void end_group(const char* reason) const;
  void make_room();  // for what the peers send, where only they know how much

  Op op_;
  Route route_;
  Algorithm chosen_ = Algorithm::automatic;
  Choice planned_{};  // Route::by_choice: if no buffers are mapped and all sizes equal
  std::optional<Call> call_;
  std::vector<std::byte>
      copy_;  // of the input, where it overlaps the output in a way the algorithms do not allow
};

// Runs op to completion in the caller's thread (or behind what is queued).
void run(Communicator& comm, Op op);

// A group of ranks on one host, with point-to-point messages (send_recv.h).
std::shared_ptr<Communicator> make_communicator(std::unique_ptr<Transport> transport);

}  // namespace pycomm
