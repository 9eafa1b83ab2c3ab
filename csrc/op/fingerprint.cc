// fingerprint.cc -- see fingerprint.h.
#include "fingerprint.h"

#include <bit>
#include <sstream>

namespace pycomm {

namespace {

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 32);
}

std::string factor_of(uint64_t bits) {
  std::ostringstream text;
  text << std::bit_cast<double>(bits);
  return text.str();
}

}  // namespace

uint64_t extra_of(const Op& op) {
  uint64_t hash = op.uneven + 2 * (op.receiver != nullptr);
  if (op.uneven && op.kind != OpKind::all_to_all)
    for (const Part& part : op.kind == OpKind::all_gather ? op.out_parts : op.in_parts)
      hash = mix(hash, part.count);
  if (op.reduces() && op.reduce_op == ReduceOp::premul_sum) {
    const uint64_t bits = std::bit_cast<uint64_t>(op.factor);
    return op.uneven ? mix(hash, bits) : bits;  // readable for the error where nothing else is in it
  }
  return hash;
}

std::string describe(const Difference& difference, int peer) {
  return std::string(difference.field) + "=" + difference.here + " here, " + difference.there + " on rank " +
         std::to_string(peer) + ". " + difference.rule;
}

std::string describe_difference(const Fingerprint& here, const Fingerprint& there, int peer) {
  if (here.kind != there.kind)
    return describe({"operation", to_string(here.kind), to_string(there.kind),
                     "All ranks must call the same operations in the same order."},
                    peer);
  if (here.dtype != there.dtype)
    return describe(
        {"dtype", to_string(here.dtype), to_string(there.dtype), "All ranks must pass equal dtypes."}, peer);
  if (here.reduce_op != there.reduce_op)
    return describe({"reduce op", to_string(here.reduce_op), to_string(there.reduce_op),
                     "All ranks must pass the same reduce op."},
                    peer);
  if (here.root != there.root)
    return describe(
        {"root", std::to_string(here.root), std::to_string(there.root), "All ranks must name the same root."},
        peer);
  if (here.count != there.count)
    return describe({"count", std::to_string(here.count), std::to_string(there.count),
                     "All ranks must pass equal sizes."},
                    peer);
  return "";
}

std::string describe_extra(const Fingerprint& here, const Fingerprint& there, int peer) {
  if (here.reduce_op == ReduceOp::premul_sum && !here.uneven)
    return describe({"premul_sum factor", factor_of(here.extra), factor_of(there.extra),
                     "All ranks must pass the same factor."},
                    peer);
  return "the list of sizes differs from that of rank " + std::to_string(peer) +
         ". All ranks must pass the same list.";
}

std::string describe_algorithms(const std::string& here, const std::string& there, int peer) {
  return describe({"algorithm", here, there, "All ranks must ask for the same algorithm."}, peer);
}

}  // namespace pycomm
