// kernel_cases.h -- collectives as data: inputs of every rank, what each must hold afterwards, by one-line
// oracles.
#pragma once

#include <algorithm>

#include "../../../csrc/arithmetic/reduce.h"
#include "../../../csrc/cuda/kernels/number.cuh"
#include "ranks_on_fibers.h"

namespace pycomm::cuda::testing {

enum class Memory { pointers, staged, registered };

struct Case {
  OpKind kind = OpKind::all_reduce;
  Algorithm algorithm = Algorithm::automatic;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  size_t count = 1;      // all_reduce, reduce, broadcast: of the buffer; else of one part
  int root = 0;
  bool uneven = false;
  bool in_place = false;
  size_t misalign = 0;   // elements; three times as many for the output, on ranks of odd number
  bool rough = false;    // f32, f64 and complex: the sum depends on the order of addition
  bool special = false;  // any bits: NaN, infinities, denormals, -0.0; true that is not 1

  std::string text() const {
    return std::string(to_string(kind)) + " " + to_string(algorithm) + " " + to_string(dtype) + " " +
           to_string(op) + " count=" + std::to_string(count) + " root=" + std::to_string(root) +
           (uneven ? " uneven" : "") + (in_place ? " in place" : "") +
           (misalign ? " misaligned " + std::to_string(misalign) : "") + (rough ? " rough" : "") +
           (special ? " special" : "");
  }
};

// Part q of a buffer: even, or so different that some are empty.
inline size_t part_count(const Case& c, int q) {
  return c.uneven ? c.count * (q % 3) / 2 + (q == 1) : c.count;
}
// What src sends to dst.
inline size_t pair_count(const Case& c, int src, int dst) {
  return c.uneven ? c.count * ((src + 2 * dst) % 4) / 3 + (src == dst) : c.count;
}

// Small whole numbers, whose sums are exact in any order; or rough ones.
inline void fill_element(std::byte* to, DType dtype, uint64_t seed, bool rough) {
  const uint64_t h = (seed + 1) * 0x9e3779b97f4a7c15ULL >> 33;
  auto put = [to](auto value) { std::memcpy(to, &value, sizeof value); };
  const float whole = static_cast<float>(static_cast<int>(h % 7) - 3);
  const float x = rough ? whole / 7 * static_cast<float>(1u << (h / 7 % 23)) : whole;
  auto bf16 = [](float v) { return static_cast<uint16_t>(float_to_bits(v) >> 16); };
  switch (dtype) {
    case DType::f64: return put(static_cast<double>(x));
    case DType::f32: return put(x);
    case DType::f16: return put(to_f16(whole).bits);
    case DType::bf16: return put(bf16(whole));
    case DType::c64: put(x); return fill_element(to + 4, DType::f32, seed + 77, rough);
    case DType::c128: put(static_cast<double>(x)); return fill_element(to + 8, DType::f64, seed + 77, rough);
    default: {
      const uint64_t word = dtype == DType::boolean ? h % 2 : h;
      std::memcpy(to, &word, size_of(dtype));
    }
  }
}

// Any bits; every third value is 0, 1, an infinity, a NaN, the least or the greatest magnitude, of
// either sign.
inline void fill_special(std::byte* to, DType dtype, uint64_t seed) {
  const bool complex = dtype == DType::c64 || dtype == DType::c128;
  const size_t size = size_of(dtype) / (complex ? 2 : 1);
  if (complex) fill_special(to + size, dtype == DType::c64 ? DType::f32 : DType::f64, seed + 77);
  const uint64_t h = (seed + 1) * 0x9e3779b97f4a7c15ULL, any = (h ^ h >> 29) * 0xbf58476d1ce4e5b9ULL;
  const int mantissa = dtype == DType::bf16 ? 7 : size == 2 ? 10 : size == 4 ? 23 : 52;
  const uint64_t sign = uint64_t{1} << (8 * size - 1), infinity = sign - (uint64_t{1} << mantissa);
  const uint64_t one = (infinity >> 1) & ~((uint64_t{1} << mantissa) - 1);
  const uint64_t known[] = {0, 1, one, infinity, infinity - 1, infinity + 1, infinity | infinity >> 3};
  uint64_t bits = any >> 40 | any << 24;
  if (size > 1 && h >> 40 & 1) bits = known[(h >> 33) % std::size(known)] | (h >> 50 & 1 ? sign : 0);
  std::memcpy(to, &bits, size);
}

// Buffers of one operation on all ranks.
class Instance {
 public:
  Instance(Ranks& ranks, const Case& c, Memory memory, uint64_t salt)
      : ranks_(ranks), case_(c), n_(ranks.world_size()), item_(size_of(c.dtype)), arrived_(n_, 0) {
    for (int r = 0; r < n_; ++r) {
      in_count_.push_back(in_count(r));
      out_count_.push_back(out_count(r));
    }
    const size_t largest_in = *std::max_element(in_count_.begin(), in_count_.end());
    const size_t largest_out = *std::max_element(out_count_.begin(), out_count_.end());
    Region* region = nullptr;
    const size_t stride = round_up_to(largest_in * item_, 256);
    if (memory == Memory::registered)
      region = &ranks.add_region(std::max<size_t>(stride + largest_out * item_, 16),
                                 c.algorithm == Algorithm::multimem);
    for (int r = 0; r < n_; ++r) {
      if (!region) {
        ins_.push_back(std::make_unique<Buffer>(in_count_[r] * item_, c.misalign * item_));
        outs_.push_back(std::make_unique<Buffer>(out_count_[r] * item_, 3 * c.misalign * item_ * (r % 2)));
      }
      in_.push_back(region ? region->parts[r]->data() : ins_[r]->data());
      out_.push_back(region ? region->parts[r]->data() + stride : outs_[r]->data());
      if (c.in_place) in_[r] = in_place_input(r);
    }
    for (int r = 0; r < n_; ++r) {
      sources_.emplace_back(in_count_[r] * item_);
      for (size_t i = 0; i < in_count_[r]; ++i) {
        const uint64_t seed = salt * 1000003 + r * 7919 + i;
        std::byte* const to = sources_[r].data() + i * item_;
        c.special ? fill_special(to, c.dtype, seed) : fill_element(to, c.dtype, seed, c.rough);
      }
    }
  }

