// plan.cc -- see plan.h.
#include "plan.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "../reduce/reduce.h"
#include "session.cuh"

namespace pycomm::cuda {

namespace {

constexpr uint64_t units_worth_a_block = max_threads;    // one_shot: one unit of 8 bytes per thread

// Builds the plan of one collective.
class Planner {
 public:
  Planner(const Op& op, const Shape& shape, const Registry& registry, uint64_t timeout_ns)
      : op_(op), shape_(shape), registry_(registry), n_(shape.world_size()), me_(shape.rank()) {
    args_.group = shape.group;
    args_.timeout_ns = timeout_ns;
    args_.resident = shape.protocol == Protocol::resident;
    args_.stages = all_stages;
    args_.end_segment = UINT32_MAX;
    args_.root = op.root;
    meta_.kind = op.kind;
    meta_.dtype = op.dtype;
    meta_.reduce_op = op.reduce_op;
    meta_.root = op.root;
    meta_.uneven = op.uneven;
  }

  Plan build() {
    collect_parts();
    meta_.direct = registered_ && !shape_.pointers;
    args_.call.count = op_.count;
    args_.call.extra = extra();
    plan_.choice = choose(op_.kind, table_bytes(), shape_, reduction_kernel(), registered_, op_.algorithm);
    if (op_.reduces()) set_reduction();
    switch (op_.kind) {
      case OpKind::barrier: bracket({}); break;
      case OpKind::all_reduce:
      case OpKind::reduce:
      case OpKind::reduce_scatter: reduction(); break;
      case OpKind::broadcast:
        if (plan_.choice.algorithm == Algorithm::two_shot) broadcast_in_two();
        else movement();
        break;
      default:
        if (plan_.choice.algorithm == Algorithm::copy_engine) by_copy_engine();
        else movement();
    }
    return std::move(plan_);
  }

 private:
  bool resident() const { return shape_.protocol == Protocol::resident; }
  uint32_t all() const { return (1u << n_) - 1; }
  uint32_t bit(int rank) const { return 1u << rank; }
  size_t bytes_of(size_t count) const { return count * size_of(op_.dtype); }
  KernelKey reduction_kernel() const {
    if (!op_.reduces()) return {Kernel::move};
    const ReductionKey key = reduction_key(op_.dtype, op_.reduce_op);
    return {Kernel::two_shot, key.dtype, key.op};
  }

  // What the choice table calls the size of the operation.
  size_t table_bytes() const {
    if (op_.uneven && op_.kind != OpKind::all_to_all) return bytes_of(op_.count) / n_;
    if (op_.kind == OpKind::all_to_all && op_.uneven) return 0;
    return op_.nbytes();
  }

  uint64_t extra() const {
    uint64_t hash = 0;
    auto mix = [&hash](uint64_t value) {
      hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
      hash ^= hash >> 32;
    };
    if (op_.uneven && op_.kind == OpKind::all_gather)
      for (const Part& part : op_.out_parts) mix(part.count);
    if (op_.uneven && op_.kind == OpKind::reduce_scatter)
      for (const Part& part : op_.in_parts) mix(part.count);
    if (!op_.reduces() || op_.reduce_op != ReduceOp::premul_sum) return hash;
    const uint64_t bits = std::bit_cast<uint64_t>(op_.factor);
    if (!op_.uneven) return bits;
    mix(bits);
    return hash;
  }

  bool note(const void* data, size_t nbytes) { return nbytes == 0 || registry_.handle(data, nbytes).has_value(); }

  // Are all buffers that this rank passes in registered memory?
  void collect_parts() {
    registered_ = true;
    bool any = false;
    auto look = [&](const std::byte* data, size_t nbytes) {
      if (!nbytes || !data) return;
      any = true;
      registered_ = registered_ && note(data, nbytes);
    };
    if (op_.in) look(op_.in, bytes_of(op_.own_count(me_)));
    if (op_.out) look(op_.out, bytes_of(op_.own_count(me_)));
    for (const Part& part : op_.in_parts) look(part.data, bytes_of(part.count));
    for (const Part& part : op_.out_parts) look(part.data, bytes_of(part.count));
    registered_ = registered_ && any;
  }

