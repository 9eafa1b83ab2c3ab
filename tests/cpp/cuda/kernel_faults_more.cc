// kernel_faults_more.cc -- more of the suite `faults` of kernel_test.cc: buffers that differ, who is missed
// in the middle of an operation, what is refused.
#include "kernel_suites.h"

namespace pycomm::cuda::testing {

namespace {

// All call the same with other buffers: what a rank passes as `in` and `out` lies elsewhere than those of the
// others, which what addresses them itself must be told.
void other_buffers(const Form& form) {
  for (const int odd : {0, 2}) {
    const int n = 3;
    const Setting setting{.world_size = n, .memory = Memory::registered};
    Machine machine(n, setting.options);
    Ranks ranks(machine, n, options_of(setting));
    const Case call{.kind = form.kind, .algorithm = form.algorithm, .count = 64};
    Instance instance(ranks, call, setting.memory, 1);
    for (int r = 0; r < n; ++r) {
      Op op = instance.op(r);
      op.count = call.count / 2;  // so that reading past it gives a wrong result
      for (auto* parts : {&op.in_parts, &op.out_parts})
        for (Part& part : *parts) part.count = op.count;
      const std::byte* const in = op.in ? op.in : op.in_parts[0].data;
      if (r == odd && op.in && op.out) {  // exchanged
        op.in = op.out;
        op.out = const_cast<std::byte*>(in);
      } else if (r == odd) {
        if (op.in) op.in += 16;
        for (Part& part : op.in_parts) part.data += 16;
      }
      ranks.enqueue(r, op);
    }
    ++runs;
    expect(machine.run().ok, "a call with other buffers ends");
    for (int r = 0; r < n; ++r)
      expect(ranks.error(r).records[0].fault == static_cast<uint64_t>(Fault::mismatch),
             call.text() + ": other buffers are told on rank " + std::to_string(r));
  }
}

// Round a ring a rank misses the one before it alone, whoever else has not come that far. `gone` comes, and
// does nothing.
void missed_in_a_ring(int gone) {
  const int n = 4;
  const Setting setting{.world_size = n, .memory = Memory::staged, .options = {.timeouts = true}};
  Machine machine(n, setting.options);
  Ranks ranks(machine, n, options_of(setting));
  Instance instance(ranks, {.algorithm = Algorithm::ring, .count = 9000}, setting.memory, 1);
  const Args args =
      plan_collective(instance.op(gone), ranks.shape(gone), ranks.buffers(gone), 1).steps[0].args;
  machine.launch(machine.stream(gone), 1, 32, [&](fiber::FiberCtx& c) {
    Session<fiber::FiberCtx>(c, args).announce(Ordering::acquire_release);
  });
  for (int r = 0; r < n; ++r)
    if (r != gone) ranks.enqueue(r, instance.op(r));
  ++runs;
  expect(machine.run().ok, "a ring in which one does nothing ends");
  for (int r = 0; r < n; ++r)
    expect(r == gone || ranks.error(r).records[0].missing == 1u << (r + n - 1) % n,
           "rank " + std::to_string(r) + " misses the one before it, and no other");
}

// In stream order there are two turns for sizes that differ: what does not fit is refused where it is sent
// and where it is received.
void too_large_for_two_turns() {
  const Setting setting{.memory = Memory::staged, .protocol = Protocol::stream_ordered, .unit = 1};
  Machine machine(2, setting.options);
  Ranks ranks(machine, 2, options_of(setting));
  Buffer buffer(1 << 16);
  const auto refusal = [&](int rank, size_t sent, size_t received) -> std::string {
    Op op;
    op.kind = OpKind::all_to_all;
    op.dtype = DType::u8;
    op.uneven = true;
    for (int p = 0; p < 2; ++p) {
      op.in_parts.push_back({buffer.data(), p == rank ? buffer.nbytes() : sent});
      op.out_parts.push_back({buffer.data(), p == rank ? buffer.nbytes() : received});
    }
    try {
      plan_collective(op, ranks.shape(rank), ranks.buffers(rank), 1);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  ++runs;
  const size_t most = 2 * align_bytes * setting.blocks, more = most + 1;
  const std::string text = "at most " + std::to_string(most) + " bytes";
  for (const int rank : {0, 1}) {
    expect(refusal(rank, most, most).empty(), "two turns are taken; got " + refusal(rank, most, most));
    for (const std::string& said : {refusal(rank, more, 0), refusal(rank, 0, more)})
      expect(said.find(text) != std::string::npos && said.find("got " + std::to_string(more)) < said.size(),
             "'" + text + "' in '" + said + "'");
  }
}

}  // namespace

void more_faults() {
  for (const size_t form : {3, 9, 13}) other_buffers(forms[form]);
  for (const int gone : {0, 2}) missed_in_a_ring(gone);
  too_large_for_two_turns();
}

}  // namespace pycomm::cuda::testing
