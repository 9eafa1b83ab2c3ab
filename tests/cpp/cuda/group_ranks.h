// group_ranks.h -- CUDA groups over the fake driver, for tests: where ranks sit, collectives with their
// oracle, a rank with its stream.
#pragma once

#include "../../../csrc/cuda/group.h"
#include "ranks.h"

namespace pycomm::cuda {

// Ranks on the machine: `threads` of them in each process, on `devices` in turn.
struct Setting {
  int ranks = 2, threads = 2, devices = 1;
  bool mps = false;
  std::string protocol = {};
  int multiprocessors = 4;
  int connections = 0;  // hardware queues; 0: enough

  std::string text() const {
    return std::to_string(ranks) + " ranks, " + std::to_string(threads) + " per process, " +
           std::to_string(devices) + " devices" + (mps ? ", MPS" : "") +
           (protocol.empty() ? "" : ", " + protocol);
  }
};

inline RunOptions run_options(const Setting& setting, double timeout = 10) {
  RunOptions options{.ranks = setting.ranks, .threads = setting.threads, .limit = 40, .timeout = timeout};
  options.before_threads = [setting](int) {
    fake_settings() = {};
    fake_settings().devices = setting.devices;
    fake_settings().mps = setting.mps;
    fake_settings().multiprocessors = setting.multiprocessors;
    fake_settings().connections = setting.connections;
  };
  options.device = {.staging_bytes = 64 << 10,
                    .protocol = setting.protocol,
                    .connections = setting.connections ? setting.connections : 32};
  return options;
}

class OwnStream {
 public:
  explicit OwnStream(Device device) : guard_(device) {
    check(fake_driver()->cuStreamCreateWithPriority(&stream, flag::stream_non_blocking, 0),
          "cuStreamCreateWithPriority");
  }
  ~OwnStream() { fake_driver()->cuStreamDestroy(stream); }
  OwnStream(const OwnStream&) = delete;
  void synchronize() { check(fake_driver()->cuStreamSynchronize(stream), "cuStreamSynchronize"); }

  Stream stream = nullptr;

 private:
  ContextGuard guard_;
};

// Memory that kernels use. Where a test fails they may still be running, so it is kept to the end.
class Buffer : public std::vector<float> {
 public:
  using std::vector<float>::vector;
  ~Buffer() {
    if (!std::uncaught_exceptions()) return;
    static std::mutex mutex;
    static auto& kept = *new std::list<std::vector<float>>;
    const std::lock_guard lock(mutex);
    kept.push_back(std::move(*this));
  }
};

struct Spec {
  OpKind kind = OpKind::all_reduce;
  size_t count = 1;  // all_reduce, reduce, broadcast: of the buffer; else of one part
  Algorithm algorithm = Algorithm::automatic;
  bool uneven = false;
  int root = 0;
  ReduceOp op = ReduceOp::sum;
};

// One collective of f32 on one rank: its buffers, and what they must hold afterwards.
class Trial {
 public:
  Trial(CudaGroup& group, const Rank& rank, const Spec& spec, bool registered = false, uint64_t salt = 0)
      : group_(group), spec_(spec), n_(rank.world_size), me_(rank.rank), salt_(salt) {
    size_t longest_in = 0, longest_out = 0;  // registered memory has one size on all ranks
    for (int r = 0; r < n_; ++r) {
      longest_in = std::max(longest_in, in_count(r));
      longest_out = std::max(longest_out, expected(r).size());
    }
    out_count_ = expected(me_).size();
    const size_t nbytes = (longest_in + 32) / 32 * 128 + longest_out * sizeof(float) + 4;
    if (registered) registered_ = group.allocate(nbytes);
    else plain_.resize(nbytes / sizeof(float));
    in_ = registered ? reinterpret_cast<float*>(registered_.data) : plain_.data();
    out_ = in_ + (longest_in + 32) / 32 * 32;
  }
  ~Trial() {
    if (registered_.memory) group_.release(registered_);
  }
  Trial(const Trial&) = delete;