  bool direct() const { return shape_.pointers || registered_; }

  uint64_t handle(const std::byte* data) const {
    if (!data) return 0;
    if (shape_.pointers) return reinterpret_cast<uint64_t>(data);
    const auto found = registered_ ? registry_.handle(data, 1) : std::nullopt;
    return found.value_or(0);
  }

  void set_reduction() {
    args_.premultiply = op_.reduce_op == ReduceOp::premul_sum;
    const DType t = op_.dtype;
    const bool has_sign = t == DType::i8 || t == DType::i16 || t == DType::i32 || t == DType::i64;
    args_.divide = op_.reduce_op != ReduceOp::avg ? divide_nothing : has_sign ? divide_signed : divide_plain;
    args_.factor = args_.divide ? n_ : op_.factor;
  }

  uint64_t staged_segment(int slots, int blocks) const {
    return shape_.group.half_bytes / (static_cast<uint64_t>(slots) * blocks) / align_bytes * align_bytes;
  }

  int blocks_for(uint64_t nbytes) const {
    return static_cast<int>(std::clamp<uint64_t>((nbytes + bytes_worth_a_block - 1) / bytes_worth_a_block, 1, shape_.blocks));
  }

  // Cuts [in, out) of all_reduce, reduce and broadcast into equal parts.
  void cut(const std::byte* in, std::byte* out, uint64_t nbytes) {
    const uint64_t part = round_up_to((nbytes + n_ - 1) / n_, align_bytes);
    for (int q = 0; q < n_; ++q) {
      const uint64_t begin = std::min(part * q, nbytes), end = std::min(part * (q + 1), nbytes);
      args_.in_bytes[q] = end - begin;
      args_.in_part[q] = in ? in + begin : nullptr;
      args_.out_part[q] = out ? out + begin : nullptr;
    }
  }

  void reduction() {
    const ReductionKey key = reduction_key(op_.dtype, op_.reduce_op);
    const Algorithm algorithm = plan_.choice.algorithm;
    if (op_.kind == OpKind::reduce_scatter) {
      for (int q = 0; q < n_; ++q) {
        args_.in_bytes[q] = bytes_of(op_.in_parts[q].count);
        args_.in_part[q] = op_.in_parts[q].data;
      }
      args_.out_part[me_] = op_.out;
    } else if (algorithm == Algorithm::one_shot) {
      args_.in_bytes[0] = op_.nbytes();
      args_.in_part[0] = op_.in;
      args_.out_part[0] = op_.out;
      return one_shot(key);
    } else {
      cut(op_.in, op_.out, op_.nbytes());
    }
    if (algorithm == Algorithm::ring) return ring(key);
    if (algorithm == Algorithm::multimem) return multimem(key);
    args_.direct_in = direct();
    if (op_.kind == OpKind::reduce_scatter) args_.stores = bit(me_);
    else if (direct()) args_.stores = op_.kind == OpKind::all_reduce ? all() : bit(op_.root);
    args_.results = args_.stores == 0;
    args_.fetch = op_.kind == OpKind::all_reduce || op_.root == me_;
    args_.exposes = args_.reads = all();
    note_handles();
    in_two_shots({Kernel::two_shot, key.dtype, key.op});
  }

  void broadcast_in_two() {
    const bool is_root = op_.root == me_;
    cut(is_root ? op_.in : nullptr, is_root ? nullptr : op_.out, op_.nbytes());
    args_.direct_in = direct();
    args_.stores = direct() ? all() : 0;
    args_.results = !direct();
    args_.fetch = !is_root;
    args_.exposes = is_root ? all() : 0;
    args_.reads = bit(op_.root);
    // The root has the result already: what others would store there is what lies there.
    for (int q = 0; q < n_ && is_root; ++q) args_.out_part[q] = direct() ? const_cast<std::byte*>(args_.in_part[q]) : nullptr;
    note_handles();
    in_two_shots({Kernel::copy_two_shot});
  }

  // Rank t reads my input of part t and stores its result into my out of part t.
  void note_handles() {
    for (int t = 0; t < n_; ++t) {
      args_.in_handle[t] = handle(args_.in_part[t]);
      args_.out_handle[t] = handle(args_.out_part[t]);
    }
  }

