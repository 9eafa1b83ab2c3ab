// fingerprint.h -- what ranks compare of a call before any of them writes a result, and how a difference
// reads.
//
// The CPU and the device carry it in their own ways (transport/layout.h, cuda/layout.h); what it holds and
// the sentences about it are the same.
#pragma once

#include <cstdint>
#include <string>

#include "op.h"

namespace pycomm {

struct Fingerprint {
  OpKind kind = OpKind::none;
  DType dtype = DType::u8;
  ReduceOp reduce_op = ReduceOp::sum;
  int root = 0;
  bool uneven = false;
  uint64_t count = 0;
  uint64_t extra = 0;  // extra_of()
};

// What the other fields leave out: the factor of premul_sum and the list of sizes. all_to_all's uneven sizes
// differ from rank to rank and are compared pairwise instead.
uint64_t extra_of(const Op& op);

// Of an all_to_all: whether this rank has passed sizes of its own.
inline bool sizes_in_extra(uint64_t extra) { return (extra & 1) != 0; }
// Two calls of all_to_all, one with sizes and one without: the sizes are compared pairwise, then.
inline bool differ_in_form_only(OpKind kind, uint64_t extra, uint64_t other) {
  return kind == OpKind::all_to_all && (extra ^ other) == 1;
}

// The first 8 bytes of a call on the CPU, exact, so that one comparison suffices:
// sequence (32 bits) | kind (5) | dtype (5) | reduce op (4) | on a device (1) | algorithm (3) | root (14)
static_assert(num_algorithms <= 8);
struct Key {
  OpKind kind;
  DType dtype;
  ReduceOp reduce_op;
  bool on_device;
  Algorithm algorithm;
  int root;
};
inline uint64_t pack_key(const Op& op, uint64_t sequence) {
  return sequence << 32 | static_cast<uint64_t>(op.kind) << 27 | static_cast<uint64_t>(op.dtype) << 22 |
         static_cast<uint64_t>(op.reduce_op) << 18 | static_cast<uint64_t>(op.on_device) << 17 |
         static_cast<uint64_t>(op.algorithm) << 14 | static_cast<uint64_t>(op.root);
}
inline Key unpack_key(uint64_t key) {
  return {static_cast<OpKind>(key >> 27 & 31),   static_cast<DType>(key >> 22 & 31),
          static_cast<ReduceOp>(key >> 18 & 15), (key >> 17 & 1) != 0,
          static_cast<Algorithm>(key >> 14 & 7), static_cast<int>(key & 16383)};
}

// "count=1024 here, 512 on rank 3. All ranks must pass equal sizes."
struct Difference {
  const char* field;
  std::string here, there;
  const char* rule;
};
std::string describe(const Difference& difference, const std::string& who);

// `who`: "rank 3".
// The first of kind, dtype, reduce op, root and count that differs; empty: none does.
std::string describe_difference(const Fingerprint& here, const Fingerprint& there, const std::string& who);
// What it means that only `extra` differs.
std::string describe_extra(const Fingerprint& here, const Fingerprint& there, const std::string& who);
std::string describe_algorithms(const std::string& here, const std::string& there, const std::string& who);

// What ranks compare of a call on the CPU.
struct Header {
  uint64_t key = 0, count = 0, extra = 0;
  bool operator==(const Header&) const = default;
};
inline Header header_of(const Op& op, uint64_t sequence) {
  return {pack_key(op, sequence), op.count, extra_of(op)};
}
// How the call of another rank differs, one of whose words does.
std::string describe_call(const Op& op, const Header& theirs, const std::string& who);
std::string describe_splits(const std::string& src, size_t sent, const std::string& dst, size_t expected);

}  // namespace pycomm
