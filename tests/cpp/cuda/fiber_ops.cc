// fiber_ops.cc -- what a running fiber does to others: words with their sleepers and edges, the barrier,
// shuffle, shared memory. Compiled WITHOUT -fsanitize=thread, and without STL: [Note: instrumented and not].
//
// [Note: edges] With ThreadSanitizer flags are relaxed accesses, and the happens-before edges of release and
// acquire are drawn by hand, to and from keys: the word's address for system scope, a cell per word and rank
// for gpu scope. Two operations pair if each one's scope includes the other's thread, so system and gpu meet
// within a rank only.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "fiber_core.h"

extern "C" {
// Of libtsan; null in programs without it.
__attribute__((weak)) void __tsan_acquire(void* key);
__attribute__((weak)) void __tsan_release(void* key);
}

namespace pycomm::cuda::fiber {

namespace {

constexpr size_t arena_bytes = 1 << 20;
constexpr size_t table_size = 1 << 16;

}  // namespace

// Not mmap(): ThreadSanitizer would see a write by the fiber that happens to run.
std::byte* map_pages(size_t bytes) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const long address = syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0L);
  if (address == -1) {
    std::perror("fiber.cc: mmap");
    std::abort();
  }
  return reinterpret_cast<std::byte*>(address);
}

void edge_from(void* key) {
  if (__tsan_acquire) __tsan_acquire(key);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);  // flags are relaxed accesses in programs with ThreadSanitizer
}

void edge_to(void* key) {
  __atomic_thread_fence(__ATOMIC_RELEASE);
  if (__tsan_release) __tsan_release(key);
}

// ---- words

namespace {

void* from_arena(Scheduler& s, size_t bytes) {
  if (static_cast<size_t>(s.arena_end - s.arena) < bytes) {
    std::byte* chunk = map_pages(arena_bytes);
    *reinterpret_cast<void**>(chunk) = s.arenas;
    s.arenas = chunk;
    s.arena = chunk + 64;
    s.arena_end = chunk + arena_bytes;
  }
  std::byte* memory = s.arena;
  s.arena += (bytes + 15) / 16 * 16;
  return memory;
}

Granule* granule_of(Scheduler& s, const void* word, bool create) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(word) & ~uintptr_t{15};
  Granule** bucket = &s.table[(address * 0x9e3779b97f4a7c15) >> 48];
  for (Granule* g = *bucket; g; g = g->next) {
    if (g->address == address) return g;
  }
  if (!create) return nullptr;
  auto* g = static_cast<Granule*>(from_arena(s, sizeof(Granule)));
  *g = {address, *bucket, nullptr, nullptr};
  *bucket = g;
  return g;
}

// Keys of happens-before edges. system: the word's own address. gpu: one per word and rank.
void* system_key(const void* word) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(word) & ~uintptr_t{7});
}

void* rank_key(Fiber* f, const void* word) {
  Scheduler& s = *f->scheduler;
  const int rank = f->stream->rank;
  if (s.polling)
    return static_cast<std::byte*>(system_key(word)) + 1 + rank % 7;  // the same in all OS threads
  Granule* g = granule_of(s, word, true);
  if (!g->keys) g->keys = static_cast<uint64_t*>(from_arena(s, 2 * s.ranks * sizeof(uint64_t)));
  return &g->keys[(reinterpret_cast<uintptr_t>(word) >> 3 & 1) * s.ranks + rank];
}

}  // namespace

void create_words(Scheduler& s) {
  if (!s.table) s.table = reinterpret_cast<Granule**>(map_pages(table_size * sizeof(Granule*)));
}

void free_words(Scheduler& s) {
  while (s.arenas) {
    void* before = *static_cast<void**>(s.arenas);
    munmap(s.arenas, arena_bytes);
    s.arenas = before;
  }
  s.arena = s.arena_end = nullptr;
  if (s.table) munmap(s.table, table_size * sizeof(Granule*));
  s.table = nullptr;
}

void sleep_on(Fiber* f, const void* word) {
  Granule* g = granule_of(*f->scheduler, word, true);
  f->state = State::asleep;
  f->word = word;
  f->granule = g;
  f->next_sleeper = g->sleepers;
  g->sleepers = f;
  switch_away(f);
}

