// fiber.h -- pycomm's CUDA kernels on a CPU: every CUDA thread of every rank is a fiber of one OS thread.
//
//   Machine machine(2, {.seed = 7, .preempt = 4});
//   for (int rank = 0; rank < 2; rank++) {
//     machine.host(machine.stream(rank), [=] { fill_input(rank); });
//     machine.launch(machine.stream(rank), blocks, threads,
//                    [=](FiberCtx& c) { all_reduce_kernel<float>(c, params[rank]); });
//     machine.host(machine.stream(rank), [=] { check_output(rank); });      // throw to fail
//   }
//   Outcome outcome = machine.run();
//   if (!outcome.ok) puts(outcome.text.c_str());
//
// Why fibers: blocks that wait for each other need all threads to make progress, which thread pools and
// emulators that run one block after the other do not give; one OS thread per CUDA thread is 5 to 150 times
// slower and hangs. Here waiting costs nothing, the order is a function of the seed, and "nobody can run" is
// a proof of deadlock, reported with rank, block, thread and address.
//
// Streams: a stream starts launch k+1 as soon as its launch k has ended, whatever other ranks do. That is
// what exposes missing end barriers and flags used again too early. All blocks of a launch are resident
// together, though under a random schedule some start late; how many fit on a GPU is modelled by the fake
// driver's launches (fake_processors.h).
//
// Under -fsanitize=thread (kernels and machine.cc with it, fiber.cc and fiber_ops.cc never: [Note:
// instrumented and not]) fibers are threads to ThreadSanitizer and a switch between them orders nothing.
// Flags are relaxed accesses, and happens-before edges are drawn by hand, per word and scope: what a rank
// releases at gpu scope, other ranks do not acquire. So it finds orders that are too weak on a machine, x86,
// that never shows them.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "fiber_core.h"

namespace pycomm::cuda::fiber {

#ifdef __SANITIZE_THREAD__
inline constexpr int load_order = __ATOMIC_RELAXED, store_order = __ATOMIC_RELAXED,
                     add_order = __ATOMIC_RELAXED;
inline constexpr bool draw_edges = true;
#else
inline constexpr int load_order = __ATOMIC_ACQUIRE, store_order = __ATOMIC_RELEASE,
                     add_order = __ATOMIC_ACQ_REL;
inline constexpr bool draw_edges = false;
#endif

// How multimem_reduce adds elements of type T: in Sum, rounded once. Specialise it for a type without
// conversions to and from float.
template <class T>
struct MultimemType {
  using Sum = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
  static Sum widen(T value) { return static_cast<Sum>(value); }
  static T narrow(Sum sum) { return static_cast<T>(sum); }
};

template <class T>
inline constexpr char shared_tag = 0;  // its address tells one kernel's shared struct from another's

// The context of ctx.cuh. Every memory operation may give way to another fiber; none but sync and shuffle
// needs the others to arrive.
class FiberCtx {
 public:
  static constexpr uint32_t polls = 1;

  FiberCtx(Fiber* self, const Launch* launch, uint32_t budget)
      : self_(self),
        thread_(self->thread),
        threads_(launch->threads),
        block_(self->block->index),
        blocks_(launch->blocks),
        budget_(budget) {}
  FiberCtx(const FiberCtx&) = delete;
  FiberCtx& operator=(const FiberCtx&) = delete;

  int thread() const { return thread_; }
  int threads() const { return threads_; }
  int block() const { return block_; }
  int blocks() const { return blocks_; }

  void sync() { barrier(self_, false); }
  bool sync_or(bool flag) { return barrier(self_, flag); }
  uint64_t shuffle(uint64_t value, int lane) { return fiber::shuffle(self_, value, lane); }

  template <class T>
  T& shared() {
    static_assert(alignof(T) <= 16 && std::is_trivially_destructible_v<T>);
    return *static_cast<T*>(shared_memory(self_, &shared_tag<T>, sizeof(T)));
  }

