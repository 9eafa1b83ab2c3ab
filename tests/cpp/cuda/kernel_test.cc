// kernel_test.cc -- the CUDA kernels, by way of the plans that a GPU would get, on the fiber machine.
//
//   kernel_test table WORLD_SIZE          every algorithm x memory x protocol x ugly sizes, then every dtype x op
//   kernel_test random SEED RUNS          random calls back to back on every rank's stream, random schedule with preemption
//   kernel_test mutants SEED RUNS         the same, small: what a planted fault must not survive (tests/test_cuda_mutants.py)
//   kernel_test faults                    mismatches, missing ranks, stop
//   kernel_test streams SEED              messages beside collectives, several streams per rank
//
// Prints the number of runs. Ends with status 1 and a text at the first failure.
#include <algorithm>
#include <cstdio>

#include "kernel_cases.h"

namespace pycomm::cuda {

bool has_kernel(const KernelKey& key) {
  return visit_kernel(key, []<Kernel kernel, class T, ReduceOp op>() {});
}

namespace fiber {

template <>
struct MultimemType<F16> {
  using Sum = float;
  static float widen(F16 x) { return pycomm::cuda::widen(x); }
  static F16 narrow(float x) { return to_f16(x); }
};
template <>
struct MultimemType<BF16> {
  using Sum = float;
  static float widen(BF16 x) { return pycomm::cuda::widen(x); }
  static BF16 narrow(float x) { return to_bf16(x); }
};

}  // namespace fiber

namespace testing {
namespace {

int runs = 0;

struct Setting {
  int world_size = 2;
  Memory memory = Memory::pointers;
  Protocol protocol = Protocol::resident;
  int blocks = 2, threads = 64;
  fiber::Options options{};

