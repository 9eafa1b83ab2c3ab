// collectives.cc -- see collectives.h.
#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../reduce/reduce.h"
#include "send_recv.h"

namespace pycomm {

namespace {

// The size that select() speaks of; equal on all ranks except for all_to_all with splits.
size_t table_bytes(const Op& op) {
  size_t count = op.count;
  if (op.uneven)
    for (const auto* parts : {&op.in_parts, &op.out_parts})
      for (const Part& part : *parts) count = std::max(count, part.count);
  return count * size_of(op.dtype);
}

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return a_bytes && b_bytes && x < y + b_bytes && y < x + a_bytes;
}

}  // namespace

CollectiveTask::CollectiveTask(Communicator& comm, Op op) : Task(comm), op_(std::move(op)) {
  if (op_.algorithm == Algorithm::automatic) op_.algorithm = static_cast<Algorithm>(comm.default_algorithm(op_.kind));
  validate();
  separate_overlap();
  size_t per_part = table_bytes(op_);
  if (op_.kind == OpKind::all_to_all && op_.uneven)
    per_part = slot_payload_bytes + 1;  // sizes are known pairwise only: look at tables first
  const bool asked_otherwise = op_.algorithm != Algorithm::automatic;
  route_ = op_.kind == OpKind::barrier || (!asked_otherwise && fits_payload(op_.kind, per_part, comm.world_size())) ? Route::payload
                                                                                                                    : Route::by_choice;
}

void CollectiveTask::validate() {
  const int n = comm_.world_size();
  auto bad = [&](const std::string& text) { throw std::invalid_argument(comm_.transport().where({op_.kind, 0}) + text); };
  if (op_.root < 0 || op_.root >= n) bad("root=" + std::to_string(op_.root) + " is not in [0, " + std::to_string(n) + ")");
  if (op_.reduces() && !reduce_supported(op_.dtype, op_.reduce_op))
    bad(std::string("reduce op ") + to_string(op_.reduce_op) + " is not defined for dtype " + to_string(op_.dtype));
  if (!has_algorithm(op_.kind, op_.algorithm))
    bad(std::string("there is no algorithm ") + to_string(op_.algorithm) + " for this operation");
  for (const auto* parts : {&op_.in_parts, &op_.out_parts})
    if (!parts->empty() && parts->size() != static_cast<size_t>(n))
      bad("got a list of " + std::to_string(parts->size()) + " buffers for " + std::to_string(n) + " ranks");
  if (!op_.uneven)
    for (const auto* parts : {&op_.in_parts, &op_.out_parts})
      for (size_t p = 0; p < parts->size(); ++p)
        if ((*parts)[p].count != op_.count)
          bad("buffer " + std::to_string(p) + " of the list has " + std::to_string((*parts)[p].count) + " elements, expected " +
              std::to_string(op_.count));
}

// Allowed as they are: out == in (all_reduce, reduce, broadcast), the own part of a list == the single buffer.
void CollectiveTask::separate_overlap() {
  const size_t item = size_of(op_.dtype);
  const int rank = comm_.rank();
  const size_t own = op_.own_count(rank) * item;
  bool copy_single = false, copy_parts = false;
  if (op_.in && op_.out) copy_single = op_.in != op_.out && overlap(op_.in, own, op_.out, own);
  for (size_t p = 0; op_.in && p < op_.out_parts.size(); ++p) {
    const Part& part = op_.out_parts[p];
    if (overlap(op_.in, own, part.data, part.count * item) && !(static_cast<int>(p) == rank && op_.in == part.data)) copy_single = true;
  }
  for (size_t p = 0; p < op_.in_parts.size(); ++p) {
    const Part& part = op_.in_parts[p];
    if (op_.out && overlap(op_.out, own, part.data, part.count * item) && !(static_cast<int>(p) == rank && op_.out == part.data))
      copy_parts = true;
    for (const Part& target : op_.out_parts)
      if (overlap(target.data, target.count * item, part.data, part.count * item)) copy_parts = true;
  }
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
  call_.emplace(comm_, op_, sequence());
  call_->publish(route_ == Route::payload);
}

void CollectiveTask::finish(bool patient) {
  Call& call = *call_;
  call.scope.patient = patient;
  if (wait_timeout_ > 0) {
    call.scope.timeout = wait_timeout_;
    call.scope.deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(wait_timeout_));
  }
  const Choice choice = route_ == Route::payload ? Choice{Algorithm::one_shot, 0, ""} : choose();
  switch (op_.kind) {
    case OpKind::all_reduce: return all_reduce(call, choice, route_);
    case OpKind::reduce: return reduce_to_root(call, choice, route_);
    case OpKind::broadcast: return broadcast(call, choice, route_);
    case OpKind::all_gather: return all_gather(call, choice, route_);
    case OpKind::reduce_scatter: return reduce_scatter(call, choice, route_);
    case OpKind::all_to_all: return all_to_all(call, choice, route_);
    case OpKind::gather: return gather(call, choice, route_);
    case OpKind::scatter: return scatter(call, choice, route_);
    case OpKind::barrier: return call.match();
    default: throw std::logic_error("pycomm: unknown collective");
  }
}

void CollectiveTask::look(double late) const {
  const Call& call = *call_;
  WaitScope scope{
      {op_.kind, sequence()}, late > 0 ? std::chrono::steady_clock::now() : call.scope.deadline, late > 0 ? late : call.scope.timeout};
  comm_.transport().look(0, comm_.world_size(), [&call](int p) { return call.published(p); }, scope);
}

// All ranks must choose alike. The choice rests on what is equal everywhere: size, world, reach, and, where this rank's own buffers
// would allow the mapped route, on the headers of all.
Choice CollectiveTask::choose() {
  Transport& transport = comm_.transport();
  Situation situation{comm_.world_size(), transport.cores(), false, transport.reach() == Transport::Reach::kernel};
  if (transport.reach() == Transport::Reach::pointer || call_->registered(comm_.rank())) {
    call_->match();
    situation.mapped = call_->all_mapped();
  }
  const size_t nbytes = op_.kind == OpKind::all_to_all && op_.uneven ? call_->longest_pair() : table_bytes(op_);
  Choice choice = select(op_.kind, nbytes, situation, op_.algorithm);
  if (choice.algorithm == Algorithm::direct && !situation.mapped && transport.reach() == Transport::Reach::none)
    choice = select(op_.kind, nbytes, {situation.world_size, situation.cores, false, false});
  const bool rounds_each_hop = op_.dtype == DType::f16 || op_.dtype == DType::bf16 || op_.reduce_op == ReduceOp::premul_sum;
  if (choice.algorithm == Algorithm::ring && op_.reduces() && rounds_each_hop)
    choice.algorithm = op_.kind == OpKind::all_reduce ? Algorithm::two_shot : Algorithm::staged;
  return choice;
}

void run(Communicator& comm, Op op) {
  CollectiveTask task(comm, std::move(op));
  comm.run(task);
}

std::shared_ptr<Communicator> make_communicator(Store& store, int rank, int world_size, const TransportOptions& options) {
  std::shared_ptr<Communicator> comm(new Communicator(Transport::join(store, rank, world_size, options)), release_communicator);
  comm->attach(std::make_unique<PointToPoint>(*comm));
  return comm;
}

}  // namespace pycomm
