// kernel_faults.cc -- the suites of kernel_test.cc in which calls differ, ranks are missing, or several
// streams run beside each other.
#include "kernel_suites.h"

namespace pycomm::cuda::testing {

namespace {

// Every rank calls `cases[r]`, then all call a good one. Every rank must report `text` for the first, and
// hold the second's result (in stream order the group is broken: ranks that disagree exchange unequally
// often, and the host ends the waits).
void mismatch(const std::vector<Case>& cases, const Setting& setting, const std::string& text) {
  const int n = setting.world_size;
  Machine machine(n, setting.options);
  Ranks ranks(machine, n, options_of(setting));
  std::vector<std::unique_ptr<Instance>> bad;
  for (int r = 0; r < n; ++r) bad.push_back(std::make_unique<Instance>(ranks, cases[r], setting.memory, r));
  Instance good(ranks, {.count = 77}, setting.memory, 99);
  for (int r = 0; r < n; ++r) {
    machine.host(machine.stream(r), [&, r] { bad[r]->fill(r); });
    ranks.enqueue(r, bad[r]->op(r));
    if (setting.protocol == Protocol::stream_ordered) continue;
    machine.host(machine.stream(r), [&, r] { good.fill(r); });
    ranks.enqueue(r, good.op(r));
    machine.host(machine.stream(r), [&, r] { good.check(r); });
  }
  const Outcome outcome = machine.run();
  ++runs;
  if (setting.protocol == Protocol::resident)
    expect(outcome.ok, setting.text() + ": " + text + " goes on; got " + outcome.text);
  for (int r = 0; r < n; ++r) {
    const ErrorRecord& record = ranks.error(r).records[0];
    expect(record.fault == static_cast<uint64_t>(Fault::mismatch),
           setting.text() + ": " + text + " is reported on rank " + std::to_string(r));
    expect(record.epoch == 1, "the mismatch is that of the first operation");
    const int peer = static_cast<int>(record.peer);
    expect(record.there.meta == ranks.error(peer).records[0].here.meta &&
               record.there.count == ranks.error(peer).records[0].here.count,
           "the call of another rank is that of the rank named");
    const std::string said = describe_difference(record.here, record.there, peer);
    expect(said.find(text) != std::string::npos, "'" + text + "' in '" + said + "'");
  }
}

void mismatches() {
  for (Protocol protocol : {Protocol::resident, Protocol::stream_ordered})
    for (Memory memory : {Memory::pointers, Memory::staged})
      for (int n : {2, 4}) {
        const Setting setting{
            .world_size = n, .memory = memory, .protocol = protocol, .options = {.seed = 5, .preempt = 16}};
        const Case base{.count = 500};
        auto with = [&](Case other, const std::string& text, int odd = -1) {
          std::vector<Case> cases(n, base);
          cases[odd < 0 ? n - 1 : odd] = other;
          mismatch(cases, setting, text);
        };
        for (int odd = 0; odd < n; ++odd) with({.count = 501}, "count=", odd);
        with({.count = 50000}, "count=");
        with({.dtype = DType::bf16, .count = 500}, "dtype=");
        with({.op = ReduceOp::max, .count = 500}, "reduce op=");
        with({.kind = OpKind::all_gather, .count = 500}, "operation=");
        with({.kind = OpKind::barrier, .count = 0}, "operation=");
        with({.algorithm = Algorithm::two_shot, .count = 500}, "algorithm=");
        with({.kind = OpKind::all_to_all, .count = 500, .uneven = true}, "operation=");
        std::vector<Case> roots(n, {.kind = OpKind::broadcast, .count = 9});
        roots[1].root = 1;
        mismatch(roots, setting, "root=");
        for (int with_sizes : {1, n - 1}) {
          std::vector<Case> forms(n, {.kind = OpKind::all_to_all, .count = 40});
          for (int r = 0; r < with_sizes; ++r) forms[r].uneven = true;
          mismatch(forms, setting, "sizes=");
        }
      }
}

// Splits that only two of four ranks see: what `src` sends to `dst`.
void pairwise_mismatch(Protocol protocol, int src, int dst) {
  const int n = 4;
  const Setting setting{.world_size = n, .protocol = protocol};
  Machine machine(n, {.seed = 3});
  Ranks ranks(machine, n, options_of(setting));
  const Case call{.kind = OpKind::all_to_all, .count = 40, .uneven = true};
  Instance instance(ranks, call, setting.memory, 1);
  for (int r = 0; r < n; ++r) {
    Op op = instance.op(r);
    if (r == src) op.in_parts[dst].count += 1;
    ranks.enqueue(r, op);
  }
  const Outcome outcome = machine.run();
  ++runs;
  expect(outcome.ok, "a pairwise mismatch ends; got " + outcome.text);
  const size_t expected = pair_count(call, src, dst) * sizeof(float);
  for (int r = 0; r < n; ++r) {
    const ErrorRecord& record = ranks.error(r).records[0];
    expect(record.fault == static_cast<uint64_t>(Fault::mismatch),
           "the pairwise mismatch is reported on rank " + std::to_string(r));
    expect(static_cast<int>(record.peer) == (r == dst ? src : dst), "the other, or who found it, is named");
    const std::string said = describe_difference(record.here, record.there, src);
    const std::string sends = "rank " + std::to_string(src) + " sends " + std::to_string(expected + 4) +
                              " bytes to this rank, which expects " + std::to_string(expected) + ".";
    expect(r != dst || said.find(sends) == 0, "'" + sends + "' in '" + said + "'");
  }
}

// Ranks that never come: the others time out and name them. Or the host stops them.
void absent(const std::vector<int>& missing) {
  uint64_t mask = 0;
  for (const int r : missing) mask |= 1u << r;
  for (const Form& form : forms) {
    const int n = 4;
    for (Memory memory : {Memory::pointers, Memory::staged, Memory::registered}) {
      const Setting setting{.world_size = n, .memory = memory, .options = {.timeouts = true}};
      if (!possible(form, setting)) continue;
      Machine machine(n, setting.options);
      Ranks ranks(machine, n, options_of(setting));
      Instance instance(ranks, {.kind = form.kind, .algorithm = form.algorithm, .count = 400}, memory, 1);
      for (int r = 0; r < n; ++r)
        if (!(mask >> r & 1)) ranks.enqueue(r, instance.op(r));
      const Outcome outcome = machine.run();
      ++runs;
      expect(outcome.ok, std::string(to_string(form.kind)) + " without a peer ends; got " + outcome.text);
      for (int r = 0; r < n; ++r) {
        if (mask >> r & 1) continue;
        const ErrorRecord& record = ranks.error(r).records[0];
        expect(record.fault == static_cast<uint64_t>(Fault::timeout),
               std::string(to_string(form.kind)) + " without a peer times out");
        expect(record.missing == mask, "those missing are named, and no other");
        expect(static_cast<int>(record.peer) == missing[0], "the first of them is the peer");
      }
    }
  }
}

void stopped_alone() {
  const Setting setting{.world_size = 2, .options = {.timeouts = true}};
  Machine machine(2, setting.options);
  Ranks ranks(machine, 2, options_of(setting));
  Instance instance(ranks, {.count = 400}, setting.memory, 1);
  ranks.error(0).stop = 1;
  ranks.enqueue(0, instance.op(0));
  expect(machine.run().ok && ranks.error(0).records[0].fault == 0,
         "a stopped rank ends without a report: the host knows");
}

// The host stops a rank before its kernel starts; the other is there, and its header has come.
void stopped() {
  const Setting setting{.world_size = 2, .options = {.timeouts = true}};
  Machine machine(2, setting.options);
  Ranks ranks(machine, 2, options_of(setting));
  Instance sum(ranks, {.algorithm = Algorithm::two_shot, .count = 400}, setting.memory, 1);
  ranks.error(1).stop = 1;
  for (int r = 0; r < 2; ++r) {
    machine.host(machine.stream(r), [&, r] { sum.fill(r); });
    ranks.enqueue(r, sum.op(r));
  }
  ++runs;
  expect(machine.run().ok && !ranks.error(1).records[0].fault, "a stopped rank ends, and the host knows why");
  const size_t part = round_up_to(400 * sizeof(float) / 2, align_bytes);
  const std::vector<std::byte> other = sum.outputs(1)[0];
  expect(std::all_of(other.begin() + part, other.end(), [](std::byte b) { return b == std::byte{0xBB}; }),
         "a stopped rank leaves the other's result alone");
}

// A rank comes when the others have given up and their callers have their buffers back. No host has said
// `stop`.
void late_starts(int late) {
  for (const Form& form : forms)
    for (const Memory memory : {Memory::pointers, Memory::registered}) {
      const int n = 3;
      const Setting setting{.world_size = n, .memory = memory, .options = {.timeouts = true}};
      if (!possible(form, setting)) continue;
      Machine machine(n, setting.options);
      Ranks ranks(machine, n, options_of(setting));
      Instance instance(ranks, {.kind = form.kind, .algorithm = form.algorithm, .count = 400}, memory, 1);
      for (int r = 0; r < n; ++r) {
        if (r == late) continue;
        machine.host(machine.stream(r), [&, r] { instance.fill(r); });
        ranks.enqueue(r, instance.op(r));
      }
      ++runs;
      expect(machine.run().ok, "ranks without their peer end");
      const auto before = instance.outputs(late);
      machine.host(machine.stream(late), [&] { instance.fill(late); });
      ranks.enqueue(late, instance.op(late));
      expect(machine.run().ok, "a late start ends");
      expect(instance.outputs(late) == before, std::string(to_string(form.kind)) + " " +
                                                   to_string(form.algorithm) +
                                                   ": a late start leaves the others' results alone");
      bool right = true;  // as it is where nothing but arenas is needed of the others
      try {
        instance.check(late);
      } catch (const std::runtime_error&) {
        right = false;
      }
      expect(right || ranks.error(late).records[0].fault, "a late start without its result is an error");
    }
}

void late_message() {
  for (const Memory memory : {Memory::pointers, Memory::registered}) {
    const Setting setting{.world_size = 2, .memory = memory, .options = {.timeouts = true}};
    Machine machine(2, setting.options);
    Ranks ranks(machine, 2, options_of(setting));
    Region& region = ranks.add_region(4096);
    std::byte *from = region.parts[0]->data(), *to = region.parts[1]->data();
    std::memset(from, 1, 4096);
    ranks.enqueue(0, {true, 1, 0, DType::u8, from, 4096}, 1);
    expect(machine.run().ok, "a send without its recv ends");
    std::memset(from, 2, 4096);
    ranks.enqueue(1, {false, 0, 0, DType::u8, to, 4096}, 1);
    ++runs;
    expect(machine.run().ok && to[0] == std::byte{0} && to[4095] == std::byte{0},
           "a late recv reads nothing of what its sender took back");
    expect(ranks.error(1).records[record_of_receiving(0)].fault, "a late recv is an error");
  }
}

// A rank never comes and nobody looks at the clock: the report names who waits, and in whose memory.
void deadlock() {
  for (Memory memory : {Memory::pointers, Memory::staged}) {
    const Setting setting{.world_size = 2, .memory = memory};
    Machine machine(2, setting.options);
    Ranks ranks(machine, 2, options_of(setting));
    Instance instance(ranks, {.algorithm = Algorithm::two_shot, .count = 20000}, memory, 1);
    ranks.enqueue(1, instance.op(1));
    const Outcome outcome = machine.run();
    ++runs;
    expect(outcome.deadlock, "an operation without its peer is a deadlock");
    for (const char* text : {"rank 1 ", " block 0 thread 0: waiting for arena 1 + ",
                             " block 1 thread 0: ", "threads 1-63: waiting in sync"})
      expect(outcome.text.find(text) != std::string::npos, std::string("'") + text + "' in " + outcome.text);
  }
}

void message_faults() {
  for (Protocol protocol : {Protocol::resident, Protocol::stream_ordered})
    for (int what = 0; what < 3; ++what) {
      const Setting setting{.world_size = 2, .memory = Memory::staged, .protocol = protocol};
      Machine machine(2, setting.options);
      Ranks ranks(machine, 2, options_of(setting));
      Buffer from(4096), to(4096);
      ranks.enqueue(0, {true, 1, 3, DType::f32, from.data(), 900}, 1);
      ranks.enqueue(1,
                    {false, 0, what == 0 ? 4 : 3, what == 1 ? DType::i32 : DType::f32, to.data(),
                     what == 2 ? 901u : 900u},
                    1);
      const Outcome outcome = machine.run();
      ++runs;
      expect(outcome.ok, "a message that differs ends; got " + outcome.text);
      const ErrorRecord &here = ranks.error(0).records[record_of_sending(1)],
                        &there = ranks.error(1).records[record_of_receiving(0)];
      for (const ErrorRecord* record : {&here, &there})
        expect(record->fault == static_cast<uint64_t>(Fault::mismatch), "both ends report it");
      const char* texts[] = {"tag=", "dtype=", "count="};
      expect(describe_difference(here.here, here.there, 1).find(texts[what]) == 0, texts[what]);
    }
  const Setting setting{.world_size = 2, .options = {.timeouts = true}};
  Machine machine(2, setting.options);
  Ranks ranks(machine, 2, options_of(setting));
  Buffer data(64);
  ranks.enqueue(0, {true, 1, 0, DType::u8, data.data(), 64}, 1);
  expect(machine.run().ok &&
             ranks.error(0).records[record_of_sending(1)].fault == static_cast<uint64_t>(Fault::timeout),
         "a send without a recv times out");
}

// Who reads that a rank has given up finds its peer told: what the caller does then is behind that.
void told_in_order(uint64_t seed) {
  for (uint64_t round = 0; round < 20; ++round)
    for (const bool is_message : {false, true}) {
      const Setting setting{.world_size = 2,
                            .threads = 32,
                            .options = {.seed = seed * 1000 + round, .preempt = 3, .timeouts = true}};
      Machine machine(2, setting.options);
      Ranks ranks(machine, 2, options_of(setting));
      Buffer data(256);
      Instance sum(ranks, {.algorithm = Algorithm::two_shot, .count = 900}, setting.memory, 1);
      if (is_message) ranks.enqueue(0, {true, 1, 7, DType::u8, data.data(), 256}, 1);
      else ranks.enqueue(0, sum.op(0));
      const Control& peer = control_of(ranks.shape(0).group, 1);
      const ErrorRecord& record = ranks.error(0).records[is_message ? record_of_sending(1) : 0];
      machine.launch(machine.stream(0, 2), 1, 1, [&](fiber::FiberCtx& c) {
        while (!c.load_acquire(&record.fault, Scope::system)) c.relax(&record.fault);
        expect(c.load_relaxed(is_message ? &peer.receiving[0].gave_up : &peer.gave_up[0], Scope::system) == 1,
               "peers are told before the host");
      });
      const Outcome outcome = machine.run();
      ++runs;
      expect(outcome.ok, "a rank gives up in order; got " + outcome.text);
    }
}

// A mismatch is told once, also where the host reads it before the operation's second launch.
void told_once() {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const Setting setting{
        .world_size = 2, .memory = Memory::registered, .options = {.seed = seed, .preempt = 3}};
    Machine machine(2, setting.options);
    Ranks ranks(machine, 2, options_of(setting));
    std::vector<std::unique_ptr<Instance>> calls;
    for (int r = 0; r < 2; ++r) {
      const Case call{.kind = OpKind::all_gather, .algorithm = Algorithm::copy_engine, .count = 64u + r};
      calls.push_back(std::make_unique<Instance>(ranks, call, setting.memory, r));
      ranks.enqueue(r, calls[r]->op(r));
      machine.launch(machine.stream(r, 1), 1, 1, [&ranks, r](fiber::FiberCtx& c) {
        ErrorRecord& record = ranks.error(r).records[0];
        while (!c.load_acquire(&record.fault, Scope::system)) c.relax(&record.fault);
        c.store_release(&record.fault, uint64_t{0}, Scope::system);
      });
    }
    ++runs;
    expect(machine.run().ok, "a mismatch with two launches ends");
    for (int r = 0; r < 2; ++r) expect(!ranks.error(r).records[0].fault, "a mismatch is told once");
  }
}

// Differs from segment to segment, too.
std::byte message_byte(int src, int dst, int round, size_t i) {
  return static_cast<std::byte>(src * 16 + dst + round * 5 + (i >> 8) * 7);
}

}  // namespace

