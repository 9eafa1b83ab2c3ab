// fiber_exchange.h -- a small kernel for the tests of fiber.h, the model of the collectives: fill, post a
// flag to every rank, wait for all flags, read from all, end barrier. Each Bug leaves out one of its
// orderings.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"

namespace pycomm::cuda::fiber {

inline constexpr int max_ranks = 4, max_blocks = 2, words_of_block = 70;

enum class Bug {
  none,
  sync_before_post,
  sync_after_wait,
  relaxed_post,
  relaxed_wait,
  gpu_post,
  gpu_wait,
  shared_race,
  no_end_barrier,
};

struct alignas(64) RankMemory {
  uint64_t data[max_blocks * words_of_block], result[max_blocks * words_of_block];
  uint64_t arrived[max_blocks][max_ranks], finished[max_blocks][max_ranks];
};

struct Exchange {
  RankMemory* ranks;
  int rank, num_ranks;
  uint64_t epoch;
  Bug bug;
};

struct PartialSums {
  uint64_t of[128];
};

inline void post_and_wait(FiberCtx& c, const Exchange& m,
                          uint64_t (RankMemory::*flags)[max_blocks][max_ranks], bool faulty) {
  const int peer = c.thread();
  if (peer >= m.num_ranks) return;
  uint64_t* theirs = &(m.ranks[peer].*flags)[c.block()][m.rank];
  const uint64_t* mine = &(m.ranks[m.rank].*flags)[c.block()][peer];
  if (faulty && m.bug == Bug::relaxed_post) c.store_relaxed(theirs, m.epoch, Scope::system);
  else c.store_release(theirs, m.epoch, faulty && m.bug == Bug::gpu_post ? Scope::gpu : Scope::system);
  const auto load = [&] {
    if (faulty && m.bug == Bug::relaxed_wait) return c.load_relaxed(mine, Scope::system);
    return c.load_acquire(mine, faulty && m.bug == Bug::gpu_wait ? Scope::gpu : Scope::system);
  };
  while (load() < m.epoch) c.relax(mine);
}

inline uint64_t value_of(int rank, int i, uint64_t epoch) { return 1000 * epoch + 100 * rank + i; }

inline void exchange_kernel(FiberCtx& c, const Exchange& m) {
  const int begin = c.block() * words_of_block, end = begin + words_of_block;
  RankMemory& own = m.ranks[m.rank];
  for (int i = begin + c.thread(); i < end; i += c.threads())
    c.st(&own.data[i], value_of(m.rank, i, m.epoch));
  if (m.bug != Bug::sync_before_post) c.sync();
  post_and_wait(c, m, &RankMemory::arrived, true);
  if (m.bug != Bug::sync_after_wait) c.sync();

  auto& sums = c.shared<PartialSums>();
  for (int i = begin; i < end;
       i++) {  // a thread reads from another rank than it has waited for; thread 0 adds
    if (c.thread() < m.num_ranks)
      c.st(&sums.of[c.thread()], c.ld(&m.ranks[(c.thread() + 1) % m.num_ranks].data[i]));
    if (m.bug != Bug::shared_race) c.sync();
    if (c.thread() == 0) {
      uint64_t sum = 0;
      for (int peer = 0; peer < m.num_ranks; peer++) sum += c.ld(&sums.of[peer]);
      c.st(&own.result[i], sum);
    }
    c.sync();
  }
  if (m.bug != Bug::no_end_barrier) post_and_wait(c, m, &RankMemory::finished, false);
}

inline void check_result(const Exchange& m, int blocks) {
  for (int i = 0; i < blocks * words_of_block; i++) {
    uint64_t expected = 0;
    for (int rank = 0; rank < m.num_ranks; rank++) expected += value_of(rank, i, m.epoch);
    if (m.ranks[m.rank].result[i] == expected || m.bug != Bug::none) continue;
    throw std::runtime_error("rank " + std::to_string(m.rank) + " word " + std::to_string(i) + " is wrong");
  }
}

inline Outcome run_exchange(int ranks, int blocks, int threads, Bug bug, const Options& options) {
  std::vector<RankMemory> memory(ranks);
  Machine machine(ranks, options);
  for (int rank = 0; rank < ranks; rank++) {
    for (uint64_t epoch = 1; epoch <= 3; epoch++) {
      const Exchange m{memory.data(), rank, ranks, epoch, bug};
      machine.launch(machine.stream(rank), blocks, threads, [=](FiberCtx& c) { exchange_kernel(c, m); });
      machine.host(machine.stream(rank), [=] { check_result(m, blocks); });
    }
  }
  return machine.run();
}

}  // namespace pycomm::cuda::fiber
