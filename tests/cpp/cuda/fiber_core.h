// fiber_core.h -- what the scheduler (fiber.cc), the streams (machine.cc) and the kernels' context (fiber.h)
// share.
//
//   Scheduler -- StreamQueue (one per stream: launches in order, and a pool of Fibers and Blocks)
//                    +-- Block 0: Fiber 0 .. threads-1, barrier, warps, shared memory
//                    +-- Block 1 ...
//
// [Note: instrumented and not] fiber.cc and fiber_ops.cc are compiled without -fsanitize=thread: what it does
// while it runs on the stack of a fiber must not count as an access by that fiber. So it uses no STL either:
// an inline function of a template that kernels also use exists once in the program, and the linker may
// choose the instrumented copy, which then reports races inside the scheduler. For the same reason they call
// no memset, memcpy, malloc or mmap on behalf of a fiber: ThreadSanitizer intercepts them. Structs here are
// plain data.
//
// [Note: fibers belong to a stream] A fiber that has run a launch is used again by later launches of the same
// stream alone, where stream order gives the happens-before edge anyway, and by other Machines when its own
// is gone. Used elsewhere, it would carry an edge that does not exist, and hide races.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../../csrc/cuda/kernels/ctx.cuh"

namespace pycomm::cuda::fiber {

struct Options {
  uint64_t seed = 0;  // 0: first in, first out; else random order, with one rank held back at times
  uint32_t preempt = 0;  // k: give way at about one memory operation in k; 0: only where a fiber waits
  bool timeouts = false;  // when no fiber can run, the clock goes on instead of a deadlock being reported
  uint64_t max_steps = uint64_t{1} << 26;  // switches between fibers before the run is given up
};

struct Block;
struct Fiber;
struct Scheduler;
struct StreamQueue;

enum class State : uint8_t { runnable, asleep, in_sync, in_shuffle, ended };

// Sleepers on 16 aligned bytes (two words of one st_words), and the happens-before keys of its two words:
// [word][rank].
struct Granule {
  uintptr_t address;
  Granule* next;
  Fiber* sleepers;
  uint64_t* keys;
};

struct Fiber {
  void* stack_pointer;
  std::byte* stack;
  size_t stack_size;
  void* tsan;
  Scheduler* scheduler;
  StreamQueue* stream;
  Block* block;
  int thread;
  int named_block, named_thread;  // what its ThreadSanitizer name says
  State state;
  const void* word;  // asleep: what it waits for
  Granule* granule;
  Fiber* next_sleeper;
  uint64_t offered[2];  // shuffle, by generation
};

struct Warp {
  int lanes, arrived;
  unsigned generation;
};

struct SharedEntry {
  const void* tag;
  std::byte* memory;
};

struct Block {
  static constexpr int max_warps = 32, max_shared = 8;
  int index, threads, live, arrived;
  unsigned generation;
  bool any, result[2];  // sync_or; result by generation
  uint64_t keys[2];  // happens-before edges of sync, by generation
  Fiber** fibers;
  Warp warps[max_warps];
  std::byte* shared;
  size_t shared_used;
  int shared_entries;
  SharedEntry entries[max_shared];
};

struct Launch {
  uint64_t key = 0;  // its address: what its fibers release at their end and those of the next launch acquire
  Launch *before = nullptr, *next = nullptr;
  int blocks = 0, threads = 0, number = 0;
  const char* what = "";
  void (*entry)(Launch*, Fiber*, uint32_t budget) = nullptr;
};

struct StreamQueue {
  StreamQueue* next;
  int rank, index;
  Launch *running, *waiting, *last;  // `waiting`: first not yet started
  int launches;
  int live;  // fibers of `running` that have not ended
  Fiber** fibers;
  int num_fibers;
  Block** blocks;
  int num_blocks;
};

struct Fault {
  const char* what;
  Fiber* fiber;
  uintptr_t address;
  size_t bytes;
};

struct Multicast {
  const std::byte* base;
  size_t bytes;
  std::byte** members;
  int count;
};

enum class Ending { running, done, deadlock, too_many_steps, fault };

struct Scheduler {
  Options options;
  int ranks;
  bool polling;  // run_launch: others may store without this scheduler's knowledge; the clock is real
  Fiber main;
  Fiber** queue;  // ring of runnable fibers
  size_t head, count, capacity;
  uint64_t random, steps, held_until;
  int held_rank;
  uint64_t progress, progress_when_idle;
  int idle_rounds;
  uint64_t clock_ns, idle_since_ns;
  StreamQueue* streams;
  int live;  // fibers that have not ended
  int total_fibers;  // of all pools
  bool start_pending;
  Ending ending;
  Fault fault;
  Granule** table;
  std::byte *arena, *arena_end;
  void* arenas;
  uint64_t start_key, end_key;  // edges between the caller of run() and all fibers
  const Multicast* multicasts;
  int num_multicasts;
};

// ---- between fiber.cc and fiber_ops.cc
void make_runnable(Scheduler& s, Fiber* f);
void switch_away(Fiber* f);  // to whoever is next; returns when `f` is switched to
void complete_barrier(Scheduler& s, Block* b);
std::byte* map_pages(size_t bytes);
void edge_from(void* key);
void edge_to(void* key);
void create_words(Scheduler& s);
void free_words(Scheduler& s);
inline constexpr size_t shared_bytes = 228 << 10;  // per block, as on sm_90; lazily touched

// ---- for machine.cc
Scheduler* create_scheduler(int ranks, const Options& options, bool polling);
void destroy_scheduler(Scheduler* s);
StreamQueue* create_stream(Scheduler* s, int rank, int index);
void enqueue(StreamQueue* stream, Launch* launch);
Ending run(Scheduler* s);
Launch* launch_of(const Fiber* f);

// ---- for FiberCtx: `f` is the running fiber
uint32_t give_way(Fiber* f);  // operations until the next call
uint32_t pass_turn(Fiber* f);  // the same, of one that has not begun: it is not busy
void sleep_on(Fiber* f, const void* word);
void stored(Fiber* f, const void* word);  // wakes who sleeps on it
void acquire(Fiber* f, const void* word, Scope scope);
void release(Fiber* f, const void* word, Scope scope);
bool barrier(Fiber* f, bool flag);
uint64_t shuffle(Fiber* f, uint64_t value, int lane);
void* shared_memory(Fiber* f, const void* tag, size_t bytes);
const Multicast* find_multicast(Fiber* f, const void* p);
uint64_t now_ns(Fiber* f);
[[noreturn]] void trap(Fiber* f, const char* what, const void* p, size_t bytes);

}  // namespace pycomm::cuda::fiber