// What the host reads of a fault record that kernels write meanwhile, as Faults::read_record does.
void records(uint64_t seed) {
  told_in_order(seed);
  for (uint64_t round = 0; round < 20; ++round)
    for (int what = 0; what < 3; ++what) {
      const bool is_message = what == 2;
      const Setting setting{
          .world_size = 2, .threads = 32, .options = {.seed = seed * 1000 + round, .preempt = 3}};
      Machine machine(2, setting.options);
      Ranks ranks(machine, 2, options_of(setting));
      Instance good(ranks, {.count = 50}, setting.memory, 1);
      std::vector<std::unique_ptr<Instance>> calls;
      Buffer data(4096);
      for (int r = 0; r < 2; ++r) {
        const size_t base = is_message ? 64 : 77, epoch = is_message ? 1 : 2;
        const Case call{.algorithm = what ? Algorithm::two_shot : Algorithm::one_shot, .count = base + r};
        calls.push_back(std::make_unique<Instance>(ranks, call, setting.memory, 2 + r));
        good.enqueue(r);
        if (is_message) ranks.enqueue(r, {r == 0, 1 - r, 7, DType::u8, data.data(), base + r}, 1);
        else ranks.enqueue(r, calls[r]->op(r));
        const int place = !is_message ? 0 : r == 0 ? record_of_sending(1) : record_of_receiving(0);
        machine.launch(machine.stream(r, 2), 1, 1, [=, &ranks](fiber::FiberCtx& c) {
          const ErrorRecord& record = ranks.error(r).records[place];
          auto word = [&](const uint64_t& of_record) { return c.load_relaxed(&of_record, Scope::system); };
          while (!c.load_acquire(&record.fault, Scope::system)) c.relax(&record.fault);
          expect(word(record.epoch) == epoch && word(record.peer) == 1u - r && word(record.here.meta) &&
                     word(record.here.count) == base + r && word(record.there.count) == base + 1 - r,
                 "the whole record is there when its fault is");
        });
      }
      const Outcome outcome = machine.run();
      ++runs;
      expect(outcome.ok, "records are read; got " + outcome.text);
    }
}

