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

std::string describe(const Difference& difference, const std::string& who) {
  return std::string(difference.field) + "=" + difference.here + " here, " + difference.there + " on " + who +
         ". " + difference.rule;
}

std::string describe_difference(const Fingerprint& here, const Fingerprint& there, const std::string& who) {
  if (here.kind != there.kind)
    return describe({"operation", to_string(here.kind), to_string(there.kind),
                     "All ranks must call the same operations in the same order."},
                    who);
  if (here.dtype != there.dtype)
    return describe(
        {"dtype", to_string(here.dtype), to_string(there.dtype), "All ranks must pass equal dtypes."}, who);
  if (here.reduce_op != there.reduce_op)
    return describe({"reduce op", to_string(here.reduce_op), to_string(there.reduce_op),
                     "All ranks must pass the same reduce op."},
                    who);
  if (here.root != there.root)
    return describe(
        {"root", std::to_string(here.root), std::to_string(there.root), "All ranks must name the same root."},
        who);
  const bool both_have_a_count = here.kind != OpKind::all_to_all || here.uneven == there.uneven;
  if (both_have_a_count && here.count != there.count)
    return describe({"count", std::to_string(here.count), std::to_string(there.count),
                     "All ranks must pass equal sizes."},
                    who);
  return "";
}

std::string describe_extra(const Fingerprint& here, const Fingerprint& there, const std::string& who) {
  if (here.reduce_op == ReduceOp::premul_sum && !here.uneven)
    return describe({"premul_sum factor", factor_of(here.extra), factor_of(there.extra),
                     "All ranks must pass the same factor."},
                    who);
  return "the list of sizes differs from that of " + who + ". All ranks must pass the same list.";
}

std::string describe_algorithms(const std::string& here, const std::string& there, const std::string& who) {
  return describe({"algorithm", here, there, "All ranks must ask for the same algorithm."}, who);
}

std::string describe_call(const Op& op, const Header& theirs, const std::string& who) {
  const Key key = unpack_key(theirs.key);
  const Fingerprint here{op.kind, op.dtype, op.reduce_op, op.root, op.uneven, op.count, extra_of(op)};
  const bool uneven = key.kind == OpKind::all_to_all ? sizes_in_extra(theirs.extra) : op.uneven;
  const Fingerprint there{key.kind, key.dtype, key.reduce_op, key.root, uneven, theirs.count, theirs.extra};
  std::string text = describe_difference(here, there, who);
  if (text.empty() && key.on_device != op.on_device)
    text = describe({"device", op.on_device ? "cuda" : "cpu", key.on_device ? "cuda" : "cpu",
                     "All ranks must pass tensors on the same kind of device."},
                    who);
  if (text.empty() && key.algorithm != op.algorithm)
    text = describe_algorithms(to_string(op.algorithm), to_string(key.algorithm), who);
  return text.empty() ? describe_extra(here, there, who) : text;
}

std::string describe_splits(const std::string& src, size_t sent, const std::string& dst, size_t expected) {
  return src + " sends " + std::to_string(sent) + " elements to " + dst + ", which expects " +
         std::to_string(expected) +
         ". in_splits[dst] of the sender must equal out_splits[src] of the receiver.";
}

}  // namespace pycomm
