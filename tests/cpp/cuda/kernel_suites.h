// kernel_suites.h -- what the suites of kernel_test.cc and kernel_faults.cc share: settings and forms.
#pragma once

#include "kernel_cases.h"

namespace pycomm::cuda::testing {

inline int runs = 0;

struct Setting {
  int world_size = 2;
  Memory memory = Memory::pointers;
  Protocol protocol = Protocol::resident;
  int blocks = 2, threads = 64;
  size_t unit = 0;  // as in RanksOptions
  fiber::Options options{};

  std::string text() const {
    const char* memories[] = {"pointers", "staged", "registered"};
    return std::to_string(world_size) + " ranks, " + memories[static_cast<int>(memory)] + ", " +
           (protocol == Protocol::resident ? "resident" : "stream_ordered") + ", " + std::to_string(blocks) +
           "x" + std::to_string(threads) + ", unit " + std::to_string(unit) + ", seed " +
           std::to_string(options.seed) + ", preempt " + std::to_string(options.preempt);
  }
};

inline RanksOptions options_of(const Setting& setting) {
  RanksOptions options;
  options.protocol = setting.protocol;
  options.pointers = setting.memory == Memory::pointers;
  options.blocks = setting.blocks;
  options.threads = setting.threads;
  options.unit = setting.unit;
  return options;
}

struct Form {
  OpKind kind;
  Algorithm algorithm;
};
inline constexpr Form forms[] = {
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
inline bool possible(const Form& form, const Setting& setting) {
  if (form.algorithm == Algorithm::multimem)
    return setting.memory == Memory::registered && setting.protocol == Protocol::resident;
  if (form.algorithm == Algorithm::copy_engine) return setting.memory == Memory::registered;
  return true;
}

inline void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("expected: " + what);
}

// kernel_faults.cc and kernel_faults_more.cc
void faults();
void more_faults();
void streams(uint64_t seed);
void records(uint64_t seed);

}  // namespace pycomm::cuda::testing
