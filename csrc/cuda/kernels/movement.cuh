// movement.cuh -- the work between two flags: copying a span of bytes, reducing several into one. All threads
// of a block take part.
//
// Data move as vectors of 16 bytes. A warp takes a tile of 32 * unroll of them in a row, a thread every 32nd
// of the tile: so a thread has `unroll` loads under way, which covers the latency of another GPU's memory,
// and its addresses are one and constant distances from it. Spans whose ends or addresses are not multiples
// of 16 bytes are finished, or moved, in elements.
#pragma once

#include "number.cuh"

namespace pycomm::cuda {

inline constexpr int copy_unroll = 8;

// Vectors of a source that a thread adds at once: at most 4, and at most 16 accumulators in all. Those of the
// next sources are loaded meanwhile, of as many that 4 vectors of a thread are under way.
template <class T>
inline constexpr int reduce_unroll = sizeof(T) == 1   ? 1
                                     : sizeof(T) == 2 ? 2
                                                      : 4;
template <class T>
inline constexpr int reduce_ahead = 4 / reduce_unroll<T>;

inline constexpr int warp = 32;
inline constexpr int tile_step = warp * 16;  // bytes from one vector of a thread to its next

// Threads that take tiles: those of whole warps, which on a GPU are all.
template <class Ctx>
PC_FN int tiled_threads(Ctx& c) {
  return c.threads() / warp * warp;
}

// Where this thread's first vector lies, in vectors.
template <int unroll, class Ctx>
PC_FN uint64_t first_of_tile(Ctx& c) {
  const uint32_t t = c.thread();
  return t / warp * (warp * unroll) + t % warp;
}

PC_FN bool aligned16(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

// Units of U (uint8_t ... U4) of a span; returns the bytes it moved.
template <class U, class Ctx>
PC_FN uint64_t copy_units(Ctx& c, std::byte* to, const std::byte* from, uint64_t nbytes) {
  const uint64_t count = nbytes / sizeof(U);
#pragma unroll 1
  for (uint64_t i = c.thread(); i < count; i += c.threads())
    c.template st<U>(reinterpret_cast<U*>(to) + i, c.template ld<U>(reinterpret_cast<const U*>(from) + i));
  return count * sizeof(U);
}

template <class Ctx>
PC_FN void copy(Ctx& c, std::byte* to, const std::byte* from, uint64_t nbytes) {
  if (to == from || to == nullptr) return;
  uint64_t done = 0;
  if (aligned16(to) && aligned16(from)) {
    const uint64_t vectors = nbytes / 16, round = static_cast<uint64_t>(tiled_threads(c)) * copy_unroll;
    uint64_t base = 0;
#pragma unroll 1
    for (; round && base + round <= vectors; base += round) {
      if (c.thread() >= tiled_threads(c)) continue;
      const uint64_t at = (base + first_of_tile<copy_unroll>(c)) * 16;
      U4 v[copy_unroll];
#pragma unroll
      for (int k = 0; k < copy_unroll; ++k) v[k] = c.ld16(from + at + k * tile_step);
#pragma unroll
      for (int k = 0; k < copy_unroll; ++k) c.st16(to + at + k * tile_step, v[k]);
    }
#pragma unroll 1
    for (uint64_t i = base + c.thread(); i < vectors; i += c.threads())
      c.st16(to + i * 16, c.ld16(from + i * 16));
    done = vectors * 16;
  } else if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & 3) == 0) {
    done = copy_units<uint32_t>(c, to, from, nbytes);
  }
  copy_units<uint8_t>(c, to + done, from + done, nbytes - done);
}

// Spans of different places. Where all are short, copy() for each would wait for a round trip after the
// other, as a thread has at most one vector of each: here it has one of each of copy_unroll spans under way.
template <class Ctx>
PC_FN void copy_several(Ctx& c, std::byte* const* to, const std::byte* const* from, const uint64_t* nbytes,
                        int count) {
  bool together = true;
  for (int s = 0; s < count; ++s)
    together = together && aligned16(to[s]) && aligned16(from[s]) &&
               nbytes[s] < static_cast<uint64_t>(c.threads()) * 16 * copy_unroll;
  if (!together) {
#pragma unroll 1
    for (int s = 0; s < count; ++s) copy(c, to[s], from[s], nbytes[s]);
    return;
  }
#pragma unroll 1
  for (int base = 0; base < count; base += copy_unroll) {
    uint64_t longest = 0;
    for (int s = base; s < count && s < base + copy_unroll; ++s)
      longest = nbytes[s] > longest ? nbytes[s] : longest;
#pragma unroll 1
    for (uint64_t at = static_cast<uint64_t>(c.thread()) * 16; at + 16 <= longest; at += c.threads() * 16) {
      U4 v[copy_unroll];
#pragma unroll
      for (int k = 0; k < copy_unroll; ++k)
        if (base + k < count && at + 16 <= nbytes[base + k]) v[k] = c.ld16(from[base + k] + at);
#pragma unroll
      for (int k = 0; k < copy_unroll; ++k)
        if (base + k < count && at + 16 <= nbytes[base + k]) c.st16(to[base + k] + at, v[k]);
    }
  }
#pragma unroll 1
  for (int i = c.thread(); i < count * 16; i += c.threads()) {  // what is left of each
    const int s = i / 16;
    const uint64_t at = nbytes[s] / 16 * 16 + i % 16;
    if (at < nbytes[s])
      c.template st<uint8_t>(reinterpret_cast<uint8_t*>(to[s] + at),
                             c.template ld<uint8_t>(reinterpret_cast<const uint8_t*>(from[s] + at)));
  }
}

