// operation.cc -- see operation.h.
#include "operation.h"

#include "../arithmetic/reduce.h"

namespace pycomm {

namespace {

constexpr size_t segment_bytes = 4 << 20;  // chosen at 1 Gbit/s: shorter ones cost more than they hide
constexpr uint32_t phases = 4, operations_apart = 1 << 20;

}  // namespace

void Flight::land() {
  for (Entry& entry : tickets_) {
    group_.await(*entry.ticket, entry.peer, scope_);
    entry.ticket.reset();
  }
  tickets_.clear();
}

Operation::Operation(Across& group, const Op& op, const WaitScope& scope)
    : group(group),
      placement(group.placement()),
      op(op),
      item(size_of(op.dtype)),
      host(group.host()),
      local(group.local_rank()),
      locals(group.local_size()),
      scope_(scope),
      inside_scope_(scope),
      tag_(static_cast<uint32_t>(scope.op.sequence % operations_apart) * phases) {
  for (int i = 1; i < placement.hosts(); ++i) others_.push_back((host + i) % placement.hosts());
  inside_scope_.yields = false;
  group.inside().serve(&inside_scope_);
}

void Operation::raise_mismatch(int rank, const std::string& text) const {
  throw CommError(ErrorKind::mismatch, group.transport().where(scope_.op) + text, group.rank(),
                  placement.world_size(), scope_.op, rank);
}

void Operation::inside(Op step) { group.inside().run(std::move(step)); }

void Operation::send(Flight& flight, int rank, const std::byte* data, size_t count, int phase) {
  if (count == 0) return;
  flight.add(rank, group.posted(rank, scope_,
                                [&] { return group.wire().send(rank, tag_ + phase, data, count * item); }));
}

void Operation::recv(Flight& flight, int rank, std::byte* data, size_t count, int phase) {
  if (count == 0) return;
  flight.add(rank, group.posted(rank, scope_,
                                [&] { return group.wire().recv(rank, tag_ + phase, data, count * item); }));
}

// 16-bit floats are divided before they are rounded: their sums may not fit.
bool Operation::divides_inside() const {
  return op.reduce_op == ReduceOp::avg && (op.dtype == DType::f16 || op.dtype == DType::bf16);
}

bool Operation::sums_alone() const {
  return locals == 1 && op.reduce_op != ReduceOp::premul_sum && !divides_inside();
}

Op Operation::reduction_inside(OpKind kind) const {
  Op step;
  step.kind = kind;
  step.dtype = op.dtype;
  step.reduce_op = op.reduce_op == ReduceOp::avg && !divides_inside() ? ReduceOp::sum : op.reduce_op;
  step.factor = op.factor;
  step.divisor = placement.world_size();
  step.uneven = true;
  return step;
}

// In the order of hosts.
void Operation::sum_hosts(const std::vector<const void*>& of_hosts, std::byte* out, size_t count) const {
  ReduceOp reduce_op = op.reduce_op;
  if (reduce_op == ReduceOp::premul_sum || divides_inside()) reduce_op = ReduceOp::sum;
  reduce({op.dtype, reduce_op, static_cast<double>(placement.world_size())}, of_hosts.data(),
         static_cast<int>(of_hosts.size()), out, count);
}

size_t Operation::segment() const { return segment_bytes / item; }

}  // namespace pycomm