  void in_two_shots(KernelKey key) {
    uint64_t longest = 0;
    for (int q = 0; q < n_; ++q) longest = std::max(longest, args_.in_bytes[q]);
    const int blocks = blocks_for(longest * (op_.kind == OpKind::reduce_scatter ? 1 : n_));
    args_.slots = (args_.direct_in ? 0 : n_) + args_.results;
    args_.segment_bytes = args_.slots ? staged_segment(args_.slots, blocks) : whole_slice;
    begin(key.kernel, blocks);
    if (resident()) return launch(key, blocks, all_stages);
    const uint32_t segments = num_segments(longest, 0, blocks, args_.segment_bytes);
    for (uint32_t s = 0; s < std::max(segments, 1u); ++s) {
      at_segment(s);
      launch(key, blocks, stage_fill | (s == 0 ? stage_announce : 0));
      sync();
      launch(key, blocks, stage_reduce);
      if (!args_.results) continue;
      sync();
      launch(key, blocks, stage_gather);
    }
    finish(key, blocks);
  }

  void one_shot(const ReductionKey& reduction) {
    const KernelKey key{Kernel::one_shot, reduction.dtype, reduction.op};
    meta_.direct = false;  // it is all the same to the words where they come from
    const int blocks =
        static_cast<int>(std::clamp<uint64_t>((op_.nbytes() / 8 + units_worth_a_block - 1) / units_worth_a_block, 1, shape_.blocks));
    begin(key.kernel, blocks);
    if (resident()) return launch(key, blocks, all_stages);
    launch(key, blocks, stage_announce | stage_fill);
    sync();
    launch(key, blocks, stage_gather | stage_end);
    sync();
  }

  void ring(const ReductionKey& reduction) {
    const KernelKey key{Kernel::ring, reduction.dtype, reduction.op};
    const int blocks = blocks_for(op_.nbytes());
    args_.segment_bytes = 2 * shape_.group.half_bytes / (static_cast<uint64_t>(ring_slots) * blocks) / align_bytes * align_bytes;
    begin(key.kernel, blocks);
    launch(key, blocks, all_stages);
  }

  void multimem(const ReductionKey& reduction) {
    const KernelKey key{Kernel::multimem, reduction.dtype, reduction.op};
    const int blocks = blocks_for(op_.nbytes());
    args_.multicast_in = registry_.multicast(op_.in);
    args_.multicast_out = registry_.multicast(op_.out);
    if (!args_.multicast_in || !args_.multicast_out || op_.nbytes() % 16 ||
        (reinterpret_cast<uintptr_t>(op_.in) | reinterpret_cast<uintptr_t>(op_.out)) % 16)
      throw std::invalid_argument("algorithm multimem needs in and out in one buffer of pycomm.empty with multicast, aligned to 16 bytes");
    args_.call.extra = handle_or(op_.in, 0) ^ std::rotl(handle_or(op_.out, 0), 1);
    begin(key.kernel, blocks);
    launch(key, blocks, all_stages);
  }

  uint64_t handle_or(const std::byte* data, uint64_t other) const { return registry_.handle(data, 1).value_or(other); }

