// fiber.cc -- the scheduler of the fibers. Compiled WITHOUT -fsanitize=thread, and without STL: [Note:
// instrumented and not].
//
// A fiber runs until it waits (relax, sync, shuffle), ends, or its budget of operations is used up
// (options.preempt). Then the next one is taken from the ring of runnable fibers, directly, without a return
// to the caller of run(). That caller, `main`, is switched to when a launch must be started (new fibers are
// created in its name, so that creation gives no edge between fibers), when nobody can run, and at the end.
//
// [Note: idle] A fiber sleeps until a store to its word. It may have looked at the word before it gave way
// for another reason, and missed the store. So when nobody can run, all sleepers look again, and only when
// that changes nothing (no store, no end, no barrier) several times is it a deadlock; or, with
// options.timeouts, the clock goes on by 100 ms and they look again, until 300 s have gone by.
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "fiber_core.h"
#include "fiber_switch.h"

extern "C" {
// Of libtsan; null in programs without it.
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_set_fiber_name(void* fiber, const char* name);
// Of libasan, which must know the bounds of the stack.
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom,
                                                           size_t* old_size);
}

namespace pycomm::cuda::fiber {

namespace {

constexpr size_t page = 4096;
constexpr size_t stack_bytes = 256 << 10;   // lazily touched; the lowest page is a guard
// Then a fiber gives way all the same: it may be polling without relax().
constexpr uint32_t operations_without_preemption = 4096;
constexpr uint64_t steps_of_a_busy_fiber = 64;            // what that counts against max_steps
constexpr int idle_rounds = 4;
constexpr uint64_t clock_step_ns = 100'000'000, clock_bound_ns = 300'000'000'000;

uint64_t next_random(Scheduler& s) {
  uint64_t z = s.random += 0x9e3779b97f4a7c15;  // splitmix64
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

// How many operations a fiber may do before it gives way.
uint32_t next_budget(Scheduler& s) {
  if (!s.options.preempt) return operations_without_preemption;
  return 1 + static_cast<uint32_t>(next_random(s) % (2 * uint64_t{s.options.preempt} - 1));
}

// ---- who runs

}  // namespace

void make_runnable(Scheduler& s, Fiber* f) {
  f->state = State::runnable;
  s.queue[(s.head + s.count++) % s.capacity] = f;
}

namespace {

// For a while one rank, or none, gets no turn if another can have it: equal speeds would hide faults between
// calls.
size_t random_place(Scheduler& s) {
  if (s.steps >= s.held_until) {
    s.held_until = s.steps + 64 + next_random(s) % 4096;
    s.held_rank = static_cast<int>(next_random(s) % (2 * s.ranks)) - s.ranks;
  }
  size_t place = 0;
  for (int attempt = 0; attempt < 4; attempt++) {
    place = (s.head + next_random(s) % s.count) % s.capacity;
    if (s.queue[place]->stream->rank != s.held_rank) break;
  }
  return place;
}

Fiber* take_next(Scheduler& s) {
  if (s.count == 0 || s.steps >= s.options.max_steps || s.ending != Ending::running) return nullptr;
  s.steps++;
  if (s.options.seed) {
    const size_t place = random_place(s);
    Fiber* chosen = s.queue[place];
    s.queue[place] = s.queue[s.head];
    s.queue[s.head] = chosen;
  }
  Fiber* f = s.queue[s.head];
  s.head = (s.head + 1) % s.capacity;
  s.count--;
  return f;
}

void switch_to(Fiber* from, Fiber* to) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to->tsan, 1);  // 1: the switch orders nothing
  void* fake_stack = nullptr;
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&fake_stack, to->stack, to->stack_size);
  pycomm_fiber_switch(&from->stack_pointer, to->stack_pointer);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

}  // namespace

void switch_away(Fiber* f) {
  Scheduler& s = *f->scheduler;
  Fiber* next = s.start_pending ? nullptr : take_next(s);
  if (!next) next = &s.main;
  if (next != f) switch_to(f, next);
}

uint32_t pass_turn(Fiber* f) {
  Scheduler& s = *f->scheduler;
  make_runnable(s, f);
  switch_away(f);
  return next_budget(s);
}

uint32_t give_way(Fiber* f) {
  Scheduler& s = *f->scheduler;
  if (!s.options.preempt) s.steps += steps_of_a_busy_fiber;
  return pass_turn(f);
}

void trap(Fiber* f, const char* what, const void* p, size_t bytes) {
  Scheduler& s = *f->scheduler;
  s.fault = {what, f, reinterpret_cast<uintptr_t>(p), bytes};
  s.ending = Ending::fault;
  switch_to(f, &s.main);
  __builtin_trap();  // nobody resumes it
}