void faults() {
  mismatches();
  for (Protocol protocol : {Protocol::resident, Protocol::stream_ordered})
    for (const auto& [src, dst] : {std::pair(1, 2), std::pair(0, 3), std::pair(3, 0)})
      pairwise_mismatch(protocol, src, dst);
  told_once();
  more_faults();
  for (const auto& missing : {std::vector{0}, std::vector{3}, std::vector{0, 2}}) absent(missing);
  stopped_alone();
  stopped();
  for (const int late : {0, 2}) late_starts(late);
  late_message();
  deadlock();
  message_faults();
}

void streams(uint64_t seed) {
  for (Memory memory : {Memory::pointers, Memory::staged, Memory::registered})
    for (Protocol protocol : {Protocol::resident, Protocol::stream_ordered})
      for (size_t count : {size_t{0}, size_t{1}, size_t{1000}, size_t{30000}, size_t{100000}}) {
        const int n = 3;
        const Setting setting{.world_size = n,
                              .memory = memory,
                              .protocol = protocol,
                              .options = {.seed = seed, .preempt = 40}};
        Machine machine(n, setting.options);
        Ranks ranks(machine, n, options_of(setting));
        Instance sums(ranks, {.count = 900}, memory, 1),
            gathered(ranks, {.kind = OpKind::all_gather, .count = 300}, memory, 2);
        // Each rank sends to all, itself too, on one stream per destination, and receives on one per source;
        // twice.
        std::vector<std::unique_ptr<Buffer>> from, to;
        for (int r = 0; r < n; ++r)
          for (int p = 0; p < n; ++p) {
            from.push_back(std::make_unique<Buffer>(std::max<size_t>(count, 1)));
            to.push_back(std::make_unique<Buffer>(std::max<size_t>(count, 1)));
          }
        for (int r = 0; r < n; ++r) {
          sums.enqueue(r);
          gathered.enqueue(r);
          for (int round = 0; round < 2; ++round)
            for (int p = 0; p < n; ++p) {
              std::byte *data = from[r * n + p]->data(), *out = to[r * n + p]->data();
              const int sending = 1 + p, receiving = 1 + n + p;
              machine.host(machine.stream(r, sending), [=] {
                for (size_t i = 0; i < count; ++i) data[i] = message_byte(r, p, round, i);
              });
              ranks.enqueue(r, {true, p, 7, DType::u8, data, count}, sending);
              ranks.enqueue(r, {false, p, 7, DType::u8, out, count}, receiving);
              machine.host(machine.stream(r, receiving), [=] {
                for (size_t i = 0; i < count; ++i)
                  if (out[i] != message_byte(p, r, round, i)) throw std::runtime_error("a message is wrong");
              });
            }
        }
        const Outcome outcome = machine.run();
        ++runs;
        expect(outcome.ok, setting.text() + ", messages of " + std::to_string(count) + " bytes arrive; got " +
                               outcome.text);
        ranks.check_quiet();
      }
}

}  // namespace pycomm::cuda::testing