  Op op() {
    Op op;
    op.kind = spec_.kind;
    op.dtype = DType::f32;
    op.reduce_op = spec_.op;
    op.algorithm = spec_.algorithm;
    op.uneven = spec_.uneven;
    op.root = spec_.root;
    op.count = spec_.count;
    const bool is_root = me_ == spec_.root;
    auto* in = reinterpret_cast<std::byte*>(in_);
    auto* out = reinterpret_cast<std::byte*>(out_);
    auto parts = [&](std::byte* base, auto count_of) {
      std::vector<Part> list;
      for (int q = 0; q < n_; base += count_of(q++) * sizeof(float)) list.push_back({base, count_of(q)});
      return list;
    };
    auto single = [&](int q) { return part(q); };
    switch (spec_.kind) {
      case OpKind::barrier: op.count = 0; break;
      case OpKind::broadcast: (is_root ? void(op.in = in) : void(op.out = out)); break;
      case OpKind::reduce:
        op.in = in;
        op.out = is_root ? out : nullptr;
        break;
      case OpKind::all_gather:
        op.in = in;
        op.out_parts = parts(out, single);
        if (spec_.uneven) op.count = total(single);
        break;
      case OpKind::gather:
        op.in = in;
        if (is_root) op.out_parts = parts(out, single);
        break;
      case OpKind::reduce_scatter:
        op.in_parts = parts(in, single);
        op.out = out;
        if (spec_.uneven) op.count = total(single);
        break;
      case OpKind::scatter:
        if (is_root) op.in_parts = parts(in, single);
        op.out = out;
        break;
      case OpKind::all_to_all:
        op.in_parts = parts(in, [&](int q) { return pair(me_, q); });
        op.out_parts = parts(out, [&](int q) { return pair(q, me_); });
        if (spec_.uneven) op.count = 0;
        break;
      default: op.in = in; op.out = out;
    }
    return op;
  }

  // In stream order around the operation. The buffers are written over when they have been checked, as a
  // caller may.
  void fill(Stream stream) {
    fake_enqueue(stream, [this] {
      for (size_t i = 0; i < in_count(me_); ++i) in_[i] = value(me_, i);
      std::fill_n(out_, out_count_, -99.0f);
    });
  }
  void look(Stream stream) {
    fake_enqueue(stream, [this] {
      const std::vector<float> wanted = expected(me_);
      for (size_t i = 0; i < wanted.size() && wrong_.empty(); ++i)
        if (out_[i] != wanted[i])
          wrong_ = text() + ": element " + std::to_string(i) + " is " + std::to_string(out_[i]) + ", not " +
                   std::to_string(wanted[i]);
      std::fill_n(in_, in_count(me_), -77.0f);
      std::fill_n(out_, out_count_, -77.0f);
      ++looked_;
    });
  }
  // After the stream was synchronised.
  void check(int times = 1) const {
    require(looked_ == times,
            text() + " was looked at " + std::to_string(times) + " times, not " + std::to_string(looked_));
    require(wrong_.empty(), wrong_);
  }

  std::string text() const {
    return std::string(to_string(spec_.kind)) + " " + to_string(spec_.algorithm) +
           " count=" + std::to_string(spec_.count) + (spec_.uneven ? " uneven" : "") +
           (registered_.memory ? " registered" : "");
  }

 private:
  float value(int src, size_t i) const { return static_cast<float>((src * 7 + i * 3 + salt_) % 11) - 3; }
  size_t part(int q) const { return spec_.uneven ? spec_.count * (q % 3) / 2 + (q == 1) : spec_.count; }
  size_t pair(int src, int dst) const {
    return spec_.uneven ? spec_.count * ((src + 2 * dst) % 4) / 3 + (src == dst) : spec_.count;
  }
  template <class Count>
  size_t total(Count count_of, int end = -1) const {
    size_t sum = 0;
    for (int q = 0; q < (end < 0 ? n_ : end); ++q) sum += count_of(q);
    return sum;
  }

  size_t in_count(int r) const {
    auto single = [&](int q) { return part(q); };
    switch (spec_.kind) {
      case OpKind::barrier: return 0;
      case OpKind::all_gather:
      case OpKind::gather: return part(r);
      case OpKind::reduce_scatter:
      case OpKind::scatter: return total(single);
      case OpKind::all_to_all: return total([&](int q) { return pair(r, q); });
      default: return spec_.count;
    }
  }