void stored(Fiber* f, const void* word) {
  Scheduler& s = *f->scheduler;
  s.progress++;
  Granule* g = granule_of(s, word, false);
  if (!g) return;
  Fiber* sleeper = g->sleepers;
  g->sleepers = nullptr;
  while (sleeper) {
    Fiber* next = sleeper->next_sleeper;
    make_runnable(s, sleeper);
    sleeper = next;
  }
}

void acquire(Fiber* f, const void* word, Scope scope) {
  if (!__tsan_acquire) return;
  if (scope == Scope::system) edge_from(system_key(word));
  edge_from(rank_key(f, word));
}

void release(Fiber* f, const void* word, Scope scope) {
  if (!__tsan_release) return;
  if (scope == Scope::system) edge_to(system_key(word));
  edge_to(rank_key(f, word));
}

// ---- barriers

void complete_barrier(Scheduler& s, Block* b) {
  b->result[b->generation & 1] = b->any;
  b->any = false;
  b->arrived = 0;
  b->generation++;
  s.progress++;
  for (int i = 0; i < b->threads; i++) {
    if (b->fibers[i]->state == State::in_sync) make_runnable(s, b->fibers[i]);
  }
}

bool barrier(Fiber* f, bool flag) {
  Scheduler& s = *f->scheduler;
  Block* b = f->block;
  const unsigned phase =
      b->generation &
      1;  // two keys: who is early at the next barrier must not give an edge to who leaves this one
  edge_to(&b->keys[phase]);
  b->any |= flag;
  if (++b->arrived == b->live) {
    complete_barrier(s, b);
  } else {
    f->state = State::in_sync;
    switch_away(f);
  }
  edge_from(&b->keys[phase]);
  return b->result[phase];
}

uint64_t shuffle(Fiber* f, uint64_t value, int lane) {
  Scheduler& s = *f->scheduler;
  const int first = f->thread / 32 * 32;
  Warp& warp = f->block->warps[f->thread / 32];
  if (lane < 0 || lane >= warp.lanes)
    trap(f, "shuffle: no such lane in this warp", nullptr, static_cast<size_t>(lane));
  const unsigned phase = warp.generation & 1;
  f->offered[phase] = value;
  if (++warp.arrived == warp.lanes) {
    warp.arrived = 0;
    warp.generation++;
    s.progress++;
    for (int i = first; i < first + warp.lanes; i++) {
      if (f->block->fibers[i]->state == State::in_shuffle) make_runnable(s, f->block->fibers[i]);
    }
  } else {
    f->state = State::in_shuffle;
    switch_away(f);
  }
  return f->block->fibers[first + lane]->offered[phase];
}

void* shared_memory(Fiber* f, const void* tag, size_t bytes) {
  Block* b = f->block;
  for (int i = 0; i < b->shared_entries; i++) {
    if (b->entries[i].tag == tag) return b->entries[i].memory;
  }
  const size_t rounded = (bytes + 15) / 16 * 16;
  if (b->shared_entries == Block::max_shared || b->shared_used + rounded > shared_bytes) {
    trap(f, "shared: more shared memory than a block has", nullptr, bytes);
  }
  std::byte* memory = b->shared + b->shared_used;
  b->shared_used += rounded;
  b->entries[b->shared_entries++] = {tag, memory};
  for (size_t i = 0; i < rounded; i++) {  // not memset: see the head of this file
    *static_cast<volatile std::byte*>(memory + i) = std::byte{0xA5};
  }
  return memory;
}

const Multicast* find_multicast(Fiber* f, const void* p) {
  const Scheduler& s = *f->scheduler;
  const auto address = static_cast<const std::byte*>(p);
  for (int i = 0; i < s.num_multicasts; i++) {
    if (address >= s.multicasts[i].base && address < s.multicasts[i].base + s.multicasts[i].bytes)
      return &s.multicasts[i];
  }
  trap(f, "multimem: no multicast address", p, 16);
}

uint64_t now_ns(Fiber* f) {
  if (!f->scheduler->polling) return f->scheduler->clock_ns;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace pycomm::cuda::fiber