  std::string text() const {
    const char* memories[] = {"pointers", "staged", "registered"};
    return std::to_string(world_size) + " ranks, " + memories[static_cast<int>(memory)] + ", " +
           (protocol == Protocol::resident ? "resident" : "stream_ordered") + ", " + std::to_string(blocks) + "x" +
           std::to_string(threads) + ", seed " + std::to_string(options.seed) + ", preempt " + std::to_string(options.preempt);
  }
};

RanksOptions options_of(const Setting& setting) {
  RanksOptions options;
  options.protocol = setting.protocol;
  options.pointers = setting.memory == Memory::pointers;
  options.blocks = setting.blocks;
  options.threads = setting.threads;
  return options;
}

// Runs the cases one after the other on every rank's stream, as fast as each rank can.
void run_cases(const std::vector<Case>& cases, const Setting& setting) {
  Machine machine(setting.world_size, setting.options);
  Ranks ranks(machine, setting.world_size, options_of(setting));
  std::vector<std::unique_ptr<Instance>> instances;
  std::string done;
  for (size_t i = 0; i < cases.size(); ++i) {
    instances.push_back(std::make_unique<Instance>(ranks, cases[i], setting.memory, i + 1));
    done += "\n  " + cases[i].text();
  }
  for (int r = 0; r < setting.world_size; ++r)
    for (const auto& instance : instances) {
      machine.host(machine.stream(r), [&instance, r] { instance->fill(r); });
      ranks.enqueue(r, instance->op(r));
      machine.host(machine.stream(r), [&instance, r] { instance->check(r); });
    }
  const Outcome outcome = machine.run();
  ++runs;
  try {
    if (!outcome.ok) throw std::runtime_error(outcome.text);
    ranks.check_quiet();
  } catch (const std::exception& error) {
    throw std::runtime_error(setting.text() + ":" + done + "\n" + error.what());
  }
}

struct Form {
  OpKind kind;
  Algorithm algorithm;
};
constexpr Form forms[] = {
    {OpKind::all_reduce, Algorithm::one_shot}, {OpKind::all_reduce, Algorithm::two_shot},
    {OpKind::all_reduce, Algorithm::ring},     {OpKind::all_reduce, Algorithm::multimem},
    {OpKind::reduce, Algorithm::automatic},    {OpKind::reduce_scatter, Algorithm::automatic},
    {OpKind::broadcast, Algorithm::direct},    {OpKind::broadcast, Algorithm::two_shot},
    {OpKind::all_gather, Algorithm::direct},   {OpKind::all_gather, Algorithm::copy_engine},
    {OpKind::gather, Algorithm::automatic},    {OpKind::scatter, Algorithm::automatic},
    {OpKind::all_to_all, Algorithm::direct},   {OpKind::all_to_all, Algorithm::copy_engine},
    {OpKind::barrier, Algorithm::automatic},
};

// Can this be asked for in that setting? (What it means otherwise is for the tests of choose().)
bool possible(const Form& form, const Setting& setting) {
  if (form.algorithm == Algorithm::multimem) return setting.memory == Memory::registered && setting.protocol == Protocol::resident;
  if (form.algorithm == Algorithm::copy_engine) return setting.memory == Memory::registered;
  return true;
}
bool takes_uneven(const Form& form) {
  return form.algorithm != Algorithm::copy_engine &&
         (form.kind == OpKind::all_gather || form.kind == OpKind::reduce_scatter || form.kind == OpKind::all_to_all);
}
bool reduces(OpKind kind) { return kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::reduce_scatter; }

void table(int world_size) {
  const size_t n = world_size;
  for (Memory memory : {Memory::pointers, Memory::staged, Memory::registered})
    for (Protocol protocol : {Protocol::resident, Protocol::stream_ordered})
      for (const Form& form : forms) {
        Setting setting{.world_size = world_size, .memory = memory, .protocol = protocol};
        if (!possible(form, setting)) continue;
        for (size_t count : {size_t{0}, size_t{1}, n - 1, n, n + 1, size_t{63}, size_t{1000}, size_t{4099}}) {
          Case c{.kind = form.kind, .algorithm = form.algorithm, .count = count, .root = static_cast<int>(count % n)};
          if (form.algorithm == Algorithm::multimem && count % 4) c.count = count / 4 * 4;
          std::vector<Case> cases{c};
          if (takes_uneven(form)) cases.push_back(c), cases.back().uneven = true;
          if (form.algorithm != Algorithm::copy_engine) cases.push_back(c), cases.back().in_place = true;
          if (memory != Memory::registered) cases.push_back(c), cases.back().misalign = 1;
          run_cases(cases, setting);
        }
      }
  for (int dtype = 0; dtype < num_dtypes; ++dtype)
    for (int op = 0; op < num_reduce_ops; ++op) {
      const auto d = static_cast<DType>(dtype);
      const auto o = static_cast<ReduceOp>(op);
      std::vector<Case> cases;
      for (const Form& form : {forms[0], forms[1], forms[2], forms[4], forms[5]})
        if (reduce_supported(d, o)) cases.push_back({.kind = form.kind, .algorithm = form.algorithm, .dtype = d, .op = o, .count = 331});
      if (op == 0)
        for (OpKind kind : {OpKind::broadcast, OpKind::all_gather, OpKind::all_to_all})
          cases.push_back({.kind = kind, .dtype = d, .count = 333});
      if (!cases.empty()) run_cases(cases, {.world_size = world_size, .memory = Memory::pointers});
    }
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    run_cases({{.algorithm = Algorithm::multimem, .dtype = dtype, .count = 664}}, {.world_size = world_size, .memory = Memory::registered});
}

void random_runs(uint64_t seed, int count, bool small) {
  std::mt19937_64 random(seed);
  auto below = [&random](size_t n) { return static_cast<size_t>(random() % n); };
  for (int i = 0; i < count; ++i) {
    Setting setting;
    setting.world_size = small ? 2 + static_cast<int>(below(3)) : 1 + static_cast<int>(below(8));
    setting.memory = static_cast<Memory>(below(3));
    setting.protocol = below(3) == 0 ? Protocol::stream_ordered : Protocol::resident;
    setting.blocks = 1 + static_cast<int>(below(3));
    setting.threads = small ? 32 : 32 << below(3);
    setting.options.seed = below(4) == 0 ? 0 : random();
    setting.options.preempt = below(2) ? 0 : 4 + static_cast<uint32_t>(below(60));
    std::vector<Case> cases;
    for (size_t k = 3 + below(4); k > 0; --k) {
      const Form form = forms[below(std::size(forms))];
      if (!possible(form, setting)) continue;
      Case c{.kind = form.kind, .algorithm = form.algorithm};
      c.count = below(small ? 600 : 3000);
      c.root = static_cast<int>(below(setting.world_size));
      c.uneven = takes_uneven(form) && below(3) == 0;
      c.in_place = form.algorithm != Algorithm::copy_engine && below(3) == 0;
      c.misalign = setting.memory != Memory::registered && below(4) == 0;
      if (reduces(c.kind) && !small) do {
          c.dtype = static_cast<DType>(below(num_dtypes));
          c.op = static_cast<ReduceOp>(below(num_reduce_ops));
        } while (!reduce_supported(c.dtype, c.op));
      if (c.algorithm == Algorithm::multimem) c.dtype = DType::f32, c.op = ReduceOp::sum, c.count = c.count / 4 * 4;
      cases.push_back(c);
    }
    if (!cases.empty()) run_cases(cases, setting);
  }
}

// --- faults ---

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("expected: " + what);
}

// Every rank calls `cases[r]`, then all call a good one. Every rank must report `text` for the first, and hold the second's result (in
// stream order the group is broken: ranks that disagree exchange unequally often, and the host ends the waits).
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
  if (setting.protocol == Protocol::resident) expect(outcome.ok, setting.text() + ": " + text + " goes on; got " + outcome.text);
  for (int r = 0; r < n; ++r) {
    const ErrorRecord& record = ranks.error(r).records[0];
    expect(record.fault == static_cast<uint64_t>(Fault::mismatch),
           setting.text() + ": " + text + " is reported on rank " + std::to_string(r));
    expect(record.epoch == 1, "the mismatch is that of the first operation");
    const std::string said = describe_difference(record.here, record.there, static_cast<int>(record.peer));
    expect(said.find(text) != std::string::npos, "'" + text + "' in '" + said + "'");
  }
}

void mismatches() {
  for (Protocol protocol : {Protocol::resident, Protocol::stream_ordered})
    for (Memory memory : {Memory::pointers, Memory::staged})
      for (int n : {2, 4}) {
        const Setting setting{.world_size = n, .memory = memory, .protocol = protocol, .options = {.seed = 5, .preempt = 16}};
        const Case base{.count = 500};
        auto with = [&](Case other, const std::string& text) {
          std::vector<Case> cases(n, base);
          cases[n - 1] = other;
          mismatch(cases, setting, text);
        };
        with({.count = 501}, "count=");
        with({.count = 50000}, "count=");
        with({.dtype = DType::i32, .count = 500}, "dtype=");
        with({.op = ReduceOp::max, .count = 500}, "reduce op=");
        with({.kind = OpKind::all_gather, .count = 500}, "operation=");
        with({.kind = OpKind::barrier, .count = 0}, "operation=");
        with({.algorithm = Algorithm::two_shot, .count = 500}, "algorithm=");
        std::vector<Case> roots(n, {.kind = OpKind::broadcast, .count = 9});
        roots[1].root = 1;
        mismatch(roots, setting, "root=");
      }
}

// Splits that only two of four ranks see.
void pairwise_mismatch() {
  for (Protocol protocol : {Protocol::resident, Protocol::stream_ordered}) {
    const int n = 4;
    const Setting setting{.world_size = n, .protocol = protocol};
    Machine machine(n, {.seed = 3});
    Ranks ranks(machine, n, options_of(setting));
    Instance instance(ranks, {.kind = OpKind::all_to_all, .count = 40, .uneven = true}, setting.memory, 1);
    for (int r = 0; r < n; ++r) {
      Op op = instance.op(r);
      if (r == 1) op.in_parts[2].count -= 1;
      ranks.enqueue(r, op);
    }
    const Outcome outcome = machine.run();
    ++runs;
    expect(outcome.ok, "a pairwise mismatch ends; got " + outcome.text);
    for (int r = 0; r < n; ++r) {
      const ErrorRecord& record = ranks.error(r).records[0];
      expect(record.fault == static_cast<uint64_t>(Fault::mismatch), "the pairwise mismatch is reported on rank " + std::to_string(r));
      if (r == 2) expect(record.peer == 1 && record.here.extra == record.there.extra + 4, "rank 2 names rank 1 and both sizes");
    }
  }
}

// The last rank never comes: the others time out and name it. Or the host stops them.
void absent() {
  for (const Form& form : forms) {
    const int n = 3;
    for (Memory memory : {Memory::pointers, Memory::staged, Memory::registered}) {
      const Setting setting{.world_size = n, .memory = memory, .options = {.timeouts = true}};
      if (!possible(form, setting)) continue;
      Machine machine(n, setting.options);
      Ranks ranks(machine, n, options_of(setting));
      Instance instance(ranks, {.kind = form.kind, .algorithm = form.algorithm, .count = 400}, memory, 1);
      for (int r = 0; r < n - 1; ++r) ranks.enqueue(r, instance.op(r));
      const Outcome outcome = machine.run();
      ++runs;
      expect(outcome.ok, std::string(to_string(form.kind)) + " without a peer ends; got " + outcome.text);
      for (int r = 0; r < n - 1; ++r) {
        const ErrorRecord& record = ranks.error(r).records[0];
        expect(record.fault == static_cast<uint64_t>(Fault::timeout), std::string(to_string(form.kind)) + " without a peer times out");
        expect(record.missing == 1u << (n - 1), "the missing rank is named");
      }
    }
  }
  const Setting setting{.world_size = 2, .options = {.timeouts = true}};
  Machine machine(2, setting.options);
  Ranks ranks(machine, 2, options_of(setting));
  Instance instance(ranks, {.count = 400}, setting.memory, 1);
  ranks.error(0).stop = 1;
  ranks.enqueue(0, instance.op(0));
  expect(machine.run().ok && ranks.error(0).records[0].fault == 0, "a stopped rank ends without a report: the host knows");
}

// --- messages and several streams ---

void streams(uint64_t seed) {
  for (Memory memory : {Memory::pointers, Memory::staged, Memory::registered})
    for (Protocol protocol : {Protocol::resident, Protocol::stream_ordered})
      for (size_t count : {size_t{0}, size_t{1}, size_t{1000}, size_t{30000}}) {
        const int n = 3;
        const Setting setting{.world_size = n, .memory = memory, .protocol = protocol, .options = {.seed = seed, .preempt = 40}};
        Machine machine(n, setting.options);
        Ranks ranks(machine, n, options_of(setting));
        Instance sums(ranks, {.count = 900}, memory, 1), sums_again(ranks, {.kind = OpKind::all_gather, .count = 300}, memory, 2);
        // Each rank sends to all, itself too, on one stream per destination, and receives on one per source; twice.
        std::vector<std::unique_ptr<Buffer>> from, to;
        for (int r = 0; r < n; ++r)
          for (int p = 0; p < n; ++p) {
            from.push_back(std::make_unique<Buffer>(std::max<size_t>(count, 1)));
            to.push_back(std::make_unique<Buffer>(std::max<size_t>(count, 1)));
          }
        for (int r = 0; r < n; ++r) {
          for (Instance* instance : {&sums, &sums_again}) {
            machine.host(machine.stream(r), [instance, r] { instance->fill(r); });
            ranks.enqueue(r, instance->op(r));
            machine.host(machine.stream(r), [instance, r] { instance->check(r); });
          }
          for (int round = 0; round < 2; ++round)
            for (int p = 0; p < n; ++p) {
              std::byte *data = from[r * n + p]->data(), *out = to[r * n + p]->data();
              const int sending = 1 + p, receiving = 1 + n + p;
              machine.host(machine.stream(r, sending), [=] { std::memset(data, r * 16 + p + round, count); });
              ranks.enqueue(r, {true, p, 7, DType::u8, data, count}, sending);
              ranks.enqueue(r, {false, p, 7, DType::u8, out, count}, receiving);
              machine.host(machine.stream(r, receiving), [=] {
                for (size_t i = 0; i < count; ++i)
                  if (out[i] != static_cast<std::byte>(p * 16 + r + round)) throw std::runtime_error("a message is wrong");
              });
            }
        }
        const Outcome outcome = machine.run();
        ++runs;
        expect(outcome.ok, setting.text() + ", messages of " + std::to_string(count) + " bytes arrive; got " + outcome.text);
        ranks.check_quiet();
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
      ranks.enqueue(1, {false, 0, what == 0 ? 4 : 3, what == 1 ? DType::i32 : DType::f32, to.data(), what == 2 ? 901u : 900u}, 1);
      const Outcome outcome = machine.run();
      ++runs;
      expect(outcome.ok, "a message that differs ends; got " + outcome.text);
      const ErrorRecord &here = ranks.error(0).records[record_of_sending(1)], &there = ranks.error(1).records[record_of_receiving(0)];
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
  expect(machine.run().ok && ranks.error(0).records[record_of_sending(1)].fault == static_cast<uint64_t>(Fault::timeout),
         "a send without a recv times out");
}

int run_suite(int argc, char** argv) {
  const std::string suite = argc > 1 ? argv[1] : "";
  auto number = [&](int i) { return argc > i ? std::strtoull(argv[i], nullptr, 10) : 0; };
  if (suite == "table") table(static_cast<int>(number(2)));
  else if (suite == "random") random_runs(number(2), static_cast<int>(number(3)), false);
  else if (suite == "mutants") random_runs(number(2), static_cast<int>(number(3)), true), streams(number(2));
  else if (suite == "faults") mismatches(), pairwise_mismatch(), absent(), message_faults();
  else if (suite == "streams") streams(number(2));
  else return std::puts("suites: table, random, mutants, faults, streams"), 2;
  std::printf("%d runs\n", runs);
  return 0;
}

}  // namespace
}  // namespace testing
}  // namespace pycomm::cuda

int main(int argc, char** argv) {
  try {
    return pycomm::cuda::testing::run_suite(argc, argv);
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
    return 1;
  }
}
