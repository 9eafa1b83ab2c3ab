// kernel_test.cc -- the CUDA kernels, by way of the plans that a GPU would get, on the fiber machine.
//
//   kernel_test table WORLD_SIZE       every algorithm x memory x protocol x ugly sizes; every dtype x op
//   kernel_test random SEED RUNS       random calls back to back on every rank's stream, random schedule
//                                      with preemption
//   kernel_test forms WORLD_SIZE SEED  every algorithm x memory x protocol, random schedule: a pass for
//                                      programs with sanitizers
//   kernel_test values WORLD_SIZE      every dtype x op on any bits: NaN, infinities, denormals, -0.0
//   kernel_test mutants SEED RUNS      random calls, small: what a planted fault must not survive
//                                      (tests/test_cuda_mutants.py)
//   kernel_test rings SEED RUNS        long rings
//   kernel_test faults                 mismatches, missing ranks, stop, deadlock
//   kernel_test streams SEED           messages beside collectives, several streams per rank
//   kernel_test records SEED           the host reads what the kernels report
//
// Every run checks each rank's result right after the call and then writes over its buffers, as a caller may;
// prints the number of runs. Ends with status 1 and a text at the first failure.
#include <cstdio>
#include <random>

#include "kernel_suites.h"

namespace pycomm::cuda::testing {
namespace {

// Runs the cases one after the other on every rank's stream, as fast as each rank can; each `times` times.
void run_cases(const std::vector<Case>& cases, const Setting& setting, int times = 1) {
  Machine machine(setting.world_size, setting.options);
  Ranks ranks(machine, setting.world_size, options_of(setting));
  std::vector<std::unique_ptr<Instance>> instances;
  std::string done = times > 1 ? " (replayed)" : "";
  for (size_t i = 0; i < cases.size(); ++i) {
    instances.push_back(std::make_unique<Instance>(ranks, cases[i], setting.memory, i + 1));
    done += "\n  " + cases[i].text();
  }
  ++runs;
  try {
    for (int r = 0; r < setting.world_size; ++r)
      for (const auto& instance : instances) instance->enqueue(r, times);
    const Outcome outcome = machine.run();
    if (!outcome.ok) throw std::runtime_error(outcome.text);
    ranks.check_quiet();
  } catch (const std::exception& error) {
    throw std::runtime_error(setting.text() + ":" + done + "\n" + error.what());
  }
}

// all_to_all in stream order has one round through the staging for sizes that differ (Planner::pairwise).
bool takes_uneven(const Form& form, const Setting& setting, size_t count) {
  const bool one_round =
      setting.memory == Memory::staged && setting.protocol == Protocol::stream_ordered && setting.unit;
  if (form.algorithm == Algorithm::copy_engine) return false;
  if (form.kind == OpKind::all_to_all)
    return !one_round || (count + 1) * sizeof(float) <= 2 * setting.unit * align_bytes * setting.blocks;
  return form.kind == OpKind::all_gather || form.kind == OpKind::reduce_scatter;
}
bool reduces(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::reduce_scatter;
}

bool can_reduce(DType dtype, ReduceOp op) {
  const ReductionKey key = reduction_key(dtype, op);
  return reduce_supported(dtype, op) && is_built({Kernel::two_shot, key.dtype, key.op});
}

// A call and its ugly variants: uneven, in place, misaligned.
std::vector<Case> variants(const Form& form, const Setting& setting, size_t count) {
  Case c{.kind = form.kind,
         .algorithm = form.algorithm,
         .count = count,
         .root = static_cast<int>(count % setting.world_size)};
  if (form.algorithm == Algorithm::multimem) c.count = count / 4 * 4;
  c.rough = reduces(form.kind);
  std::vector<Case> cases{c};
  if (takes_uneven(form, setting, count)) cases.push_back(c), cases.back().uneven = true;
  if (form.algorithm != Algorithm::copy_engine) cases.push_back(c), cases.back().in_place = true;
  if (setting.memory != Memory::registered) cases.push_back(c), cases.back().misalign = 1;
  return cases;
}

template <class Visit>
void each_form(Setting setting, const Visit& visit) {
  for (Memory memory : {Memory::pointers, Memory::staged, Memory::registered})
    for (Protocol protocol : {Protocol::resident, Protocol::stream_ordered}) {
      setting.memory = memory;
      setting.protocol = protocol;
      for (const Form& form : forms)
        if (possible(form, setting)) visit(form, setting);
    }
}

void table(int world_size) {
  const size_t n = world_size;
  each_form({.world_size = world_size}, [&](const Form& form, Setting setting) {
    for (size_t count : {size_t{0}, size_t{1}, n - 1, n, n + 1, size_t{63}, size_t{1000}, size_t{4099}})
      run_cases(variants(form, setting, count), setting);
    // Many segments; several blocks, the last of them with little or nothing to do; threads that fill no
    // warp.
    setting.unit = 2;
    run_cases(variants(form, setting, 3001), setting);
    setting.unit = 5;
    setting.blocks = 4;
    setting.threads = 40;
    run_cases(variants(form, setting, 70001 / n), setting);
  });
  for (Memory memory : {Memory::pointers, Memory::staged})
    for (int dtype = 0; dtype < num_dtypes; ++dtype)
      for (int op = 0; op < num_reduce_ops; ++op) {
        const auto d = static_cast<DType>(dtype);
        const auto o = static_cast<ReduceOp>(op);
        std::vector<Case> cases;
        for (const Form& form : {forms[0], forms[1], forms[2], forms[4], forms[5]})
          if (can_reduce(d, o))
            cases.push_back(
                {.kind = form.kind, .algorithm = form.algorithm, .dtype = d, .op = o, .count = 331});
        if (op == 0)
          for (OpKind kind : {OpKind::broadcast, OpKind::all_gather, OpKind::all_to_all})
            cases.push_back({.kind = kind, .dtype = d, .count = 333});
        if (!cases.empty()) run_cases(cases, {.world_size = world_size, .memory = memory});
      }
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    if (can_reduce(dtype, ReduceOp::sum))
      run_cases({{.algorithm = Algorithm::multimem, .dtype = dtype, .count = 664}},
                {.world_size = world_size, .memory = Memory::registered});
}

// The oracle is the CPU's reduction: both promise the same bits.
void values(int world_size) {
  for (int dtype = 0; dtype < num_dtypes; ++dtype)
    for (int op = 0; op < num_reduce_ops; ++op) {
      std::vector<Case> cases;
      for (const Form& form : {forms[0], forms[1], forms[2], forms[5]})
        for (const size_t misalign : {size_t{0}, size_t{1}})
          if (can_reduce(static_cast<DType>(dtype), static_cast<ReduceOp>(op)))
            cases.push_back({.kind = form.kind,
                             .algorithm = form.algorithm,
                             .dtype = static_cast<DType>(dtype),
                             .op = static_cast<ReduceOp>(op),
                             .count = 131,
                             .misalign = misalign,
                             .special = true});
      if (!cases.empty()) run_cases(cases, {.world_size = world_size, .threads = 32});
    }
}

void each_form_once(int world_size, uint64_t seed) {
  Setting setting{
      .world_size = world_size, .threads = 32, .unit = 1, .options = {.seed = seed, .preempt = 24}};
  each_form(setting, [&](const Form& form, const Setting& s) { run_cases(variants(form, s, 301), s, 2); });
}

class Random {
 public:
  Random(uint64_t seed, bool small) : random_(seed), small_(small) {}

