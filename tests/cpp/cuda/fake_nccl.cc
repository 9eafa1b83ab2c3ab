// fake_nccl.cc -- see fake_nccl.h.
#include "fake_nccl.h"

#include <ATen/ATen.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <set>
#include <thread>

#include "fake_torch_device.h"

namespace py = pybind11;

namespace pycomm::cuda {

namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;

at::Tensor on_cpu(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda() && tensor.is_contiguous(), "Tensors must be CUDA and dense");
  static const std::set<at::ScalarType> known{at::kDouble, at::kFloat, at::kHalf, at::kBFloat16,
                                              at::kChar,   at::kByte,  at::kInt,  at::kLong};
  TORCH_CHECK(known.count(tensor.scalar_type()), "Unconvertible NCCL type ", tensor.scalar_type());
  if (tensor.numel() == 0) return at::empty({0}, tensor.scalar_type());
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
}

Tensors on_cpu(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& tensor : tensors) all.push_back(on_cpu(tensor));
  return all;
}

// Of one operation, or of a batch. Shared by its work, the thread that runs it, and the streams behind it.
struct State {
  std::atomic<bool> done{false};
  std::mutex mutex;
  std::exception_ptr error;

  void end(std::exception_ptr with) {
    std::lock_guard lock(mutex);
    if (done.load()) return;
    error = std::move(with);
    done.store(true);
  }
};
using StatePtr = std::shared_ptr<State>;

class FakeWork final : public c10d::Work {
 public:
  FakeWork(StatePtr state, c10::Device device) : state_(std::move(state)), device_(device) {}
  bool isCompleted() override { return state_->done.load(); }
  std::exception_ptr exception() const override {
    std::lock_guard lock(state_->mutex);
    return state_->error;
  }
  bool wait(std::chrono::milliseconds) override {
    fake_run(fake_current_stream(device_), [state = state_] {
      while (!state->done.load()) ::usleep(200);
    });
    return true;
  }

 private:
  const StatePtr state_;
  const c10::Device device_;
};

struct Job {
  using Start = std::function<std::vector<std::function<void()>>()>;  // starts it; what ends it
  std::shared_ptr<c10::Event> ready;
  std::vector<Start> starts;
  StatePtr state;
  std::string name;
};

class FakeNccl final : public c10d::Backend {
 public:
  explicit FakeNccl(BackendPtr gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), shared_(std::make_shared<Shared>()) {
    shared_->gloo = std::move(gloo);
    thread_ = std::thread([shared = shared_] { run(*shared); });
  }
  ~FakeNccl() override {
    {
      std::lock_guard lock(shared_->mutex);
      shared_->stop = true;
    }
    shared_->changed.notify_all();
    // A job may hang for ever, as an operation of NCCL's does.
    if (shared_->idle.load()) thread_.join();
    else thread_.detach();
  }

  const std::string getBackendName() const override { return "fake nccl"; }
  void eagerConnectSingleDevice(at::Device) override { shared_->gloo->barrier()->wait(); }
  bool supportsCoalescing() const override { return true; }

  // The operation after so many ends with an error, or only by abort().
  std::string fail_text;
  int fail_after = -1, hang_after = -1, refuse_after = -1;
  std::vector<std::string> calls;
  bool aborted = false, shut_down = false;

  void abort() override {
    aborted = true;
    std::lock_guard lock(shared_->mutex);
    shared_->jobs.clear();
    for (const StatePtr& state : shared_->under_way)
      state->end(std::make_exception_ptr(std::runtime_error("NCCL communicator was aborted")));
  }
  void shutdown() override { shut_down = true; }