// The sources of a reduction, one per rank: rank order is the order of addition. Its result goes to one place
// or several.
using Sources = const std::byte* const*;
struct Targets {
  std::byte* const* data;
  int count;
};

// The vectors of this thread in the tile at byte `at` of every source into the targets: those of its
// reduce_unroll that begin before `end`. Guards instead of a second loop for the last tile: half the code.
template <class T, ReduceOp op, class Ctx>
PC_FN void reduce_vectors(Ctx& c, const Args& a, Targets targets, Sources sources, int n, uint64_t at,
                          uint64_t end) {
  constexpr int width = Pack<T>::size, count = reduce_unroll<T>, ahead = reduce_ahead<T>;
  Acc<T> acc[count][width];
  U4 next[ahead][count];
  const int here = least((end - at + tile_step - 1) / tile_step, static_cast<uint64_t>(count));
  auto load = [&](U4(&to)[count], int s) {
    const std::byte* from = sources[s] + at;
#pragma unroll
    for (int k = 0; k < count; ++k)
      if (k < here) to[k] = c.ld16(from + k * tile_step);
  };
#pragma unroll
  for (int d = 0; d < ahead; ++d)
    if (d < n) load(next[d], d);
#pragma unroll 1
  for (int base = 0; base < n; base += ahead) {
#pragma unroll
    for (int d = 0; d < ahead; ++d) {
      const int s = base + d;
      if (s >= n) break;
      U4 now[count];
#pragma unroll
      for (int k = 0; k < count; ++k) now[k] = next[d][k];
      if (s + ahead < n) load(next[d], s + ahead);
#pragma unroll
      for (int k = 0; k < count; ++k) {
        const auto pack = unpack<T, 16>(now[k]);
#pragma unroll
        for (int e = 0; e < width; ++e) {
          const Acc<T> x = prepare<op>(a, to_acc(pack.element[e]));
          acc[k][e] = s == 0 ? x : combine<op>(acc[k][e], x);
        }
      }
    }
  }
#pragma unroll
  for (int k = 0; k < count; ++k) {
    if (k >= here) break;
    Pack<T> pack;
#pragma unroll
    for (int e = 0; e < width; ++e)
      pack.element[e] = from_acc<T>(divides_one_by_one<T> ? acc[k][e] : conclude<op>(a, acc[k][e]));
#pragma unroll 1
    for (int i = 0; i < targets.count; ++i) c.st16(targets.data[i] + at + k * tile_step, repack<U4>(pack));
  }
}

// nbytes of n sources into every target. nbytes is a multiple of the element's size.
template <class T, ReduceOp op, class Ctx>
PC_FN void reduce(Ctx& c, const Args& a, Targets targets, Sources sources, int n, uint64_t nbytes) {
  bool whole = true;
  for (int i = 0; i < targets.count; ++i) whole = whole && aligned16(targets.data[i]);
  for (int s = 0; s < n; ++s) whole = whole && aligned16(sources[s]);
  if (divides_one_by_one<T> && a.divide) whole = false;
  uint64_t done = 0;
  if (whole && tiled_threads(c)) {
    const uint64_t end = nbytes / 16 * 16,
                   round = static_cast<uint64_t>(tiled_threads(c)) * reduce_unroll<T> * 16;
    if (c.thread() < tiled_threads(c))
#pragma unroll 1
      for (uint64_t at = first_of_tile<reduce_unroll<T>>(c) * 16; at < end; at += round)
        reduce_vectors<T, op>(c, a, targets, sources, n, at, end);
    done = end;
  }
  const uint64_t count = nbytes / sizeof(T);
#pragma unroll 1
  for (uint64_t i = done / sizeof(T) + c.thread(); i < count; i += c.threads()) {
    auto element = [&](int s) {
      return prepare<op>(a, to_acc(c.template ld<T>(reinterpret_cast<const T*>(sources[s]) + i)));
    };
    Acc<T> acc = element(0);
#pragma unroll 1
    for (int s = 1; s < n; ++s) acc = combine<op>(acc, element(s));
    const T result = from_acc<T>(conclude<op>(a, acc));
#pragma unroll 1
    for (int k = 0; k < targets.count; ++k)
      c.template st<T>(reinterpret_cast<T*>(targets.data[k]) + i, result);
  }
}

}  // namespace pycomm::cuda
