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
  const auto wished = static_cast<Algorithm>(comm.default_algorithm(op_.kind));  // may be for CUDA tensors only
  if (op_.algorithm == Algorithm::automatic && has_algorithm(op_.kind, wished)) op_.algorithm = wished;
  validate(comm, op_, false);
  separate_overlap();
  size_t per_part = table_bytes(op_);
  if (op_.kind == OpKind::all_to_all && op_.uneven)
    per_part = slot_payload_bytes + 1;  // sizes are known pairwise only: look at tables first
  const bool asked_otherwise = op_.algorithm != Algorithm::automatic;
  route_ = op_.kind == OpKind::barrier || (!asked_otherwise && fits_payload(op_.kind, per_part, comm.world_size())) ? Route::payload
                                                                                                                    : Route::by_choice;
}

void validate(const Communicator& comm, const Op& op, bool on_device) {
  const int n = comm.world_size();
  auto bad = [&](const std::string& text) { throw std::invalid_argument(comm.transport().where({op.kind, 0}) + text); };
  if (op.root < 0 || op.root >= n) bad("root=" + std::to_string(op.root) + " is not in [0, " + std::to_string(n) + ")");
  if (op.reduces() && !reduce_supported(op.dtype, op.reduce_op))
    bad(std::string("reduce op ") + to_string(op.reduce_op) + " is not defined for dtype " + to_string(op.dtype));
  if (!on_device && !has_algorithm(op.kind, op.algorithm))
    bad(std::string("there is no algorithm ") + to_string(op.algorithm) + " for this operation");
  for (const auto* parts : {&op.in_parts, &op.out_parts})
    if (!parts->empty() && parts->size() != static_cast<size_t>(n))
      bad("got a list of " + std::to_string(parts->size()) + " buffers for " + std::to_string(n) + " ranks");
  if (!op.uneven)
    for (const auto* parts : {&op.in_parts, &op.out_parts})
      for (size_t p = 0; p < parts->size(); ++p)
        if ((*parts)[p].count != op.count)
          bad("buffer " + std::to_string(p) + " of the list has " + std::to_string((*parts)[p].count) + " elements, expected " +
              std::to_string(op.count));
}

// Allowed as they are: out == in (all_reduce, reduce, broadcast), the own part of a list == the single buffer.
Overlap find_overlap(const Op& op, int rank) {
  const size_t item = size_of(op.dtype);
  const size_t own = op.own_count(rank) * item;
  Overlap found;
  if (op.in && op.out) found.single = op.in != op.out && overlap(op.in, own, op.out, own);
  for (size_t p = 0; op.in && p < op.out_parts.size(); ++p) {
    const Part& part = op.out_parts[p];
    if (overlap(op.in, own, part.data, part.count * item) && !(static_cast<int>(p) == rank && op.in == part.data)) found.single = true;
  }
  for (size_t p = 0; p < op.in_parts.size(); ++p) {
    const Part& part = op.in_parts[p];
    if (op.out && overlap(op.out, own, part.data, part.count * item) && !(static_cast<int>(p) == rank && op.out == part.data))
      found.parts = true;
    for (const Part& target : op.out_parts)
      if (overlap(target.data, target.count * item, part.data, part.count * item)) found.parts = true;
  }
  return found;
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
