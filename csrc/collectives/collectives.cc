// collectives.cc -- see collectives.h.
#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../op/validate.h"
#include "send_recv.h"
#include "visit.h"

namespace pycomm {

namespace {

// The route depends on the hand-off above this size, where an occasional measurement of 100 us is cheap.
constexpr size_t worth_measuring = 12 << 10;

// The size that select() speaks of; equal on all ranks except for all_to_all with splits.
size_t table_bytes(const Op& op) {
  size_t count = op.count;
  if (op.uneven)
    for (const auto* parts : {&op.in_parts, &op.out_parts})
      for (const Part& part : *parts) count = std::max(count, part.count);
  return count * size_of(op.dtype);
}

}  // namespace

CollectiveTask::CollectiveTask(Communicator& comm, Op op) : Task(comm), op_(std::move(op)) {
  const Algorithm wished = comm.default_algorithm(op_.kind);  // may be for CUDA tensors only
  if (op_.algorithm == Algorithm::automatic && has_algorithm(op_.kind, wished)) op_.algorithm = wished;
  comm.refuse_malformed(op_);
  if (!has_algorithm(op_.kind, op_.algorithm))
    throw std::invalid_argument(comm.transport().where({op_.kind, 0}) + "there is no algorithm " +
                                to_string(op_.algorithm) + " for this operation");
  if (!op_.on_device) separate_overlap();
  if (comm.hosts_side()) {
    route_ = Route::across;
    return;
  }
  size_t per_part = table_bytes(op_);
  if (op_.kind == OpKind::all_to_all && op_.uneven)
    per_part = slot_payload_bytes + 1;  // sizes are known pairwise only: look at tables first
  const bool asked_otherwise = op_.algorithm != Algorithm::automatic;
  route_ =
      op_.kind == OpKind::barrier || (!asked_otherwise && fits_payload(op_.kind, per_part, comm.world_size()))
          ? Route::payload
          : Route::by_choice;
}

void CollectiveTask::separate_overlap() {
  const size_t item = size_of(op_.dtype);
  const size_t own = op_.own_count(comm_.rank()) * item;
  const auto [copy_single, copy_parts] = find_overlap(op_, comm_.rank());
  if (copy_single) {
    copy_.assign(op_.in, op_.in + own);
    op_.in = copy_.data();
  }
  if (copy_parts) {
    size_t total = 0;
    for (const Part& part : op_.in_parts) total += part.count * item;
    copy_.resize(total);
    std::byte* to = copy_.data();
    for (Part& part : op_.in_parts) {
      if (part.count) std::memcpy(to, part.data, part.count * item);
      part.data = to;
      to += part.count * item;
    }
  }
}

void CollectiveTask::publish() {
  if (!comm_.served()) comm_.transport().note_operation({op_.kind, sequence()});
  if (route_ == Route::across) return;
  call_.emplace(comm_, op_, sequence());
  if (times_.measured()) call_->times = &times_;
  if (measures_hand_off()) comm_.transport().hand_off().before(sequence());
  call_->publish(route_ == Route::payload, route_ == Route::by_choice && may_go_by_kernel());
}

void CollectiveTask::finish(bool patient) {
  try {
    if (route_ == Route::across) run_across(patient);
    else complete(patient);
    if (!comm_.served()) comm_.transport().note_completed({op_.kind, sequence()});
    comm_.counters().count(op_.kind, op_.total_bytes(comm_.world_size()));
  } catch (const CommError&) {
    if (call_) await_visitors(*call_);
    comm_.transport().note_operation({});
    throw;
  } catch (const std::exception& error) {  // of this rank alone (memory): its peers would wait for it
    comm_.transport().note_operation({});
    end_group(error.what());
    if (call_) await_visitors(*call_);
    throw;
  }
}

trace::Subject CollectiveTask::subject() const {
  return {op_.kind, op_.total_bytes(comm_.world_size()), sequence(), static_cast<uint8_t>(chosen_)};
}

// Returns when the group is broken, by this or by another reason.
void CollectiveTask::end_group(const char* reason) const {
  try {
    comm_.transport().fail(ErrorKind::aborted, {op_.kind, sequence()}, comm_.transport().rank(),
                           comm_.transport().name(comm_.transport().rank()) + " failed in it: " + reason);
  } catch (const std::exception&) {  // what it raises here; the caller raises its own
  }
}

void CollectiveTask::complete(bool patient) {
  Call& call = *call_;
  call.scope.patient |= patient;
  limit(call.scope);
  try {
    const Choice choice = route_ == Route::payload ? Choice{Algorithm::one_shot, 0, ""} : choose();
    if (!call.mixed()) {
      chosen_ = choice.algorithm;
      return move(choice);
    }
  } catch (const MixedSizes&) {
    op_.uneven = true;
  }
  move_mixed();
}

// [Note: sizes on some ranks] in call.h.
void CollectiveTask::move_mixed() {
  route_ = Route::by_choice;
  const Choice choice = select(op_.kind, call_->longest_pair(), situation(false), Algorithm::staged);
  chosen_ = choice.algorithm;
  for (int lane = 0; lane < max_lanes; ++lane) ++comm_.lane(lane).steps;
  move(choice);
}

void CollectiveTask::move(const Choice& choice) {
  Call& call = *call_;
  switch (op_.kind) {
    case OpKind::all_reduce: return all_reduce(call, choice, route_);
    case OpKind::reduce: return reduce_to_root(call, choice, route_);
    case OpKind::broadcast: return broadcast(call, choice, route_);
    case OpKind::all_gather: return all_gather(call, choice, route_);
    case OpKind::reduce_scatter: return reduce_scatter(call, choice, route_);
    case OpKind::all_to_all:
      if (op_.receiver) make_room();
      return all_to_all(call, choice, route_);
    case OpKind::gather: return gather(call, choice, route_);
    case OpKind::scatter: return scatter(call, choice, route_);
    case OpKind::barrier: return call.match();
    default: throw std::logic_error("pycomm: unknown collective");
  }
}

// By the waiter that runs it.
void CollectiveTask::limit(WaitScope& scope) const {
  if (wait_timeout_ <= 0 || (!wait_is_own_ && wait_deadline_ >= scope.deadline)) return;
  scope.timeout = wait_timeout_;
  scope.deadline = wait_deadline_;
}

void CollectiveTask::run_across(bool patient) {
  WaitScope scope =
      scope_of({op_.kind, sequence()}, op_.timeout > 0 ? op_.timeout : comm_.transport().timeout());
  scope.patient = patient;
  limit(scope);
  if (times_.measured()) times_.begun = trace::now_ns();
  comm_.transport().check(scope.op);
  comm_.hosts_side()->run(op_, scope);
}

void CollectiveTask::make_room() {
  call_->match();
  for (int p = 0; p < comm_.world_size(); ++p) {
    const size_t count = call_->sent(p, comm_.rank()) / size_of(op_.dtype);
    op_.out_parts.push_back({op_.receiver->room(p, count), count});
  }
}

void CollectiveTask::look(double late) const {
  if (route_ == Route::across) {
    comm_.transport().check({op_.kind, sequence()});
    if (late > 0) comm_.hosts_side()->blame({op_.kind, sequence()}, late);
    return;
  }
  const Call& call = *call_;
  WaitScope scope{{op_.kind, sequence()},
                  late > 0 ? std::chrono::steady_clock::now() : call.scope.deadline,
                  late > 0 ? late : call.scope.timeout};
  comm_.transport().look(0, comm_.world_size(), [&call](int p) { return call.published(p); }, scope);
}

Situation CollectiveTask::situation(bool mapped) const {
  const Transport& transport = comm_.transport();
  return {comm_.world_size(),
          transport.cores(),
          transport.hand_off().kernel_ahead(sequence()),
          mapped,
          transport.reach() == Transport::Reach::kernel,
          &tuned_table(transport)};
}

bool CollectiveTask::may_go_by_kernel() {
  if (comm_.transport().reach() == Transport::Reach::pointer) return false;  // all buffers are mapped
  planned_ = select(op_.kind, table_bytes(op_), situation(false), op_.algorithm);
  const bool any_size = op_.kind == OpKind::all_to_all && op_.uneven;
  return comm_.transport().reach() == Transport::Reach::kernel &&
         (any_size || planned_.algorithm == Algorithm::direct);
}

// All ranks get the same answer once their headers match. all_to_all never measures: headers of different
// sizes may match there.
bool CollectiveTask::measures_hand_off() const {
  return route_ == Route::by_choice && op_.kind != OpKind::all_to_all && !op_.uneven &&
         op_.total_bytes(comm_.world_size()) >= worth_measuring && comm_.transport().measures_hand_off();
}

// All ranks must choose alike. The choice rests on what is equal everywhere: size, world, reach, and, where
// this rank's own buffers would allow the mapped route, on the headers of all.
Choice CollectiveTask::choose() {
  Transport& transport = comm_.transport();
  if (measures_hand_off() && transport.hand_off().is_due(sequence())) {
    call_->match();
    transport.hand_off().measure(sequence(), call_->scope);
  }
  bool mapped = false;
  if (transport.reach() == Transport::Reach::pointer || call_->registered(comm_.rank())) {
    call_->match();
    mapped = call_->all_mapped();
  }
  const bool any_size = op_.kind == OpKind::all_to_all && op_.uneven;
  const size_t nbytes = any_size ? call_->longest_pair() : table_bytes(op_);
  Choice choice = planned_;
  if (mapped || any_size) choice = select(op_.kind, nbytes, situation(mapped), op_.algorithm);
  if (choice.algorithm == Algorithm::direct && !mapped && !kernel_serves())
    choice = select(
        op_.kind, nbytes,
        {comm_.world_size(), transport.cores(), transport.hand_off().kernel_ahead(sequence()), false, false});
  const bool rounds_each_hop =
      op_.dtype == DType::f16 || op_.dtype == DType::bf16 || op_.reduce_op == ReduceOp::premul_sum;
  if (choice.algorithm == Algorithm::ring && op_.reduces() && rounds_each_hop)
    choice.algorithm = op_.kind == OpKind::all_reduce ? Algorithm::two_shot : Algorithm::staged;
  return choice;
}

// Direct begins with the headers of all anyway.
bool CollectiveTask::kernel_serves() {
  if (comm_.transport().reach() == Transport::Reach::none) return false;
  call_->match();
  return call_->kernel_reaches_all();
}

void run(Communicator& comm, Op op) {
  CollectiveTask task(comm, std::move(op));
  comm.run(task);
}

std::shared_ptr<Communicator> make_communicator(std::unique_ptr<Transport> transport) {
  std::shared_ptr<Communicator> comm(new Communicator(std::move(transport), &run), release_communicator);
  comm->attach(std::make_unique<SendRecv>(*comm));
  return comm;
}

}  // namespace pycomm
