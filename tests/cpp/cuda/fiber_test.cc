// fiber_test.cc -- the runtime of fiber.h on small kernels. `fiber_test CASE` runs one case; it ends with
// "CASE ok" or says what is wrong.
//
// The cases fault_* leave out one ordering of the exchange kernel (fiber_exchange.h): under ThreadSanitizer
// each must be reported as a data race.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <thread>

#include "fiber_exchange.h"

using namespace pycomm::cuda;
using namespace pycomm::cuda::fiber;

namespace {

void check(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("FAILED %s\n", what.c_str());
  std::exit(1);
}

void check_outcome(const Outcome& outcome) { check(outcome.ok, outcome.text); }

void check_text(const Outcome& outcome, const std::string& expected) {
  check(!outcome.ok && outcome.text.find(expected) != std::string::npos,
        "expected '" + expected + "', got: " + outcome.text);
}

// Then SIGALRM ends a process: the waits of run_launch have no bound of their own.
constexpr int seconds = 50;

// ---- exchange

void exchange() {
  for (int ranks : {1, 2, 4}) {
    for (uint64_t seed = 0; seed < 4; seed++)
      check_outcome(run_exchange(ranks, 2, 8, Bug::none, {.seed = seed, .preempt = uint32_t(seed) * 2}));
  }
}

void fault(Bug bug) {
  for (uint64_t seed = 1; seed < 4; seed++) run_exchange(2, 2, 8, bug, {.seed = seed, .preempt = 3});
}

// Without ThreadSanitizer: the values themselves show a missing end barrier, in some order.
void values_show_fault() {
  int wrong = 0;
  std::vector<RankMemory> memory(2);
  for (uint64_t seed = 1; seed <= 20; seed++) {
    Machine machine(2, {.seed = seed, .preempt = 3});
    for (RankMemory& m : memory) m = {};
    for (int rank = 0; rank < 2; rank++) {
      for (uint64_t epoch = 1; epoch <= 3; epoch++) {
        const Exchange m{memory.data(), rank, 2, epoch, Bug::no_end_barrier};
        machine.launch(machine.stream(rank), 2, 8, [=](FiberCtx& c) { exchange_kernel(c, m); });
        machine.host(machine.stream(rank), [=] {
          Exchange strict = m;
          strict.bug = Bug::none;
          check_result(strict, 2);
        });
      }
    }
    wrong += !machine.run().ok;
  }
  check(wrong > 0, "a missing end barrier is never seen");
  std::printf("missing end barrier seen in %d of 20 orders\n", wrong);
}

void same_seed_same_run() {
  const Options options{.seed = 5, .preempt = 2};
  const Outcome first = run_exchange(3, 2, 16, Bug::none, options),
                second = run_exchange(3, 2, 16, Bug::none, options);
  check_outcome(first);
  check(first.steps == second.steps, "the same seed must give the same run");
}

// ---- streams

void two_streams(bool with_event) {
  int value = 0, seen = 0;
  Machine machine(1, {.seed = 3});
  Stream &first = machine.stream(0, 0), &second = machine.stream(0, 1);
  machine.launch(first, 1, 4, [&](FiberCtx& c) {
    if (c.thread() == 3) c.st(&value, 42);
  });
  if (with_event) machine.wait(second, machine.record(first));
  machine.launch(second, 1, 4, [&](FiberCtx& c) {
    if (c.thread() == 2) c.st(&seen, c.ld(&value));
  });
  check_outcome(machine.run());
  check(!with_event || seen == 42, "an event orders two streams");
}

void stream_values() {
  alignas(8) uint32_t word = 0;
  int value = 0;
  Machine machine(2, {.seed = 2});
  machine.wait_value(machine.stream(0), &word, 7);
  machine.host(machine.stream(0), [&] { check(value == 42, "write_value and wait_value order two ranks"); });
  machine.write_value(machine.stream(0), &word, 8);
  machine.host(machine.stream(1), [&] { value = 42; });
  machine.write_value(machine.stream(1), &word, 7);
  machine.wait_value(machine.stream(1), &word, 8);
  machine.host(machine.stream(1), [&] { value = 43; });
  check_outcome(machine.run());
  machine.host(machine.stream(0), [&] { check(value == 43, "a second run goes on where the first ended"); });
  check_outcome(machine.run());
}

// ---- one block

struct Scratch {
  uint8_t bytes[100];
};
struct OtherScratch {
  uint64_t word;
};

void block_functions() {
  Machine machine(1, {.seed = 9, .preempt = 2});
  for (int launch = 0; launch < 2; launch++) {
    machine.launch(machine.stream(0), 2, 40, [](FiberCtx& c) {
      auto& scratch = c.shared<Scratch>();
      if (c.thread() == 0) {
        for (uint8_t byte : scratch.bytes) check(byte == 0xA5, "shared memory is poisoned in every launch");
        c.shared<OtherScratch>().word = 1;
        scratch.bytes[99] = 1;
      }
      c.sync();
      check(c.shared<Scratch>().bytes[99] == 1 && c.shared<OtherScratch>().word == 1,
            "one shared struct per type and block");
      const int lanes = c.thread() < 32 ? 32 : 8;
      for (int i = 0; i < 5; i++) {
        const uint64_t from = c.shuffle(uint64_t(100 * i + c.thread()), (c.thread() + i) % lanes);
        check(from == uint64_t(100 * i + c.thread() / 32 * 32 + (c.thread() + i) % lanes), "shuffle");
        check(c.sync_or(i == 3 && c.thread() == 39) == (i == 3), "sync_or");
      }
      if (c.thread() >= 33) return;
      c.sync();  // of those that have not ended
    });
  }
  check_outcome(machine.run());
}

void multimem() {
  alignas(16) float memory[2][8] = {{1, 2, 3, 4}, {10, 20, 30, 40}};
  std::byte* window =
      static_cast<std::byte*>(mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  Machine machine(2);
  machine.add_multicast(window, sizeof memory[0],
                        {reinterpret_cast<std::byte*>(memory[0]), reinterpret_cast<std::byte*>(memory[1])});
  machine.launch(machine.stream(1), 1, 1,
                 [=](FiberCtx& c) { c.multimem_store(window + 16, c.multimem_reduce<float>(window)); });
  check_outcome(machine.run());
  for (auto& copy : memory)
    check(copy[4] == 11 && copy[5] == 22 && copy[6] == 33 && copy[7] == 44, "multimem");
  machine.launch(machine.stream(0), 1, 1, [=](FiberCtx& c) { c.multimem_reduce<float>(window + 32); });
  check_text(machine.run(), "rank 0 kernel #0 block 0 thread 0: multimem: no multicast address");
}

void two_words() {
  alignas(16) U4 slot{};
  Machine machine(2, {.seed = 4, .preempt = 1});
  for (int rank = 0; rank < 2;
       rank++) {  // rank 0 sends 1, 3, .. and rank 1 answers 2, 4, ..: data and flag in each 8-byte word
    machine.launch(machine.stream(rank), 1, 1, [&slot, rank](FiberCtx& c) {
      for (uint32_t i = 1; i <= 40; i++) {
        if (i % 2 == uint32_t(1 - rank)) {
          c.st_words(&slot, {i * 10, i, i * 20, i});
          continue;
        }
        U4 v = c.ld_words(&slot);
        for (; v.y != i || v.w != i; v = c.ld_words(&slot)) c.relax(&slot);
        check(v.x == i * 10 && v.z == i * 20, "ld_words");
      }
    });
  }
  check_outcome(machine.run());
}

void counter() {
  uint64_t arrivals = 0;
  int value[3] = {};
  Machine machine(3, {.seed = 1, .preempt = 1});
  for (int rank = 0; rank < 3; rank++) {
    machine.launch(machine.stream(rank), 1, 2, [&, rank](FiberCtx& c) {
      if (c.thread() == 0) c.st(&value[rank], rank + 1);
      if (c.thread() == 0) c.add(&arrivals, 1, Scope::system);
      while (c.load_acquire(&arrivals, Scope::system) != 3) c.relax(&arrivals);
      check(c.ld(&value[0]) + c.ld(&value[1]) + c.ld(&value[2]) == 6, "add");
    });
  }
  check_outcome(machine.run());
}

// A loop that looks at a second word between the flag and relax(): a store in between wakes nobody. [Note:
// idle]
void missed_store() {
  for (uint64_t seed = 0; seed < 20; seed++) {
    alignas(16) uint64_t flags[2][2] = {};  // those of the two ranks on different 16 bytes
    uint64_t error = 0;
    Machine machine(2, {.seed = seed, .preempt = 1});
    for (int rank = 0; rank < 2; rank++) {
      machine.launch(machine.stream(rank), 1, 1, [&, rank](FiberCtx& c) {
        for (uint64_t i = 1; i <= 50; i++) {
          c.store_release(flags[1 - rank], i, Scope::system);
          while (c.load_acquire(flags[rank], Scope::system) < i && !c.load_relaxed(&error, Scope::system))
            c.relax(flags[rank]);
        }
      });
    }
    check_outcome(machine.run());
  }
}

// Blocks of one rank: gpu scope is enough, also against system scope.
void gpu_scope_in_rank() {
  uint64_t flag[2] = {};
  int value = 0;
  Machine machine(1, {.seed = 6, .preempt = 2});
  machine.launch(machine.stream(0), 3, 2, [&](FiberCtx& c) {
    if (c.thread() == 1) return;
    if (c.block() > 0) {
      while (!c.load_acquire(&flag[c.block() - 1], Scope::gpu)) c.relax(&flag[c.block() - 1]);
    }
    c.st(&value, c.ld(&value) + 1);
    if (c.block() == 0) c.store_release(&flag[0], 1, Scope::gpu);
    if (c.block() == 1) c.store_release(&flag[1], 1, Scope::system);
  });
  check_outcome(machine.run());
  check(value == 3, "gpu scope");
}

// ---- runs that must not succeed

void deadlock() {
  struct alignas(64) Control {
    uint64_t words[8];
  } control{};
  Machine machine(2);
  machine.name_range(&control, sizeof control, "rank 1 control");
  machine.launch(machine.stream(0), 1, 64, [](FiberCtx& c) { c.sync(); });
  machine.launch(machine.stream(1), 2, 64, [&](FiberCtx& c) {
    if (c.block() == 1 && c.thread() == 63) {
      while (!c.load_acquire(&control.words[2], Scope::system)) c.relax(&control.words[2]);
    }
    c.sync();
  });
  const Outcome outcome = machine.run();
  check(outcome.deadlock, "must be a deadlock");
  check_text(outcome, "rank 1 kernel #0 block 1 thread 63: waiting for rank 1 control + 16 (0x");
  check_text(outcome, "rank 1 kernel #0 block 1 threads 0-62: waiting in sync (63 of 64 threads are there)");
}

void wait_bounded(FiberCtx& c, const uint64_t* word, uint64_t* elapsed) {
  const uint64_t begin = c.now_ns();
  while (!c.load_acquire(word, Scope::system) && c.now_ns() - begin < 5'000'000'000) c.relax(word);
  if (elapsed) *elapsed = c.now_ns() - begin;
}

void timeouts() {
  uint64_t word = 0, elapsed = 0;
  Machine machine(1, {.timeouts = true});
  machine.launch(machine.stream(0), 1, 1, [&](FiberCtx& c) { wait_bounded(c, &word, &elapsed); });
  check_outcome(machine.run());
  check(elapsed == 5'000'000'000, "the clock goes on when nobody can run");
  machine.launch(machine.stream(0), 1, 1, [&](FiberCtx& c) {
    while (!c.load_acquire(&word, Scope::system)) c.relax(&word);
  });
  check(machine.run().deadlock, "but not for ever");
}

void traps() {
  alignas(16) std::byte memory[64];
  const auto run_one = [&](const Kernel& kernel) {
    Machine machine(2);
    machine.launch(machine.stream(1), 2, 4, [&](FiberCtx& c) {
      if (c.block() == 1 && c.thread() == 3) kernel(c);
    });
    return machine.run();
  };
  const std::string who = "FAULT: rank 1 kernel #0 block 1 thread 3: ";
  check_text(run_one([&](FiberCtx& c) { c.ld16(memory + 8); }), who + "ld16 at 0x");
  check_text(run_one([&](FiberCtx& c) { c.st16(memory + 8, {}); }),
             "which is misaligned: it must be a multiple of 16");
  check_text(run_one([&](FiberCtx& c) { c.ld(reinterpret_cast<uint32_t*>(memory + 2)); }), who + "ld at 0x");
  check_text(run_one([&](FiberCtx& c) { c.shuffle(0, 7); }), who + "shuffle: no such lane");
  check_text(run_one([&](FiberCtx&) { throw std::runtime_error("reason"); }), who + "threw: reason");
  uint64_t word = 0;
  const Kernel spin = [&](FiberCtx& c) {
    while (!c.load_relaxed(&word, Scope::gpu)) continue;
  };
  for (uint32_t preempt : {0, 1}) {
    Machine machine(1, {.preempt = preempt, .max_steps = 100000});
    machine.launch(machine.stream(0), 1, 2, spin);
    check_text(machine.run(), "TOO MANY STEPS");
  }
}

// ---- run_launch

void exchange_in_rank(RankMemory* memory, int rank, int ranks) {
  for (uint64_t epoch = 1; epoch <= 20; epoch++) {
    const Exchange m{memory, rank, ranks, epoch, Bug::none};
    check_outcome(run_launch(rank, 2, 8, [&](FiberCtx& c) { exchange_kernel(c, m); }));
    check_result(m, 2);
  }
}

void os_threads() {
  std::vector<RankMemory> memory(2);
  std::thread other([&] { exchange_in_rank(memory.data(), 1, 2); });
  exchange_in_rank(memory.data(), 0, 2);
  other.join();
  uint64_t word = 0, elapsed = 0;
  check_text(
      run_launch(5, 1, 1,
                 [&](FiberCtx& c) { c.ld(reinterpret_cast<int*>(reinterpret_cast<char*>(&word) + 1)); }),
      "rank 5 kernel");
  check_outcome(run_launch(5, 1, 1, [&](FiberCtx& c) {
    const uint64_t begin = c.now_ns();
    while (!c.load_acquire(&word, Scope::system) && (elapsed = c.now_ns() - begin) < 20'000'000)
      c.relax(&word);
  }));
  check(elapsed >= 20'000'000, "the clock is real");
  check_text(run_launch(0, 1, 2,
                        [](FiberCtx& c) {
                          if (c.thread() == 0) c.shuffle(0, 0);
                        }),
             "DEADLOCK");
}

void processes() {
  void* shared =
      mmap(nullptr, 2 * sizeof(RankMemory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* memory = static_cast<RankMemory*>(shared);
  const pid_t child = fork();
  if (child == 0) {
    alarm(seconds);
    exchange_in_rank(memory, 1, 2);
    _exit(0);
  }
  exchange_in_rank(memory, 0, 2);
  int status = -1;
  waitpid(child, &status, 0);
  check(status == 0, "the other process failed");
}

void large() { check_outcome(run_exchange(4, 2, 128, Bug::none, {.seed = 1, .preempt = 4})); }

// More fibers in a row than ThreadSanitizer may have at a time (8128).
void many_machines() {
  for (int i = 0; i < 150; i++) {
    Machine machine(1);
    machine.launch(machine.stream(0), 1, 64, [](FiberCtx& c) { c.sync(); });
    check_outcome(machine.run());
  }
}

const std::map<std::string, std::function<void()>> cases = {
    {"exchange", exchange},
    {"values_show_fault", values_show_fault},
    {"same_seed_same_run", same_seed_same_run},
    {"two_streams", [] { two_streams(true); }},
    {"stream_values", stream_values},
    {"block_functions", block_functions},
    {"multimem", multimem},
    {"words", two_words},
    {"counter", counter},
    {"deadlock", deadlock},
    {"timeouts", timeouts},
    {"traps", traps},
    {"os_threads", os_threads},
    {"processes", processes},
    {"large", large},
    {"many_machines", many_machines},
    {"missed_store", missed_store},
    {"gpu_scope_in_rank", gpu_scope_in_rank},
    {"fault_sync_before_post", [] { fault(Bug::sync_before_post); }},
    {"fault_sync_after_wait", [] { fault(Bug::sync_after_wait); }},
    {"fault_relaxed_post", [] { fault(Bug::relaxed_post); }},
    {"fault_relaxed_wait", [] { fault(Bug::relaxed_wait); }},
    {"fault_gpu_post", [] { fault(Bug::gpu_post); }},
    {"fault_gpu_wait", [] { fault(Bug::gpu_wait); }},
    {"fault_shared_race", [] { fault(Bug::shared_race); }},
    {"fault_no_end_barrier", [] { fault(Bug::no_end_barrier); }},
    {"fault_no_event", [] { two_streams(false); }},
};

}  // namespace

int main(int count, char** arguments) {
  const auto found = cases.find(count == 2 ? arguments[1] : "");
  if (found == cases.end()) {
    for (const auto& [name, function] : cases) std::printf("%s\n", name.c_str());
    return count == 1 ? 0 : 2;
  }
  alarm(seconds);
  found->second();
  std::printf("%s ok\n", arguments[1]);
}