  void movement() {
    args_.direct_in = direct();
    args_.distinct = op_.kind == OpKind::all_to_all || op_.kind == OpKind::scatter;
    args_.pairwise = op_.kind == OpKind::all_to_all && op_.uneven;
    const bool is_root = op_.root == me_;
    uint64_t longest = 0;  // part; unknown where sizes are pairwise
    auto expose = [&](int to, const std::byte* data, size_t nbytes) {
      args_.in_bytes[to] = nbytes;
      if (to != me_) args_.exposes |= bit(to);
      args_.in_part[args_.distinct ? to : 0] = data;
      args_.in_handle[to] = handle(data);
      longest = std::max<uint64_t>(longest, nbytes);
    };
    auto read = [&](int from, std::byte* to, size_t nbytes) {
      args_.out_bytes[from] = nbytes;
      args_.reads |= bit(from);
      args_.out_part[from] = to;
      longest = std::max<uint64_t>(longest, nbytes);
    };
    const size_t own = bytes_of(op_.own_count(me_));
    switch (op_.kind) {
      case OpKind::all_gather:
        for (int p = 0; p < n_; ++p) expose(p, op_.in, own);
        for (int p = 0; p < n_; ++p) read(p, op_.out_parts[p].data, bytes_of(op_.out_parts[p].count));
        break;
      case OpKind::gather:
        expose(op_.root, op_.in, own);
        for (int p = 0; p < n_ && is_root; ++p) read(p, op_.out_parts[p].data, bytes_of(op_.out_parts[p].count));
        break;
      case OpKind::scatter:
        for (int p = 0; p < n_ && is_root; ++p) expose(p, op_.in_parts[p].data, bytes_of(op_.in_parts[p].count));
        read(op_.root, op_.out, own);
        break;
      case OpKind::broadcast:
        for (int p = 0; p < n_ && is_root; ++p) expose(p, op_.in, op_.nbytes());
        if (!is_root) read(op_.root, op_.out, op_.nbytes());
        break;
      case OpKind::all_to_all:
        for (int p = 0; p < n_; ++p) expose(p, op_.in_parts[p].data, bytes_of(op_.in_parts[p].count));
        for (int p = 0; p < n_; ++p) read(p, op_.out_parts[p].data, bytes_of(op_.out_parts[p].count));
        break;
      default: throw std::logic_error("pycomm: unknown collective");
    }
    if (op_.uneven && op_.kind == OpKind::all_gather)
      for (const Part& part : op_.out_parts) longest = std::max<uint64_t>(longest, bytes_of(part.count));
    const bool many =
        op_.kind == OpKind::all_gather || op_.kind == OpKind::all_to_all || op_.kind == OpKind::gather || op_.kind == OpKind::scatter;
    move(args_.pairwise ? shape_.blocks : blocks_for(longest * (many ? n_ : 1)), longest);
  }

  void move(int blocks, uint64_t longest) {
    const KernelKey key{Kernel::move};
    args_.slots = args_.distinct ? n_ : 1;
    args_.segment_bytes = args_.direct_in ? whole_slice : staged_segment(args_.slots, blocks);
    begin(key.kernel, blocks);
    if (resident()) return launch(key, blocks, all_stages);
    if (args_.pairwise) return pairwise(key, blocks);
    const uint32_t segments = num_segments(longest, 0, blocks, args_.segment_bytes);
    for (uint32_t s = 0; s < std::max(segments, 1u); ++s) {
      at_segment(s);
      launch(key, blocks, stage_fill | (s == 0 ? stage_announce : 0));
      sync();
      launch(key, blocks, stage_gather);
    }
    finish(key, blocks);
  }

  // In stream order, ranks must exchange equally often, but only pairs know how long they need. So one round, in segments as long as it
  // takes: each rank's parts go through its staging if they fit, and the rest is refused with the way out.
  void pairwise(KernelKey key, int blocks) {
    uint64_t longest = 0;
    for (int p = 0; p < n_; ++p) longest = std::max({longest, p == me_ ? 0 : args_.in_bytes[p], p == me_ ? 0 : args_.out_bytes[p]});
    if (!args_.direct_in && num_segments(longest, 0, blocks, args_.segment_bytes) > 2)
      throw std::invalid_argument("all_to_all with splits between processes that share a GPU without MPS moves at most " +
                                  std::to_string(2 * args_.segment_bytes * blocks) + " bytes between two ranks through the staging, got " +
                                  std::to_string(longest) + ". Use buffers from pycomm.empty, a larger staging, or MPS.");
    args_.end_segment = 2;
    launch(key, blocks, stage_announce | stage_fill);
    sync();
    launch(key, blocks, stage_verdict);
    sync();
    launch(key, blocks, stage_gather);
    args_.end_segment = 0;
    args_.first_segment = 0;
    finish(key, blocks);
  }

