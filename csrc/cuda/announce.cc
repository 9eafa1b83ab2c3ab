// announce.cc -- see announce.h.
#include "announce.h"

#include "../op/fingerprint.h"

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
  return static_cast<uint64_t>(kind) | static_cast<uint64_t>(dtype) << 8 |
         static_cast<uint64_t>(reduce_op) << 16 | static_cast<uint64_t>(kernel) << 24 |
         static_cast<uint64_t>(root) << 32 | static_cast<uint64_t>(blocks) << 40 |
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
  const std::string who = "rank " + std::to_string(peer);
  const Meta a = Meta::unpack(here.meta), b = Meta::unpack(there.meta);
  auto fingerprint = [](const Meta& meta, const Announcement& call) {
    return Fingerprint{meta.kind, meta.dtype, meta.reduce_op, meta.root, meta.uneven, call.count, call.extra};
  };
  const Fingerprint mine = fingerprint(a, here), other = fingerprint(b, there);
  const std::string common = pycomm::describe_difference(mine, other, who);
  if (!common.empty()) return common;
  if (a.uneven != b.uneven)
    return describe(
        {"sizes", a.uneven ? "uneven" : "even", b.uneven ? "uneven" : "even",
         a.kind == OpKind::all_to_all ? "With CUDA tensors all ranks of a host must pass sizes, or none."
                                      : "All ranks must use the same form of the call."},
        who);
  if (a.direct != b.direct)
    return describe({"buffers", a.direct ? "registered" : "plain", b.direct ? "registered" : "plain",
                     "Pass buffers from pycomm.empty on all ranks or on none."},
                    who);
  if (a.kernel != b.kernel || a.blocks != b.blocks)
    return describe_algorithms(name_of(a.kernel), name_of(b.kernel), who);
  if (a.kind == OpKind::send)
    return describe({"tag", std::to_string(here.extra), std::to_string(there.extra),
                     "A message's tag must be that of its receive."},
                    who);
  if (a.kind == OpKind::all_to_all && a.uneven)
    return "rank " + std::to_string(peer) + " sends " + std::to_string(there.extra) +
           " bytes to this rank, which expects " + std::to_string(here.extra) +
           ". in_splits[dst] of the sender must equal out_splits[src] of the receiver.";
  return describe_extra(mine, other, who);
}

}  // namespace pycomm::cuda