  Setting setting() {
    Setting setting;
    setting.world_size = small_ ? 2 + static_cast<int>(below(3)) : 1 + static_cast<int>(below(8));
    setting.memory = static_cast<Memory>(below(3));
    setting.protocol = below(3) == 0 ? Protocol::stream_ordered : Protocol::resident;
    setting.blocks = 1 + static_cast<int>(below(small_ ? 3 : 4));
    setting.threads = small_ ? 32 : std::max(setting.world_size, static_cast<int>(1 + below(100)));
    setting.unit = below(3) ? 1 + below(small_ ? 3 : 8) : 0;
    setting.options.seed = below(4) == 0 ? 0 : random_();
    setting.options.preempt = below(2) ? 0 : 4 + static_cast<uint32_t>(below(60));
    return setting;
  }

  Case next(const Form& form, const Setting& setting) {
    Case c{.kind = form.kind, .algorithm = form.algorithm};
    c.count = below(4) == 0 ? below(10) : below(small_ ? 900 : 4000);
    if (below(small_ ? 6 : 10) == 0)
      c.count = (small_ ? 17000 : 40000) / setting.world_size;  // more than one block
    c.root = static_cast<int>(below(setting.world_size));
    c.uneven = takes_uneven(form, setting, c.count) && below(3) == 0;
    c.in_place = form.algorithm != Algorithm::copy_engine && below(3) == 0;
    c.misalign = setting.memory != Memory::registered && below(3) == 0 ? 1 + below(5) : 0;
    if (form.algorithm == Algorithm::multimem) c.count = c.count / 4 * 4;
    else if (reduces(c.kind)) choose_type(c);
    return c;
  }