  // One call of rank r, then all that a caller may do at once: look at the result and use the buffers for
  // something else. With `times` the call is captured and replayed.
  void enqueue(int r, int times = 1) {
    Machine& machine = ranks_.machine();
    LaunchPlan planned;
    for (int i = 0; i < times; ++i) {
      machine.host(machine.stream(r), [this, r] { fill(r); });
      if (i == 0) planned = ranks_.enqueue(r, op(r));
      else ranks_.replay(r, planned);
      ring_ = planned.choice.algorithm == Algorithm::ring;
      machine.host(machine.stream(r), [this, r] {
        check(r);
        std::memset(in_[r], 0xDD, in_count_[r] * item_);
        std::memset(out_[r], 0xDD, out_count_[r] * item_);
      });
    }
  }

  void fill(int r) {
    if (!arrived_[r]) arrived_[r] = 1;
    if (out_count_[r]) std::memset(out_[r], 0xBB, out_count_[r] * item_);
    if (in_count_[r]) std::memcpy(in_[r], sources_[r].data(), in_count_[r] * item_);
  }

  Op op(int r) const {
    Op op;
    op.kind = case_.kind;
    op.algorithm = case_.algorithm;
    op.dtype = case_.dtype;
    op.reduce_op = case_.op;
    op.root = case_.root;
    op.factor = factor;
    op.count = case_.count;
    auto parts = [&](std::byte* data, auto count_of) {
      std::vector<Part> parts;
      for (int q = 0; q < n_; ++q) {
        parts.push_back({data, count_of(q)});
        data += count_of(q) * item_;
      }
      return parts;
    };
    auto single = [&](int q) { return part_count(case_, q); };
    const bool is_root = r == case_.root;
    switch (case_.kind) {
      case OpKind::all_reduce: op.in = in_[r], op.out = out_[r]; break;
      case OpKind::reduce: op.in = in_[r], op.out = is_root ? out_[r] : nullptr; break;
      case OpKind::broadcast: (is_root ? op.in = in_[r] : op.out = out_[r]); break;
      case OpKind::all_gather: op.in = in_[r], op.out_parts = parts(out_[r], single); break;
      case OpKind::reduce_scatter: op.in_parts = parts(in_[r], single), op.out = out_[r]; break;
      case OpKind::gather:
        op.in = in_[r];
        if (is_root) op.out_parts = parts(out_[r], single);
        break;
      case OpKind::scatter:
        op.out = out_[r];
        if (is_root) op.in_parts = parts(in_[r], single);
        break;
      case OpKind::all_to_all:
        op.in_parts = parts(in_[r], [&](int q) { return pair_count(case_, r, q); });
        op.out_parts = parts(out_[r], [&](int q) { return pair_count(case_, q, r); });
        break;
      default: break;
    }
    op.uneven = case_.uneven;
    if (op.uneven) op.count = op.kind == OpKind::all_to_all ? 0 : total(single);
    return op;
  }

  // Throws where rank r does not hold what it must.
  void check(int r) const {
    if (case_.kind == OpKind::barrier && std::count(arrived_.begin(), arrived_.end(), 1) != n_)
      throw std::runtime_error("rank " + std::to_string(r) + " passed a barrier that not all had reached");
    const std::vector<std::byte> want = expected(r);
    for (size_t i = 0; i < want.size(); ++i)
      if (want[i] != out_[r][i])
        throw std::runtime_error(case_.text() + ", " + std::to_string(n_) + " ranks: rank " +
                                 std::to_string(r) + ", element " + std::to_string(i / item_) + " is wrong");
    for (const auto& list : {&ins_, &outs_})
      for (const auto& buffer : *list)
        if (!buffer->guards_intact()) throw std::runtime_error(case_.text() + ": a write beyond a buffer");
  }

  // What the ranks but `left_out` hold.
  std::vector<std::vector<std::byte>> outputs(int left_out) const {
    std::vector<std::vector<std::byte>> all;
    for (int r = 0; r < n_; ++r)
      if (r != left_out) all.emplace_back(out_[r], out_[r] + out_count_[r] * item_);
    return all;
  }

