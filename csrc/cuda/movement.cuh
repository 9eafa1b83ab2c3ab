// movement.cuh -- the work between two flags: copying a span of bytes, reducing several into one. All threads of a block take part.
//
// Thread t takes vectors t, t + threads, ... of 16 bytes, `unroll` of them at once, so that enough loads are under way to cover the latency
// of another GPU's memory. Spans whose ends or addresses are not multiples of 16 bytes are finished, or moved, in elements.
#pragma once

#include "number.cuh"

namespace pycomm::cuda {

inline constexpr int copy_unroll = 8;

// Vectors of a source that a thread adds at once: at most 4, and at most 16 accumulators in all. Those of the next source are loaded
// meanwhile.
template <class T>
inline constexpr int reduce_unroll = sizeof(T) == 1   ? 1
                                     : sizeof(T) == 2 ? 2
                                                      : 4;

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
PC_CALL void copy(Ctx& c, std::byte* to, const std::byte* from, uint64_t nbytes) {
  if (to == from || to == nullptr) return;
  uint64_t done = 0;
  if (aligned16(to) && aligned16(from)) {
    const uint64_t vectors = nbytes / 16, stride = c.threads();
    uint64_t i = c.thread();
    for (; i + (copy_unroll - 1) * stride < vectors; i += copy_unroll * stride) {
      U4 v[copy_unroll];
#pragma unroll
      for (int k = 0; k < copy_unroll; ++k) v[k] = c.ld16(from + (i + k * stride) * 16);
#pragma unroll
      for (int k = 0; k < copy_unroll; ++k) c.st16(to + (i + k * stride) * 16, v[k]);
    }
#pragma unroll 1
    for (; i < vectors; i += stride) c.st16(to + i * 16, c.ld16(from + i * 16));
    done = vectors * 16;
  } else if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & 3) == 0) {
    done = copy_units<uint32_t>(c, to, from, nbytes);
  }
  copy_units<uint8_t>(c, to + done, from + done, nbytes - done);
}

// The sources of a reduction, one per rank: rank order is the order of addition.
using Sources = const std::byte* const*;

// Vectors i, i + stride, ... of all sources into `to`, as many as there are, up to reduce_unroll. Guards instead of a second, shorter loop:
// half the code.
template <class T, ReduceOp op, class Ctx>
PC_FN void reduce_vectors(Ctx& c, const Args& a, std::byte* to, Sources sources, int n, uint64_t offset, uint64_t i, uint64_t vectors) {
  constexpr int width = Pack<T>::size, count = reduce_unroll<T>;
  const uint64_t stride = c.threads();
  Acc<T> acc[count][width];
  U4 next[count];
  auto load = [&](int s) {
#pragma unroll
    for (int k = 0; k < count; ++k)
      if (i + k * stride < vectors) next[k] = c.ld16(sources[s] + offset + (i + k * stride) * 16);
  };
  load(0);
#pragma unroll 1
  for (int s = 0; s < n; ++s) {
    U4 now[count];
#pragma unroll
    for (int k = 0; k < count; ++k) now[k] = next[k];
    if (s + 1 < n) load(s + 1);
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
#pragma unroll
  for (int k = 0; k < count; ++k) {
    if (i + k * stride >= vectors) break;
    Pack<T> pack;
#pragma unroll
    for (int e = 0; e < width; ++e) pack.element[e] = from_acc<T>(conclude<op>(a, acc[k][e]));
    c.st16(to + (i + k * stride) * 16, repack<U4>(pack));
  }
}

// Bytes [offset, offset + nbytes) of n sources into `to`. nbytes is a multiple of the element's size.
template <class T, ReduceOp op, class Ctx>
PC_FN void reduce(Ctx& c, const Args& a, std::byte* to, Sources sources, int n, uint64_t offset, uint64_t nbytes) {
  bool whole = aligned16(to);
  for (int s = 0; s < n; ++s) whole = whole && aligned16(sources[s] + offset);
  if (one_by_one<T>(a)) whole = false;
  uint64_t done = 0;
  if (whole) {
    const uint64_t vectors = nbytes / 16, stride = static_cast<uint64_t>(c.threads()) * reduce_unroll<T>;
#pragma unroll 1
    for (uint64_t i = c.thread(); i < vectors; i += stride) reduce_vectors<T, op>(c, a, to, sources, n, offset, i, vectors);
    done = vectors * 16;
  }
  const uint64_t count = nbytes / sizeof(T);
#pragma unroll 1
  for (uint64_t i = done / sizeof(T) + c.thread(); i < count; i += c.threads()) {
    auto element = [&](int s) { return prepare<op>(a, to_acc(c.template ld<T>(reinterpret_cast<const T*>(sources[s] + offset) + i))); };
    Acc<T> acc = element(0);
#pragma unroll 1
    for (int s = 1; s < n; ++s) acc = combine<op>(acc, element(s));
    c.template st<T>(reinterpret_cast<T*>(to) + i, from_acc<T>(conclude<op>(a, acc)));
  }
}

}  // namespace pycomm::cuda
