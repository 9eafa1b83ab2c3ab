// one_shot.cuh -- all_reduce of small buffers: data and flag in one word, one trip, no fence, no barrier.
//
// Every rank writes all its data into a place of its own in the arena of every peer, as 8-byte words {4 bytes
// of data, low half of the epoch}; 16-byte stores carry two. A word says itself whether it has come, so the
// reader polls the data and needs no flag. Every rank then reduces all, in rank order: all hold the same
// bits.
//
//            rank 0's arena           rank 1's arena
//   from 0   -                        a0 e a1 e | a2 e a3 e
//   from 1   b0 e b1 e | b2 e b3 e    -                          | a unit: 16 bytes, 8 of them data
//
// Cost: 2(n-1) * nbytes written per rank, one one-way latency. Source: NCCL's LL protocol.
//
// Two areas, by parity of the epoch, are enough: a rank writes words of epoch e+2 only when its kernel e+1 is
// over, which took the headers of all peers for e+1, so their kernels e, which read the words of epoch e, are
// over. With one area a fast peer overwrites words that this rank has not read. The header travels beside the
// data, relaxed: it brings no addresses here, and waiting for it costs nothing because it was written first.
//
// What could go wrong: a stale word with the right epoch. Words hold epoch - 2 or older, as every epoch that
// used the area left its own mark; marks repeat after 2^32 operations.
#pragma once

#include "movement.cuh"
#include "session.cuh"

namespace pycomm::cuda {

// Words of how many ranks a thread asks for at once, so that their round trips overlap.
inline constexpr int words_ahead = 4;

// 8 bytes of data; T has at most 8.
struct alignas(8) Unit {
  uint32_t low, high;
};

PC_FN uint64_t num_units(uint64_t nbytes) { return (nbytes + 7) / 8; }

// Unit i of a buffer whose last unit may be partial.
template <class T, class Ctx>
PC_FN Unit load_unit(Ctx& c, const std::byte* from, uint64_t i, uint64_t nbytes) {
  constexpr int width = 8 / sizeof(T);
  Pack<T, 8> pack = unpack<T, 8>(Unit{0, 0});
#pragma unroll
  for (int e = 0; e < width; ++e)
    if (i * 8 + e * sizeof(T) < nbytes)
      pack.element[e] = c.template ld<T>(reinterpret_cast<const T*>(from + i * 8) + e);
  return repack<Unit>(pack);
}

template <class T, class Ctx>
PC_FN void store_unit(Ctx& c, std::byte* to, uint64_t i, uint64_t nbytes, const Pack<T, 8>& pack) {
#pragma unroll
  for (int e = 0; e < Pack<T, 8>::size; ++e)
    if (i * 8 + e * sizeof(T) < nbytes)
      c.template st<T>(reinterpret_cast<T*>(to + i * 8) + e, pack.element[e]);
}

PC_FN bool marked(U4 words, uint32_t mark) { return words.y == mark && words.w == mark; }

template <class T, ReduceOp op, class Ctx>
PC_FN void one_shot(Ctx& c, const Args& a) {
  const Group& g = a.group;
  const uint64_t nbytes = a.in_bytes[0], units = num_units(nbytes);
  const uint64_t first = static_cast<uint64_t>(c.block()) * c.threads() + c.thread(),
                 stride = static_cast<uint64_t>(c.blocks()) * c.threads();
  Unit own{};  // asked for before the epoch, so that the two round trips overlap
  if (first < units) own = load_unit<T>(c, a.in_part[0], first, nbytes);
  auto mine = [&](uint64_t i) { return i == first ? own : load_unit<T>(c, a.in_part[0], i, nbytes); };
  Session<Ctx> session(c, a);
  session.announce(Ordering::relaxed);
  const uint64_t epoch = session.epoch();
  const uint32_t mark = static_cast<uint32_t>(epoch);
  if (a.stages & stage_fill)
    for (uint64_t i = first; i < units; i += stride) {
      const Unit unit = mine(i);
      for (int k = 1; k < g.world_size; ++k) {
        const int p = (g.rank + k) % g.world_size;
        c.st_words(words_of(g, p, g.rank, epoch) + i * 16, {unit.low, mark, unit.high, mark});
      }
    }
  if ((a.stages & stage_gather) && session.compare(Ordering::relaxed)) {
    constexpr int width = 8 / sizeof(T);
    bool came = true, late = false;
    for (uint64_t i = first; i < units && came; i += stride) {
      Acc<T> acc[width];
      for (int base = 0; base < g.world_size; base += words_ahead) {
        U4 words[words_ahead];
        auto place = [&](int p) { return words_of(g, g.rank, p, epoch) + i * 16; };
#pragma unroll
        for (int k = 0; k < words_ahead; ++k)
          if (base + k < g.world_size && base + k != g.rank) words[k] = c.ld_words(place(base + k));
#pragma unroll
        for (int k = 0; k < words_ahead; ++k) {
          const int p = base + k;
          if (p >= g.world_size || !came) break;
          Unit unit;
          if (p == g.rank) {
            unit = mine(i);
          } else {
            came = marked(words[k], mark) ||
                   spin(c, a, place(p), late, [&] { return marked(words[k] = c.ld_words(place(p)), mark); });
            if (!came) session.give_up(p, late);
            unit = {words[k].x, words[k].z};
          }
          const auto pack = unpack<T, 8>(unit);
#pragma unroll
          for (int e = 0; e < width; ++e) {
            const Acc<T> x = prepare<op>(a, to_acc(pack.element[e]));
            acc[e] = p == 0 ? x : combine<op>(acc[e], x);
          }
        }
      }
      Pack<T, 8> result;
#pragma unroll
      for (int e = 0; e < width; ++e) result.element[e] = from_acc<T>(conclude<op>(a, acc[e]));
      if (came) store_unit<T>(c, a.out_part[0], i, nbytes, result);
    }
  }
  session.end();
}

}  // namespace pycomm::cuda