namespace {

// ---- launches

void end_fiber(Fiber* f) {
  Scheduler& s = *f->scheduler;
  Block* b = f->block;
  f->state = State::ended;
  s.progress++;
  s.live--;
  if (--f->stream->live == 0) s.start_pending = true;
  if (--b->live > 0 && b->arrived == b->live)
    complete_barrier(s, b);  // as on the GPU: a barrier waits for threads that have not exited
  switch_away(f);
}

// What a stack runs for ever: one launch after the other, of whatever stream the fiber belongs to by then.
void fiber_main(void* argument) {
  auto* f = static_cast<Fiber*>(argument);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
  for (;;) {
    Launch* launch = f->stream->running;
    edge_from(&f->scheduler->start_key);
    if (launch->before) edge_from(&launch->before->key);
    launch->entry(launch, f, next_budget(*f->scheduler));
    edge_to(&launch->key);
    edge_to(&f->scheduler->end_key);
    end_fiber(f);
  }
}

void destroy_fiber(Fiber* f) {
  if (__tsan_destroy_fiber) __tsan_destroy_fiber(f->tsan);
  munmap(f->stack, stack_bytes);
  std::free(f);
}

// Fibers of Machines that are gone, linked by next_sleeper: ThreadSanitizer needs about 1 ms to create one.
// Whatever they did happens before the next Machine starts, since run() acquires it all, so they carry no
// edge that does not exist.
struct IdleFibers {
  Fiber* first;
  ~IdleFibers() {
    while (Fiber* f = first) {
      first = f->next_sleeper;
      destroy_fiber(f);
    }
  }
};
thread_local IdleFibers idle_fibers;

Fiber* create_fiber(Scheduler* s, StreamQueue* stream) {
  Fiber* f = s->polling ? nullptr : idle_fibers.first;
  if (f) {
    idle_fibers.first = f->next_sleeper;
  } else {
    f = static_cast<Fiber*>(std::calloc(1, sizeof(Fiber)));
    f->state = State::ended;
    f->stack = map_pages(stack_bytes);
    f->stack_size = stack_bytes;
    syscall(SYS_mprotect, f->stack, page, PROT_NONE);
    f->stack_pointer = prepare_stack(f->stack + stack_bytes, fiber_main, f);
    if (__tsan_create_fiber) f->tsan = __tsan_create_fiber(0);
  }
  f->scheduler = s;
  f->stream = stream;
  f->named_block = f->named_thread = -1;
  return f;
}

void give_back(Fiber* f) {
  if (f->scheduler->polling || f->state != State::ended) return destroy_fiber(f);
  f->next_sleeper = idle_fibers.first;
  idle_fibers.first = f;
}

void name_fiber(Fiber* f) {
  if (!__tsan_set_fiber_name || (f->named_block == f->block->index && f->named_thread == f->thread)) return;
  char name[64], stream[24] = "";
  if (f->stream->index) std::snprintf(stream, sizeof stream, ".stream%d", f->stream->index);
  std::snprintf(name, sizeof name, "rank%d%s.block%d.thread%d", f->stream->rank, stream, f->block->index,
                f->thread);
  __tsan_set_fiber_name(f->tsan, name);
  f->named_block = f->block->index;
  f->named_thread = f->thread;
}

void grow(Scheduler* s, StreamQueue* stream, int blocks, int fibers) {
  if (stream->num_blocks < blocks) {
    stream->blocks = static_cast<Block**>(std::realloc(stream->blocks, blocks * sizeof(Block*)));
    while (stream->num_blocks < blocks) {
      auto* b = static_cast<Block*>(std::calloc(1, sizeof(Block)));
      b->shared = map_pages(shared_bytes);
      stream->blocks[stream->num_blocks++] = b;
    }
  }
  if (stream->num_fibers >= fibers) return;
  s->total_fibers += fibers - stream->num_fibers;
  stream->fibers = static_cast<Fiber**>(std::realloc(stream->fibers, fibers * sizeof(Fiber*)));
  while (stream->num_fibers < fibers) stream->fibers[stream->num_fibers++] = create_fiber(s, stream);
  auto** queue = static_cast<Fiber**>(std::malloc((s->total_fibers + 1) * sizeof(Fiber*)));
  for (size_t i = 0; i < s->count; i++) queue[i] = s->queue[(s->head + i) % s->capacity];
  std::free(s->queue);
  s->queue = queue;
  s->head = 0;
  s->capacity = s->total_fibers + 1;
}

void start(Scheduler* s, StreamQueue* stream) {
  Launch* launch = stream->waiting;
  stream->running = launch;
  stream->waiting = launch->next;
  grow(s, stream, launch->blocks, launch->blocks * launch->threads);
  stream->live = launch->blocks * launch->threads;
  s->live += stream->live;
  edge_to(&s->start_key);  // after the allocations
  for (int index = 0; index < launch->blocks; index++) {
    Block* b = stream->blocks[index];
    b->index = index;
    b->threads = b->live = launch->threads;
    b->arrived = 0;
    b->any = false;
    b->shared_used = 0;
    b->shared_entries = 0;
    b->fibers = stream->fibers + static_cast<size_t>(index) * launch->threads;
    for (int warp = 0; warp * 32 < launch->threads; warp++) {
      const int lanes = launch->threads - warp * 32;
      b->warps[warp].lanes = lanes < 32 ? lanes : 32;
      b->warps[warp].arrived = 0;
    }
    for (int thread = 0; thread < launch->threads; thread++) {
      Fiber* f = b->fibers[thread];
      f->block = b;
      f->thread = thread;
      name_fiber(f);
      make_runnable(*s, f);
    }
  }
}

void start_launches(Scheduler* s) {
  s->start_pending = false;
  for (StreamQueue* stream = s->streams; stream; stream = stream->next) {
    if (stream->live == 0 && stream->waiting) start(s, stream);
  }
}

// ---- when nobody can run

int wake_all(Scheduler* s) {
  int woken = 0;
  for (StreamQueue* stream = s->streams; stream; stream = stream->next) {
    if (stream->live == 0) continue;
    const int fibers = stream->running->blocks * stream->running->threads;
    for (int i = 0; i < fibers; i++) {
      Fiber* f = stream->fibers[i];
      if (f->state != State::asleep) continue;
      f->granule->sleepers = nullptr;
      make_runnable(*s, f);
      woken++;
    }
  }
  return woken;
}

// False: nothing can change any more. [Note: idle]
bool go_on(Scheduler* s) {
  if (s->progress != s->progress_when_idle) {
    s->progress_when_idle = s->progress;
    s->idle_rounds = 0;
    s->idle_since_ns = s->clock_ns;
  }
  if (s->polling) {
    sched_yield();
  } else if (s->idle_rounds < idle_rounds) {
    s->idle_rounds++;
  } else if (s->options.timeouts && s->clock_ns - s->idle_since_ns < clock_bound_ns) {
    s->clock_ns += clock_step_ns;
  } else {
    return false;
  }
  return wake_all(s) > 0;
}

void find_stack(Fiber* main) {
  pthread_attr_t attributes;
  void* bottom;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &main->stack_size);
  pthread_attr_destroy(&attributes);
  main->stack = static_cast<std::byte*>(bottom);
}

