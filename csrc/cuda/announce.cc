// announce.cc -- see announce.h.
#include "announce.h"

#include <bit>
#include <sstream>

namespace pycomm::cuda {

namespace {

const char* name_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::one_shot: return "one_shot";
    case Kernel::two_shot:
    case Kernel::copy_two_shot: return "two_shot";
    case Kernel::ring: return "ring";
    case Kernel::multimem: return "multimem";
    case Kernel::open: return "copy_engine";
    default: return "direct or staged";
  }
}

}  // namespace

uint64_t Meta::pack() const {
  return static_cast<uint64_t>(kind) | static_cast<uint64_t>(dtype) << 8 | static_cast<uint64_t>(reduce_op) << 16 |
         static_cast<uint64_t>(kernel) << 24 | static_cast<uint64_t>(root) << 32 | static_cast<uint64_t>(blocks) << 40 |
         static_cast<uint64_t>(direct) << 48 | static_cast<uint64_t>(uneven) << 49;
}

Meta Meta::unpack(uint64_t word) {
  Meta meta;
  meta.kind = static_cast<OpKind>(word & 0xff);
  meta.dtype = static_cast<DType>(word >> 8 & 0xff);
  meta.reduce_op = static_cast<ReduceOp>(word >> 16 & 0xff);
  meta.kernel = static_cast<Kernel>(word >> 24 & 0xff);
  meta.root = static_cast<int>(word >> 32 & 0xff);
  meta.blocks = static_cast<int>(word >> 40 & 0xff);
  meta.direct = word >> 48 & 1;
  meta.uneven = word >> 49 & 1;
  return meta;
}

std::string describe_difference(const Announcement& here, const Announcement& there, int peer) {
  const Meta a = Meta::unpack(here.meta), b = Meta::unpack(there.meta);
  const std::string on = " on rank " + std::to_string(peer) + ". ";
  auto differ = [&](const std::string& what, const std::string& x, const std::string& y, const char* rule) {
    return what + "=" + x + " here, " + y + on + rule;
  };
  if (a.kind != b.kind)
    return differ("operation", to_string(a.kind), to_string(b.kind), "All ranks must call the same operations in the same order.");
  if (a.dtype != b.dtype) return differ("dtype", to_string(a.dtype), to_string(b.dtype), "All ranks must pass equal dtypes.");
  if (a.reduce_op != b.reduce_op)
    return differ("reduce op", to_string(a.reduce_op), to_string(b.reduce_op), "All ranks must pass the same reduce op.");
  if (a.root != b.root) return differ("root", std::to_string(a.root), std::to_string(b.root), "All ranks must name the same root.");
  if (here.count != there.count)
    return differ("count", std::to_string(here.count), std::to_string(there.count), "All ranks must pass equal sizes.");
  if (a.uneven != b.uneven)
    return differ("sizes", a.uneven ? "uneven" : "even", b.uneven ? "uneven" : "even", "All ranks must use the same form of the call.");
  if (a.direct != b.direct)
    return differ("buffers", a.direct ? "registered" : "plain", b.direct ? "registered" : "plain",
                  "Pass buffers from pycomm.empty on all ranks or on none.");
  if (a.kernel != b.kernel || a.blocks != b.blocks)
    return differ("algorithm", name_of(a.kernel), name_of(b.kernel), "All ranks must ask for the same algorithm.");
  if (a.kind == OpKind::send)
    return differ("tag", std::to_string(here.extra), std::to_string(there.extra), "A message's tag must be that of its receive.");
  if (a.kind == OpKind::all_to_all && a.uneven)
    return "rank " + std::to_string(peer) + " sends " + std::to_string(there.extra) + " bytes to this rank, which expects " +
           std::to_string(here.extra) + ". in_splits[dst] of the sender must equal out_splits[src] of the receiver.";
  if (a.reduce_op == ReduceOp::premul_sum) {
    std::ostringstream x, y;
    x << std::bit_cast<double>(here.extra), y << std::bit_cast<double>(there.extra);
    return differ("premul_sum factor", x.str(), y.str(), "All ranks must pass the same factor.");
  }
  return "the list of sizes differs from that of rank " + std::to_string(peer) + ". All ranks must pass the same list.";
}

}  // namespace pycomm::cuda