 private:
  template <class Count>
  size_t total(Count count_of) const {
    size_t sum = 0;
    for (int q = 0; q < n_; ++q) sum += count_of(q);
    return sum;
  }

  size_t in_count(int r) const {
    const bool is_root = r == case_.root;
    switch (case_.kind) {
      case OpKind::barrier: return 0;
      case OpKind::broadcast: return is_root ? case_.count : 0;
      case OpKind::all_gather:
      case OpKind::gather: return part_count(case_, r);
      case OpKind::reduce_scatter: return total([&](int q) { return part_count(case_, q); });
      case OpKind::scatter: return is_root ? total([&](int q) { return part_count(case_, q); }) : 0;
      case OpKind::all_to_all: return total([&](int q) { return pair_count(case_, r, q); });
      default: return case_.count;
    }
  }
  size_t out_count(int r) const {
    const bool is_root = r == case_.root;
    switch (case_.kind) {
      case OpKind::barrier: return 0;
      case OpKind::all_reduce: return case_.count;
      case OpKind::reduce: return is_root ? case_.count : 0;
      case OpKind::broadcast: return is_root ? 0 : case_.count;
      case OpKind::all_gather: return total([&](int q) { return part_count(case_, q); });
      case OpKind::gather: return is_root ? total([&](int q) { return part_count(case_, q); }) : 0;
      case OpKind::all_to_all: return total([&](int q) { return pair_count(case_, q, r); });
      default: return part_count(case_, r);
    }
  }

  std::byte* in_place_input(int r) const {
    if (case_.kind == OpKind::all_reduce || (case_.kind == OpKind::reduce && r == case_.root)) return out_[r];
    if (case_.kind != OpKind::all_gather) return in_[r];
    size_t before = 0;
    for (int q = 0; q < r; ++q) before += part_count(case_, q);
    return out_[r] + before * item_;
  }

  // Elements [first, first + count), added in the order of ranks that begins with `start`.
  std::vector<std::byte> reduced(size_t first, size_t count, int start = 0) const {
    std::vector<std::byte> result(count * item_);
    std::vector<const void*> sources;
    for (int k = 0; k < n_; ++k) sources.push_back(sources_[(start + k) % n_].data() + first * item_);
    if (count)
      pycomm::reduce({case_.dtype, case_.op, case_.op == ReduceOp::avg ? n_ : factor}, sources.data(), n_,
                     result.data(), count);
    return result;
  }

  // A ring adds part q in the order q + 1, ..., q.
  std::vector<std::byte> reduced_by_ring() const {
    const size_t part = round_up_to((case_.count * item_ + n_ - 1) / n_, align_bytes) / item_;
    std::vector<std::byte> result;
    for (int q = 0; q < n_; ++q) {
      const size_t begin = std::min(part * q, case_.count), end = std::min(part * (q + 1), case_.count);
      const auto piece = reduced(begin, end - begin, q + 1);
      result.insert(result.end(), piece.begin(), piece.end());
    }
    return result;
  }

  std::vector<std::byte> expected(int r) const {
    std::vector<std::byte> want;
    auto append = [&](int src, size_t first, size_t count) {
      want.insert(want.end(), sources_[src].begin() + first * item_,
                  sources_[src].begin() + (first + count) * item_);
    };
    auto before = [&](auto count_of, int end) {
      size_t sum = 0;
      for (int q = 0; q < end; ++q) sum += count_of(q);
      return sum;
    };
    auto single = [&](int q) { return part_count(case_, q); };
    const bool is_root = r == case_.root;
    switch (case_.kind) {
      case OpKind::all_reduce: return ring_ ? reduced_by_ring() : reduced(0, case_.count);
      case OpKind::reduce: return is_root ? reduced(0, case_.count) : want;
      case OpKind::reduce_scatter: return reduced(before(single, r), single(r));
      case OpKind::broadcast:
        if (!is_root) append(case_.root, 0, case_.count);
        break;
      case OpKind::gather:
      case OpKind::all_gather:
        for (int p = 0; p < n_ && (is_root || case_.kind == OpKind::all_gather); ++p) append(p, 0, single(p));
        break;
      case OpKind::scatter: append(case_.root, before(single, r), single(r)); break;
      case OpKind::all_to_all:
        for (int p = 0; p < n_; ++p)
          append(p, before([&](int q) { return pair_count(case_, p, q); }, r), pair_count(case_, p, r));
        break;
      default: break;
    }
    return want;
  }

  static constexpr double factor = 0.3;  // of premul_sum

  Ranks& ranks_;
  const Case case_;
  const int n_;
  const size_t item_;
  bool ring_ = false;
  std::vector<int>
      arrived_;  // at the call, by rank; written by the ranks, without any order but the operation's
  std::vector<size_t> in_count_, out_count_;
  std::vector<std::unique_ptr<Buffer>> ins_, outs_;
  std::vector<std::byte*> in_, out_;
  std::vector<std::vector<std::byte>> sources_;
};

}  // namespace pycomm::cuda::testing