// After a run that was cut short, the caller may free what fibers have used: they release, as if they had
// ended.
void release_all(Scheduler* s) {
  if (!__tsan_switch_to_fiber) return;
  for (StreamQueue* stream = s->streams; stream; stream = stream->next) {
    for (int i = 0; i < stream->num_fibers; i++) {
      __tsan_switch_to_fiber(stream->fibers[i]->tsan, 1);
      edge_to(&s->end_key);
      __tsan_switch_to_fiber(s->main.tsan, 1);
    }
  }
}

}  // namespace

// ---- for machine.cc

Scheduler* create_scheduler(int ranks, const Options& options, bool polling) {
  auto* s = static_cast<Scheduler*>(std::calloc(1, sizeof(Scheduler)));
  s->options = options;
  s->ranks = ranks;
  s->polling = polling;
  s->random = options.seed;
  s->main.scheduler = s;
  s->held_rank = -1;
  s->ending = Ending::done;
  return s;
}

void destroy_scheduler(Scheduler* s) {
  while (StreamQueue* stream = s->streams) {
    for (int i = stream->num_fibers - 1; i >= 0; i--) give_back(stream->fibers[i]);
    for (int i = 0; i < stream->num_blocks; i++) {
      munmap(stream->blocks[i]->shared, shared_bytes);
      std::free(stream->blocks[i]);
    }
    std::free(stream->fibers);
    std::free(stream->blocks);
    s->streams = stream->next;
    std::free(stream);
  }
  free_words(*s);
  std::free(s->queue);
  std::free(s);
}

StreamQueue* create_stream(Scheduler* s, int rank, int index) {
  auto* stream = static_cast<StreamQueue*>(std::calloc(1, sizeof(StreamQueue)));
  stream->rank = rank;
  stream->index = index;
  StreamQueue** end = &s->streams;
  while (*end) end = &(*end)->next;
  return *end = stream;
}

void enqueue(StreamQueue* stream, Launch* launch) {
  launch->number = stream->launches++;
  launch->before = stream->last;
  if (stream->waiting) stream->last->next = launch;
  else stream->waiting = launch;
  stream->last = launch;
}

Ending run(Scheduler* s) {
  s->ending = Ending::running;
  if (__sanitizer_start_switch_fiber) find_stack(&s->main);
  s->main.tsan = __tsan_get_current_fiber ? __tsan_get_current_fiber() : nullptr;
  if (s->polling) free_words(*s);
  create_words(*s);
  start_launches(s);
  while (s->ending == Ending::running) {
    if (s->start_pending) start_launches(s);
    if (Fiber* f = take_next(*s)) switch_to(&s->main, f);
    else if (s->count) s->ending = Ending::too_many_steps;
    else if (s->live == 0 && !s->start_pending) s->ending = Ending::done;
    else if (s->live && !go_on(s)) s->ending = Ending::deadlock;
  }
  if (s->ending != Ending::done) release_all(s);
  edge_from(&s->end_key);
  return s->ending;
}

Launch* launch_of(const Fiber* f) { return f->stream->running; }

}  // namespace pycomm::cuda::fiber