  size_t below(size_t n) { return static_cast<size_t>(random_() % n); }

 private:
  void choose_type(Case& c) {
    if (!small_) do {
        c.dtype = static_cast<DType>(below(num_dtypes));
        c.op = static_cast<ReduceOp>(below(num_reduce_ops));
      } while (!can_reduce(c.dtype, c.op));
    c.rough = c.op != ReduceOp::product && below(2);
  }

  std::mt19937_64 random_;
  const bool small_;
};

void random_runs(uint64_t seed, int count, bool small) {
  Random random(seed, small);
  for (int i = 0; i < count; ++i) {
    const Setting setting = random.setting();
    std::vector<Case> cases;
    for (size_t k = 3 + random.below(4); k > 0; --k) {
      const Form form = forms[random.below(std::size(forms))];
      if (possible(form, setting)) cases.push_back(random.next(form, setting));
    }
    if (!cases.empty()) run_cases(cases, setting, random.below(4) == 0 ? 3 : 1);
  }
}

// Rings of so many ranks that a sender can be more than ring_slots ahead: at most by the world size, so in
// others credits never matter.
void long_rings(uint64_t seed, int count) {
  Random random(seed, true);
  for (int i = 0; i < count; ++i) {
    Setting setting = random.setting();
    setting.world_size = 6 + static_cast<int>(random.below(3));
    setting.protocol = Protocol::resident;
    const Form ring{OpKind::all_reduce, Algorithm::ring};
    run_cases({random.next(ring, setting), random.next(ring, setting), random.next(ring, setting)}, setting);
  }
}

int run_suite(int argc, char** argv) {
  const std::string suite = argc > 1 ? argv[1] : "";
  auto number = [&](int i) { return argc > i ? std::strtoull(argv[i], nullptr, 10) : 0; };
  if (suite == "table") table(static_cast<int>(number(2)));
  else if (suite == "random") random_runs(number(2), static_cast<int>(number(3)), false);
  else if (suite == "forms") each_form_once(static_cast<int>(number(2)), number(3));
  else if (suite == "values") values(static_cast<int>(number(2)));
  else if (suite == "mutants") random_runs(number(2), static_cast<int>(number(3)), true);
  else if (suite == "rings") long_rings(number(2), static_cast<int>(number(3)));
  else if (suite == "faults") faults();
  else if (suite == "streams") streams(number(2));
  else if (suite == "records") records(number(2));
  else return std::puts("suites: table, random, forms, values, mutants, rings, faults, streams, records"), 2;
  std::printf("%d runs\n", runs);
  return 0;
}

}  // namespace
}  // namespace pycomm::cuda::testing

int main(int argc, char** argv) {
  try {
    return pycomm::cuda::testing::run_suite(argc, argv);
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
    return 1;
  }
}