  U4 ld16(const void* p) {
    step(p, 16, "ld16");
    return load_quad(p);
  }
  void st16(void* p, U4 v) {
    step(p, 16, "st16");
    store_quad(p, v);
  }
  template <class T>
  T ld(const T* p) {
    step(p, size_or_alignment<T>(), "ld");
    return *p;
  }
  template <class T>
  void st(T* p, T v) {
    step(p, size_or_alignment<T>(), "st");
    *p = v;
  }

  U4 ld_words(const void* p) {
    auto* words = static_cast<const AnyWord*>(p);
    step(p, 16, "ld_words");
    const uint64_t a = __atomic_load_n(&words[0], __ATOMIC_RELAXED);
    step(p, 16, "ld_words");
    const uint64_t b = __atomic_load_n(&words[1], __ATOMIC_RELAXED);
    return {static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b),
            static_cast<uint32_t>(b >> 32)};
  }
  void st_words(void* p, U4 v) {
    auto* words = static_cast<AnyWord*>(p);
    step(p, 16, "st_words");
    __atomic_store_n(&words[0], v.x | static_cast<uint64_t>(v.y) << 32, __ATOMIC_RELAXED);
    stored(self_, &words[0]);
    step(p, 16, "st_words");
    __atomic_store_n(&words[1], v.z | static_cast<uint64_t>(v.w) << 32, __ATOMIC_RELAXED);
    stored(self_, &words[1]);
  }

  uint64_t load_acquire(const uint64_t* p, Scope scope) { return load_acquire_word(p, scope); }
  void store_release(uint64_t* p, uint64_t v, Scope scope) { store_release_word(p, v, scope); }
  uint64_t load_relaxed(const uint64_t* p, Scope) {
    step(p, 8, "load_relaxed");
    return __atomic_load_n(p, __ATOMIC_RELAXED);
  }
  void store_relaxed(uint64_t* p, uint64_t v, Scope) {
    step(p, 8, "store_relaxed");
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
    stored(self_, p);
  }
  uint64_t add(uint64_t* p, uint64_t n, Scope scope) {
    step(p, 8, "add");
    if (draw_edges) release(self_, p, scope);
    const uint64_t v = __atomic_fetch_add(p, n, add_order);
    if (draw_edges) acquire(self_, p, scope);
    stored(self_, p);
    return v;
  }

  void relax(const void* word) { sleep_on(self_, word); }
  uint64_t now_ns() {
    step(nullptr, 1, "now_ns");
    return fiber::now_ns(self_);
  }

  template <class T>
  U4 multimem_reduce(const void* p) {
    step(p, 16, "multimem_reduce");
    const Multicast* area = find_multicast(self_, p);
    const size_t offset = static_cast<const std::byte*>(p) - area->base;
    constexpr int items = 16 / sizeof(T);
    typename MultimemType<T>::Sum sums[items] = {};
    for (int member = 0; member < area->count; member++) {
      const U4 part = load_quad(area->members[member] + offset);
      T values[items];
      std::memcpy(values, &part, 16);
      for (int i = 0; i < items; i++)
        sums[i] = static_cast<typename MultimemType<T>::Sum>(sums[i] + MultimemType<T>::widen(values[i]));
    }
    T results[items];
    for (int i = 0; i < items; i++) results[i] = MultimemType<T>::narrow(sums[i]);
    U4 result;
    std::memcpy(&result, results, 16);
    return result;
  }
  void multimem_store(void* p, U4 v) {
    step(p, 16, "multimem_store");
    const Multicast* area = find_multicast(self_, p);
    const size_t offset = static_cast<std::byte*>(p) - area->base;
    for (int member = 0; member < area->count; member++) store_quad(area->members[member] + offset, v);
  }