  void startCoalescing() override {
    TORCH_CHECK(!batch_, "ncclGroupStart inside of a group");
    batch_.emplace();
    calls.push_back("start");
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(batch_, "ncclGroupEnd without a group");
    calls.push_back("end");
    Job job = std::move(*batch_);
    batch_.reset();
    return push(std::move(job), device_);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return start("allreduce", tensors[0],
                 [this, x = on_cpu(tensors[0]), opts] { return sum(x, opts.reduceOp); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const bool root = opts.rootRank == getRank();
    return start("reduce", tensors[0], [this, x = on_cpu(tensors[0]), opts, root] {
      return sum(root ? x : x.clone(), opts.reduceOp);
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return start("broadcast", tensors[0],
                 [this, xs = on_cpu(tensors), opts]() mutable { return ends(gloo().broadcast(xs, opts)); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(out.numel() == in.numel() * getSize(), "output of another size");
    return gather_all("allgather_base", on_cpu(out).chunk(getSize()), in);
  }
  WorkPtr allgather(Lists& outs, Tensors& ins, const c10d::AllgatherOptions&) override {
    return gather_all("allgather", on_cpu(outs.at(0)), ins.at(0));
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& opts) override {
    TORCH_CHECK(in.numel() == out.numel() * getSize(), "input of another size");
    return scatter_sum("reduce_scatter_base", out, on_cpu(in).chunk(getSize()), opts.reduceOp);
  }
  WorkPtr reduce_scatter(Tensors& outs, Lists& ins, const c10d::ReduceScatterOptions& opts) override {
    return scatter_sum("reduce_scatter", outs.at(0), on_cpu(ins.at(0)), opts.reduceOp);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& outs,
                        std::vector<int64_t>& ins, const c10d::AllToAllOptions& opts) override {
    return start("alltoall_base", in, [this, y = on_cpu(out), x = on_cpu(in), outs, ins, opts]() mutable {
      return ends(gloo().alltoall_base(y, x, outs, ins, opts));
    });
  }
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& opts) override {
    return start("alltoall", ins.at(0), [this, ys = on_cpu(outs), xs = on_cpu(ins), opts] {
      std::vector<int64_t> sent, received;
      for (const at::Tensor& x : xs) sent.push_back(x.numel());
      for (const at::Tensor& y : ys) received.push_back(y.numel());
      at::Tensor from = at::cat(xs), to = at::cat(ys);
      auto all = ends(gloo().alltoall_base(to, from, received, sent, opts));
      all.push_back([ys, to] {
        std::vector<int64_t> lengths;  // Gloo has emptied `received`
        for (const at::Tensor& y : ys) lengths.push_back(y.numel());
        const Tensors parts = to.split_with_sizes(lengths);
        for (size_t i = 0; i < ys.size(); ++i) at::Tensor(ys[i]).copy_(parts[i]);
      });
      return all;
    });
  }
  WorkPtr gather(Lists& outs, Tensors& ins, const c10d::GatherOptions& opts) override {
    Lists lists;
    for (const Tensors& list : outs) lists.push_back(on_cpu(list));
    return start("gather", ins.at(0), [this, lists, xs = on_cpu(ins), opts]() mutable {
      return ends(gloo().gather(lists, xs, opts));
    });
  }
  WorkPtr scatter(Tensors& outs, Lists& ins, const c10d::ScatterOptions& opts) override {
    Lists lists;
    for (const Tensors& list : ins) lists.push_back(on_cpu(list));
    return start("scatter", outs.at(0), [this, lists, ys = on_cpu(outs), opts]() mutable {
      return ends(gloo().scatter(ys, lists, opts));
    });
  }
  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    return start("send", tensors.at(0), [this, xs = on_cpu(tensors), dst, tag]() mutable {
      return ends(gloo().send(xs, dst, tag));
    });
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    return start("recv", tensors.at(0), [this, xs = on_cpu(tensors), src, tag]() mutable {
      return ends(gloo().recv(xs, src, tag));
    });
  }

 private:
  using Ends = std::vector<std::function<void()>>;
  struct Shared {
    BackendPtr gloo;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> jobs;
    std::set<StatePtr> under_way;
    bool stop = false;
    std::atomic<bool> idle{true};
  };

  c10d::Backend& gloo() const { return *shared_->gloo; }
  static Ends ends(WorkPtr work) {
    return {[work] { work->wait(); }};
  }

  Ends sum(at::Tensor x, const c10d::ReduceOp& op) const {
    const auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
    TORCH_CHECK(kind != c10d::ReduceOp::BAND && kind != c10d::ReduceOp::BOR && kind != c10d::ReduceOp::BXOR,
                "Cannot use bitwise ReduceOp with NCCL");
    c10d::AllreduceOptions options;
    options.reduceOp = kind;
    if (kind == c10d::ReduceOp::AVG || kind == c10d::ReduceOp::PREMUL_SUM)
      options.reduceOp = c10d::ReduceOp::SUM;
    if (kind == c10d::ReduceOp::PREMUL_SUM)
      x.mul_(dynamic_cast<c10d::NCCLPreMulSumSupplement&>(*op.supplement_).double_factor);
    Tensors tensors{x};
    Ends all = ends(gloo().allreduce(tensors, options));
    if (kind == c10d::ReduceOp::AVG) all.push_back([x, n = getSize()] { at::Tensor(x).div_(n); });
    return all;
  }

  WorkPtr gather_all(const char* name, const Tensors& outs, const at::Tensor& in) {
    return start(name, in, [this, outs, x = on_cpu(in)] {
      at::Tensor(outs.at(getRank())).copy_(x.view_as(outs.at(getRank())));
      Ends all;
      for (int p = 0; p < getSize(); ++p) {
        c10d::BroadcastOptions options;
        options.rootRank = p;
        Tensors tensors{outs[p]};
        if (outs[p].numel()) all.push_back(ends(gloo().broadcast(tensors, options))[0]);
      }
      return all;
    });
  }

  WorkPtr scatter_sum(const char* name, const at::Tensor& out, const Tensors& ins, const c10d::ReduceOp& op) {
    return start(name, out, [this, y = on_cpu(out), ins, op] {
      Tensors flat;
      std::vector<int64_t> lengths;
      for (const at::Tensor& in : ins) {
        flat.push_back(in.reshape({-1}));
        lengths.push_back(in.numel());
      }
      const at::Tensor all_parts = at::cat(flat);
      Ends all = sum(all_parts, op);
      all.push_back([y, all_parts, lengths, rank = getRank()] {
        at::Tensor(y).copy_(all_parts.split_with_sizes(lengths)[rank].view_as(y));
      });
      return all;
    });
  }

  template <class Start>
  WorkPtr start(const char* name, const at::Tensor& tensor, Start begin) {
    calls.push_back(name);
    TORCH_CHECK(!count(refuse_after), "ncclInvalidUsage: refused here. Try again");
    device_ = tensor.device();
    Job::Start shared_start = [begin]() mutable { return begin(); };
    if (batch_) {
      batch_->starts.push_back(std::move(shared_start));
      batch_->name = name;
      return nullptr;
    }
    Job job;
    job.starts.push_back(std::move(shared_start));
    job.name = name;
    return push(std::move(job), tensor.device());
  }

  static bool count(int& left) { return left >= 0 && left-- == 0; }

  WorkPtr push(Job job, c10::Device device) {
    job.state = std::make_shared<State>();
    job.ready = std::make_shared<c10::Event>(c10::kCUDA);
    job.ready->record(fake_current_stream(device));
    auto work = c10::make_intrusive<FakeWork>(job.state, device);
    if (count(fail_after)) job.starts = {[text = fail_text]() -> Ends { throw std::runtime_error(text); }};
    const bool hangs = count(hang_after);
    std::lock_guard lock(shared_->mutex);
    shared_->under_way.insert(job.state);
    if (aborted) job.state->end(std::make_exception_ptr(std::runtime_error("NCCL communicator was aborted")));
    else if (!hangs) shared_->jobs.push_back(std::move(job));
    shared_->changed.notify_all();
    return work;
  }

  static void run(Shared& shared) {
    c10::NoGradGuard no_grad;
    std::unique_lock lock(shared.mutex);
    for (;;) {
      shared.changed.wait(lock, [&] { return shared.stop || !shared.jobs.empty(); });
      if (shared.jobs.empty()) return;
      Job job = std::move(shared.jobs.front());
      shared.jobs.pop_front();
      shared.idle.store(false);
      lock.unlock();
      while (!job.ready->query() && !job.state->done.load()) ::usleep(100);
      job.ready.reset();  // what follows may hang for ever
      try {
        Ends all;
        for (auto& start : job.starts)
          for (auto& end : start()) all.push_back(std::move(end));
        for (auto& end : all) end();
        job.state->end(nullptr);
      } catch (const std::exception&) {
        job.state->end(std::current_exception());
      }
      lock.lock();
      shared.under_way.erase(job.state);
      job = {};
      shared.idle.store(true);
    }
  }

  const std::shared_ptr<Shared> shared_;
  std::optional<Job> batch_;
  c10::Device device_{c10::kCUDA, 0};
  std::thread thread_;
};

}  // namespace

void bind_fake_nccl(py::module_& module) {
  py::module_::import("torch.distributed");
  py::class_<FakeNccl, c10d::Backend, c10::intrusive_ptr<FakeNccl>>(module, "FakeNccl")
      .def(py::init<BackendPtr>())
      .def_readwrite("fail_text", &FakeNccl::fail_text)
      .def_readwrite("fail_after", &FakeNccl::fail_after)
      .def_readwrite("hang_after", &FakeNccl::hang_after)
      .def_readwrite("refuse_after", &FakeNccl::refuse_after)
      .def_readwrite("calls", &FakeNccl::calls)
      .def_readonly("aborted", &FakeNccl::aborted)
      .def_readonly("shut_down", &FakeNccl::shut_down);
}

}  // namespace pycomm::cuda
