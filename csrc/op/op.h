// op.h -- one collective call as data: what the caller passed, after all front ends agree on raw pointers.
#pragma once

#include <cstddef>
#include <vector>

#include "../types.h"

namespace pycomm {

// copy_engine and multimem: CUDA tensors only (cuda/plan.h).
enum class Algorithm : uint8_t { automatic, one_shot, two_shot, ring, staged, direct, copy_engine, multimem };
inline constexpr int num_algorithms = 8;

inline const char* to_string(Algorithm algorithm) {
  constexpr const char* names[] = {"automatic", "one_shot", "two_shot",    "ring",
                                   "staged",    "direct",   "copy_engine", "multimem"};
  int i = static_cast<int>(algorithm);
  return i < num_algorithms ? names[i] : "?";
}

struct Part {
  std::byte* data;
  size_t count;  // elements
};

// Gives memory for what a rank sends, once its size is known.
class Receiver {
 public:
  virtual ~Receiver() = default;
  virtual std::byte* room(int src, size_t count) = 0;  // of count elements; called once for each rank
};

// Which fields a kind uses; counts in elements, `root` is a rank of the group:
//
//   kind            in                  out                 notes
//   all_reduce      in, count           out                 out == in or apart
//   reduce          in, count           out at root         out is null elsewhere
//   broadcast       in at root, count   out elsewhere
//   all_gather      in, count           out_parts           uneven: of several sizes, known to all; count is
//                                                           their sum
//   reduce_scatter  in_parts            out, count          uneven: likewise
//   all_to_all      in_parts            out_parts           uneven: sizes known pairwise; count is 0; with a
//                                                           receiver the senders alone know them, and
//                                                           out_parts is made when their headers are there
//                                                           (CPU)
//   gather          in, count           out_parts at root
//   scatter         in_parts at root    out, count
//   barrier         -                   -
struct Op {
  OpKind kind = OpKind::none;
  DType dtype = DType::u8;
  ReduceOp reduce_op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::automatic;
  bool uneven = false;
  bool on_device = false;  // the ranks compare their calls here; the data, on devices, go by an engine
  int root = 0;
  double factor = 1;    // premul_sum
  int divisor = 0;      // avg: 0: world_size; of a part of a larger group: of that
  double timeout = 0;   // seconds; 0: the group's
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;
  std::vector<Part> in_parts, out_parts;  // world_size entries where used
  Receiver* receiver = nullptr;           // not owned

  bool reduces() const {
    return kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::reduce_scatter;
  }
  size_t nbytes() const { return count * size_of(dtype); }
  // Of the whole buffer: of all parts where there are several, and of this rank's input to an all_to_all.
  size_t total_bytes(int world_size) const {
    switch (kind) {
      case OpKind::all_gather:
      case OpKind::reduce_scatter:
      case OpKind::gather:
      case OpKind::scatter: return uneven ? nbytes() : nbytes() * world_size;
      case OpKind::all_to_all: {
        size_t sum = 0;
        for (const Part& part : in_parts) sum += part.count;
        return sum * size_of(dtype);
      }
      default: return nbytes();
    }
  }
  // Elements of this rank's own part; `count` is the total of all parts where sizes are uneven.
  size_t own_count(int rank) const {
    if (uneven && kind == OpKind::all_gather) return out_parts[rank].count;
    if (uneven && kind == OpKind::reduce_scatter) return in_parts[rank].count;
    return count;
  }
};

}  // namespace pycomm