  std::vector<float> expected(int r) const {
    std::vector<float> wanted;
    auto append = [&](int src, size_t first, size_t count) {
      for (size_t i = first; i < first + count; ++i) wanted.push_back(value(src, i));
    };
    auto append_reduced = [&](size_t first, size_t count) {
      for (size_t i = first; i < first + count; ++i) {
        float sum = value(0, i);
        for (int p = 1; p < n_; ++p)
          sum = spec_.op == ReduceOp::max ? std::max(sum, value(p, i)) : sum + value(p, i);
        wanted.push_back(sum);
      }
    };
    auto single = [&](int q) { return part(q); };
    const bool is_root = r == spec_.root;
    switch (spec_.kind) {
      case OpKind::all_reduce: append_reduced(0, spec_.count); break;
      case OpKind::reduce: append_reduced(0, is_root ? spec_.count : 0); break;
      case OpKind::reduce_scatter: append_reduced(total(single, r), part(r)); break;
      case OpKind::broadcast: append(spec_.root, 0, is_root ? 0 : spec_.count); break;
      case OpKind::gather:
      case OpKind::all_gather:
        for (int p = 0; p < n_ && (is_root || spec_.kind == OpKind::all_gather); ++p) append(p, 0, part(p));
        break;
      case OpKind::scatter: append(spec_.root, total(single, r), part(r)); break;
      case OpKind::all_to_all:
        for (int p = 0; p < n_; ++p) append(p, total([&](int q) { return pair(p, q); }, r), pair(p, r));
        break;
      default: break;
    }
    return wanted;
  }

  CudaGroup& group_;
  const Spec spec_;
  const int n_, me_;
  const uint64_t salt_;
  Registered registered_{};
  Buffer plain_;
  size_t out_count_ = 0;
  float *in_ = nullptr, *out_ = nullptr;
  std::string wrong_;
  int looked_ = 0;
};

// A rank with its group and a stream of its own.
class Member {
 public:
  explicit Member(Rank& rank, int devices = 1)
      : rank(rank),
        device(rank.rank % devices),
        group(CudaGroup::of(rank.comm, device)),
        own(device),
        stream(own.stream) {}

  Issue issue(bool async_op = false, Stream on = nullptr) const {
    const Stream current = on ? on : stream;
    return {.stream = current, .async_op = async_op, .current = [current] { return current; }};
  }
  CudaWorkPtr run(Trial& call, bool async_op = false) {
    call.fill(stream);
    const CudaWorkPtr work = group.issue(call.op(), issue(async_op));
    if (async_op) work->wait();
    call.look(stream);
    return work;
  }
  // One small all_reduce with the right result.
  void exercise(bool async_op = false) {
    Trial call(group, rank, {.count = 5});
    run(call, async_op);
    own.synchronize();
    call.check();
  }

  // Gives everything back, on all ranks.
  void finish() {
    own.synchronize();
    rank.barrier();
    group.close();
    rank.barrier();
    PeerMemory::free_parked();
  }

  Rank& rank;
  const Device device;
  CudaGroup& group;
  OwnStream own;
  const Stream stream;
};

// Holds a stream until it is opened.
class Gate {
 public:
  explicit Gate(Stream stream) {
    fake_enqueue(stream, [open = open_] {
      while (!open->load()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
  }
  ~Gate() { open(); }
  void open() { open_->store(true); }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

inline void wait_until(const std::function<bool()>& so, const std::string& what) {
  for (int i = 0; i < 5000 && !so(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  require(so(), what);
}

inline std::string description(const CudaGroup& group, const std::string& key) {
  for (const auto& [name, value] : group.describe())
    if (name == key) return value;
  return "";
}

inline double seconds_of(const std::function<void()>& body) {
  const auto began = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// The CommError that body throws.
inline CommError comm_error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& error) {
    return error;
  }
  throw std::runtime_error("no CommError came");
}

// --- groups that have failed
inline std::string kind_of(const CommError& error) {
  return std::to_string(static_cast<int>(error.kind)) + ": " + error.what();
}
inline void require_kind(const CommError& error, ErrorKind kind) {
  require(error.kind == kind, "the kind of the error, " + kind_of(error));
}

// Streams end, works end, memory goes back, although the group is broken.
inline void finish_broken(Member& me, const Setting& setting) {
  static std::atomic<int> stopped{0};  // ranks of this process
  require(seconds_of([&] { me.own.synchronize(); }) < 1, "the device has stopped waiting");
  ++stopped;
  for (int i = 0; i < 1000 && stopped < setting.threads; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  require(seconds_of([&] { me.group.close(); }) < 1, "close() is quick");
  for (int i = 0; i < 3000 && PeerMemory::free_parked(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Until the group throws; polling calls nothing that could put this rank out of step.
inline CommError error_soon(const CudaWorkPtr& work) {
  return comm_error_of([&] {
    for (int i = 0; i < 5000; ++i) {
      if (work->poll()) work->wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

}  // namespace pycomm::cuda
