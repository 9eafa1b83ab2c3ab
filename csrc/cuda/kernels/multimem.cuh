// multimem.cuh -- all_reduce in the switch: sm_90 and later with NVSwitch, buffers from pycomm.empty
// with multicast.
//
// A multicast address stands for the same offset in the memory of all ranks. A load with reduction returns
// the sum over all of them, added in the switch; a store writes to all. Each rank does so for its own part:
//
//   rank r    part[r]: v = multimem.ld_reduce(in)    multimem.st(out, v)    for all ranks at once
//
// Cost per rank: nbytes/n read and written over its links, a third of two_shot's traffic with many ranks.
// f32, f16 and bf16 sums (16-bit types are added in f32 in the switch). The order of addition is the switch's
// own, so results may differ from run to run: never chosen unasked. Source: PTX ISA, multimem.
//
// begin() says that all inputs are ready; drained of all, that all stores have been made.
#pragma once

#include "movement.cuh"
#include "session.cuh"

namespace pycomm::cuda {

template <class T, class Ctx>
PC_FN void multimem(Ctx& c, const Args& a) {
  Session<Ctx> session(c, a);
  if (session.begin()) {
    const uint64_t part = a.in_bytes[a.group.rank];
    const Span slice = segment_of(part, c.block(), c.blocks(), slice_bytes(part, c.blocks()), 0);
    // All parts but the last are equal.
    const uint64_t offset = static_cast<uint64_t>(a.group.rank) * a.in_bytes[0] + slice.begin;
    for (uint64_t i = c.thread(); i < slice.size / 16; i += c.threads())
      c.multimem_store(a.multicast_out + offset + i * 16,
                       c.template multimem_reduce<T>(a.multicast_in + offset + i * 16));
    const uint32_t all = (1u << a.group.world_size) - 1;
    session.post(Flag::drained, all, 0);
    session.wait(Flag::drained, all, 0);
  }
  session.end();
}

}  // namespace pycomm::cuda