  void by_copy_engine() {
    std::vector<Step> copies;
    const size_t nbytes = op_.nbytes();
    for (int k = 0; k < n_; ++k) {
      const int p = (me_ + k) % n_;
      const std::byte* from = op_.kind == OpKind::all_gather ? op_.in : op_.in_parts[me_].data;
      if (p != me_) from = registry_.at_peer(from, p);
      if (!from) throw std::invalid_argument("algorithm copy_engine needs buffers from pycomm.empty");
      Step step;
      step.what = Step::What::copy;
      step.from = from;
      step.to = op_.out_parts[p].data;
      step.nbytes = nbytes;
      if (step.from != step.to && nbytes) copies.push_back(step);
    }
    // Offsets must agree: the copy engine is told addresses before anything is exchanged.
    args_.call.extra = handle_or(op_.kind == OpKind::all_gather ? op_.in : op_.in_parts[0].data, 0);
    bracket(copies);
  }

  void bracket(const std::vector<Step>& copies) {
    args_.exposes = args_.reads = all();
    begin(Kernel::open, 1);
    const bool barrier = op_.kind == OpKind::barrier;
    launch({Kernel::open}, 1, stage_announce | (barrier && resident() ? stage_end : 0), 64);
    if (!resident()) sync();
    if (!resident() && !barrier) launch({Kernel::close}, 1, stage_verdict, 64);  // compares: peers that disagree may not come to the end
    plan_.steps.insert(plan_.steps.end(), copies.begin(), copies.end());
    if (!resident()) {
      if (!barrier) sync();
      launch({Kernel::close}, 1, stage_end, 64);
      sync();
      even_syncs();
    } else if (!barrier) {
      launch({Kernel::close}, 1, stage_fill | stage_gather | stage_end, 64);
    }
  }

  // --- steps ---

  void begin(Kernel kernel, int blocks) {
    meta_.kernel = kernel;
    meta_.blocks = blocks;
    args_.call.meta = meta_.pack();
  }

  void at_segment(uint32_t s) {
    args_.first_segment = s;
    args_.end_segment = s + 1;
  }

  void launch(KernelKey key, int blocks, uint32_t stages, int threads = max_threads) {
    Step step;
    step.what = Step::What::launch;
    step.key = key;
    step.blocks = blocks;
    step.threads = threads;
    step.args = args_;
    step.args.stages = stages;
    plan_.steps.push_back(step);
  }

  void sync() { plan_.steps.push_back({}); }

  // Ends an operation in stream order: nobody reads from this rank any more.
  void finish(KernelKey key, int blocks) {
    args_.first_segment = args_.end_segment = 0;
    sync();
    launch(key, blocks, stage_end);
    even_syncs();
  }

  // [Note: even number of exchanges] An exchange uses one of two sets of words in turn (group.h), and a captured operation is replayed with
  // the set it was captured with; so every operation ends with the set it did not begin with.
  void even_syncs() {
    size_t count = 0;
    for (const Step& step : plan_.steps) count += step.what == Step::What::sync;
    if (count % 2) sync();
  }

  const Op& op_;
  const Shape& shape_;
  const Registry& registry_;
  const int n_, me_;
  bool registered_ = false;
  Args args_{};
  Meta meta_;
  Plan plan_;
};

}  // namespace

Plan plan(const Op& op, const Shape& shape, const Registry& registry, uint64_t timeout_ns) {
  return Planner(op, shape, registry, timeout_ns).build();
}

ArenaShape arena_shape(int world_size, size_t staging_bytes) {
  constexpr uint64_t page = 4096, one_shot_bytes = 32 << 10;
  ArenaShape shape;
  shape.words_bytes = 2 * one_shot_bytes;
  shape.staging_offset = round_up_to(sizeof(Control) + 2 * max_ranks * shape.words_bytes, page);
  const uint64_t smallest = static_cast<uint64_t>(max_blocks) * (max_ranks + 1) * align_bytes;  // every slot of a half holds a segment
  shape.half_bytes = round_up_to(std::max<uint64_t>(staging_bytes / 4, smallest), page);
  shape.message_offset = shape.staging_offset + 2 * shape.half_bytes;
  shape.message_bytes = round_up_to(std::max<uint64_t>(staging_bytes / 2 / world_size, 2 * message_blocks * align_bytes), 2 * page);
  shape.nbytes = shape.message_offset + world_size * shape.message_bytes;
  return shape;
}

}  // namespace pycomm::cuda