 private:
  friend class Machine;
  using AnyWord [[gnu::may_alias]] = uint64_t;
  typedef uint32_t Quad
      __attribute__((vector_size(16), may_alias));  // one access of 16 bytes, of memory of any type

  static U4 load_quad(const void* p) {
    const Quad v = *static_cast<const Quad*>(p);
    return {v[0], v[1], v[2], v[3]};
  }
  static void store_quad(void* p, U4 v) { *static_cast<Quad*>(p) = Quad{v.x, v.y, v.z, v.w}; }

  // Before every operation: is the address good, and is it time to give way?
  void step(const void* p, size_t alignment, const char* what) {
    if (reinterpret_cast<uintptr_t>(p) % alignment) trap(self_, what, p, alignment);
    if (--budget_ == 0) budget_ = give_way(self_);
  }
  template <class T>
  static constexpr size_t size_or_alignment() {
    return sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0 ? sizeof(T) : alignof(T);
  }

  // Also for the 32-bit words of stream memory operations.
  template <class Word>
  Word load_acquire_word(const Word* p, Scope scope) {
    step(p, sizeof(Word), "load_acquire");
    const Word v = __atomic_load_n(p, load_order);
    if (draw_edges) acquire(self_, p, scope);
    return v;
  }
  template <class Word>
  void store_release_word(Word* p, Word v, Scope scope) {
    step(p, sizeof(Word), "store_release");
    if (draw_edges) release(self_, p, scope);
    __atomic_store_n(p, v, store_order);
    stored(self_, p);
  }

  Fiber* self_;
  int thread_, threads_, block_, blocks_;
  uint32_t budget_;  // operations left until give_way
};

using Kernel = std::function<void(FiberCtx&)>;

struct Outcome {
  bool ok;
  bool deadlock;
  std::string text;  // why not ok: who waits where, or which thread did what
  uint64_t steps;
};

class Stream;

// A point in a stream: reached when all that was enqueued before it has ended.
struct Event {
  uint64_t* word;
};

// All ranks of one test. Calls enqueue; run() executes. Not thread-safe; lives until the memory it works on
// is no longer needed.
class Machine {
 public:
  explicit Machine(int ranks, const Options& options = {});
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Streams of a rank run in order each and concurrently with each other.
  Stream& stream(int rank, int index = 0);
  void launch(Stream& stream, int blocks, int threads, Kernel kernel);
  // Runs a function as the rank's one thread; an exception ends the run.
  void host(Stream& stream, std::function<void()> function);
  // Stream memory operations, as of cuStreamBatchMemOp (write, wait for equal): release and acquire at
  // system scope.
  void write_value(Stream& stream, uint32_t* word, uint32_t value);
  void wait_value(Stream& stream, const uint32_t* word, uint32_t value);
  Event record(Stream& stream);
  void wait(Stream& stream, Event event);

  // multimem_* on [base, base + bytes) act on the same offset of every member. `base` is an address range
  // that nothing else uses.
  void add_multicast(void* base, size_t bytes, std::vector<std::byte*> members);
  // Reports say `name` + offset for addresses in this range.
  void name_range(const void* begin, size_t bytes, std::string name);

  // Runs all that is enqueued. May be called again after more was enqueued, unless a run was not ok.
  Outcome run();

 private:
  void push(Stream& stream, int blocks, int threads, const char* what, Kernel kernel);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One launch, run to its end inside the calling OS thread; for a CUDA driver made of host threads or
// processes. Others, in this process or not, may store to the same memory at the same time: a fiber in
// relax() polls, with sched_yield when all fibers wait, and now_ns() is the real clock. Safe to call from any
// number of OS threads. It ends when the kernel ends: bound the kernel's own waits. Of `options`, timeouts
// and max_steps have no meaning here.
Outcome run_launch(int rank_label, int blocks, int threads, const Kernel& kernel, const Options& options = {},
                   const std::vector<Multicast>& multicasts = {});

}  // namespace pycomm::cuda::fiber
