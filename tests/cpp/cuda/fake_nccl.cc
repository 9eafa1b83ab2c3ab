// fake_nccl.cc -- see fake_nccl.h.
#include "fake_nccl.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <deque>
#include <set>
#include <thread>

#include "fake_buffers.h"
#include "fake_torch_device.h"

namespace py = pybind11;

namespace pycomm::cuda {

namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;

// Of one operation, or of a batch. Shared by its work, the thread that runs it, and the streams behind it.
struct State {
  std::atomic<bool> passed{false};  // the device has: streams behind it go on
  std::mutex mutex;
  std::exception_ptr error;  // what the host is told, while the device may still be in it

  void fail(std::exception_ptr with) {
    std::lock_guard lock(mutex);
    if (!error && !passed.load()) error = std::move(with);
  }
  bool failed() {
    std::lock_guard lock(mutex);
    return error != nullptr;
  }
};
using StatePtr = std::shared_ptr<State>;

class FakeWork final : public c10d::Work {
 public:
  FakeWork(StatePtr state, c10::Device device) : state_(std::move(state)), device_(device) {}
  // As WorkNCCL's: an error is an end for the host.
  bool isCompleted() override { return state_->passed.load() || state_->failed(); }
  std::exception_ptr exception() const override {
    std::lock_guard lock(state_->mutex);
    return state_->error;
  }
  bool wait(std::chrono::milliseconds) override {
    fake_run(fake_current_stream(device_), [state = state_] {
      while (!state->passed.load()) ::usleep(200);
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
  Buffers buffers;
  StatePtr state;
};
using JobPtr = std::shared_ptr<Job>;

std::exception_ptr error_of(const std::string& text) {
  return std::make_exception_ptr(std::runtime_error(text));
}
constexpr const char* aborted_text = "NCCL communicator was aborted";

using Ends = std::vector<std::function<void()>>;
struct Shared {
  BackendPtr gloo;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<JobPtr> jobs;
  std::set<JobPtr> under_way;
  int inside = 0, stuck = 0;  // threads in a call; of them those that only abort() lets go
  bool stop = false, quit = false, idle = true;
  std::atomic<bool> lingers{false}, aborted{false}, shut_down{false};
};

// A communicator is for one thread at a time, and for none after its end.
class Inside {
 public:
  Inside(std::shared_ptr<Shared> shared, const char* call) : shared_(std::move(shared)) {
    std::lock_guard lock(shared_->mutex);
    if (shared_->inside++) fake_violation(std::string(call) + " while another thread is inside of a call");
    if (shared_->aborted || shared_->shut_down) {
      fake_violation(std::string(call) + " after " + (shared_->aborted ? "abort()" : "shutdown()"));
      --shared_->inside;
      throw std::runtime_error(aborted_text);
    }
  }
  ~Inside() {
    std::lock_guard lock(shared_->mutex);
    --shared_->inside;
  }

 private:
  const std::shared_ptr<Shared> shared_;
};
class Stuck {
 public:
  explicit Stuck(Shared& shared) : shared_(shared) { add(1); }
  ~Stuck() { add(-1); }

 private:
  void add(int n) {
    std::lock_guard lock(shared_.mutex);
    shared_.stuck += n;
  }
  Shared& shared_;
};

Ends ends(WorkPtr work) {
  return {[work] { work->wait(); }};
}

// What an operation needs when it runs: the FakeNccl may be gone by then.
struct Self {
  std::shared_ptr<Shared> shared;
  int rank, size;

  c10d::Backend& gloo() const { return *shared->gloo; }
  Ends sum(at::Tensor x, const c10d::ReduceOp& op) const {
    const auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
    TORCH_CHECK(kind != c10d::ReduceOp::BAND && kind != c10d::ReduceOp::BOR && kind != c10d::ReduceOp::BXOR,
                "Cannot use bitwise ReduceOp with NCCL");
    c10d::AllreduceOptions options;
    const bool sums = kind == c10d::ReduceOp::AVG || kind == c10d::ReduceOp::PREMUL_SUM;
    options.reduceOp = sums ? c10d::ReduceOp::SUM : kind;  // ReduceOp(PREMUL_SUM) throws
    if (kind == c10d::ReduceOp::PREMUL_SUM)
      x.mul_(dynamic_cast<c10d::NCCLPreMulSumSupplement&>(*op.supplement_).double_factor);
    Tensors tensors{x};
    Ends all = ends(gloo().allreduce(tensors, options));
    if (kind == c10d::ReduceOp::AVG) all.push_back([x, n = size] { at::Tensor(x).div_(n); });
    return all;
  }
};

// --- the device

void run(Shared& shared) {
  c10::NoGradGuard no_grad;
  std::unique_lock lock(shared.mutex);
  for (;;) {
    shared.changed.wait(lock, [&] { return shared.stop || !shared.jobs.empty(); });
    if (shared.jobs.empty()) return;
    JobPtr job = std::move(shared.jobs.front());
    shared.jobs.pop_front();
    shared.idle = false;
    auto ready = std::move(job->ready);
    lock.unlock();
    while (!ready->query() && !job->state->failed()) ::usleep(100);
    ready.reset();  // what follows may hang for ever
    std::exception_ptr error;
    try {
      lock.lock();
      if (!shared.quit) job->buffers.read();
      lock.unlock();
      Ends all;
      for (auto& start : job->starts)
        for (auto& end : start()) all.push_back(std::move(end));
      for (auto& end : all) end();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    if (!lock.owns_lock()) lock.lock();
    if (error) {
      job->state->fail(error);  // the device stays in it until abort(), as NCCL's kernel does
    } else if (!shared.quit) {
      job->buffers.write();
      job->state->passed.store(true);
      shared.under_way.erase(job);
    }
    job.reset();
    shared.idle = true;
  }
}

// The host is told at once; the device stops now or, while it lingers, uses the memory.
void quit(const std::shared_ptr<Shared>& shared) {
  std::set<JobPtr> left;
  {
    std::lock_guard lock(shared->mutex);
    shared->quit = true;
    shared->jobs.clear();
    left = std::exchange(shared->under_way, {});
  }
  for (const JobPtr& job : left) {
    job->state->fail(error_of(aborted_text));
    job->ready.reset();
  }
  std::thread beside([left, shared] {
    for (; shared->lingers; ::usleep(5000))
      for (const JobPtr& job : left) job->buffers.read();
    for (const JobPtr& job : left) job->state->passed.store(true);
  });
  if (shared->lingers) beside.detach();
  else beside.join();
}

class FakeNccl final : public c10d::Backend {
 public:
  explicit FakeNccl(BackendPtr gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), shared_(std::make_shared<Shared>()) {
    shared_->gloo = std::move(gloo);
    thread_ = std::thread([shared = shared_] { run(*shared); });
  }
  ~FakeNccl() override {
    if (!shut_down()) quit(shared_);
    bool idle;
    {
      std::lock_guard lock(shared_->mutex);
      shared_->stop = true;
      idle = shared_->idle && shared_->jobs.empty();
      if (shared_->inside) fake_violation("the communicator is destroyed while a thread is inside of it");
    }
    shared_->changed.notify_all();
    // A job may hang for ever, as an operation of NCCL's does.
    if (idle) thread_.join();
    else thread_.detach();
  }

  const std::string getBackendName() const override { return "fake nccl"; }
  void eagerConnectSingleDevice(at::Device) override {
    const Inside inside(shared_, "eagerConnectSingleDevice");
    shared_->gloo->barrier()->wait();
  }
  bool supportsCoalescing() const override { return true; }

  // The operation after so many: ends with an error, hangs, is refused, or its call does not return; the last
  // three until abort().
  std::string fail_text;
  int fail_after = -1, hang_after = -1, refuse_after = -1, stick_after = -1;
  bool abort_hangs = false, shutdown_hangs = false;  // the latter until abort()
  std::vector<std::string> calls;
  bool aborted() const { return shared_->aborted; }
  bool shut_down() const { return shared_->shut_down; }

  // The device goes on after abort(), until this is false: as with a communicator that does not block.
  bool lingers() const { return shared_->lingers; }
  void set_lingers(bool on) { shared_->lingers = on; }

  void abort() override {
    {
      std::lock_guard lock(shared_->mutex);
      if (shut_down()) fake_violation("abort() after shutdown()");
      if (shared_->inside > shared_->stuck)
        fake_violation(
            "abort() while another thread is inside of a call, which it frees the communicator of");
    }
    if (shared_->aborted.exchange(true)) fake_violation("abort() twice");
    quit(shared_);
    while (abort_hangs) ::usleep(1000);
  }
  void shutdown() override {
    const Inside inside(shared_, "shutdown");
    {
      const Stuck stuck(*shared_);
      while (shutdown_hangs && !aborted()) ::usleep(1000);
    }
    if (!aborted()) shared_->shut_down = true;
  }

  void startCoalescing() override {
    const Inside inside(shared_, "startCoalescing");
    TORCH_CHECK(!batch_, "ncclGroupStart inside of a group");
    batch_ = std::make_shared<Job>();
    calls.push_back("start");
  }
  WorkPtr endCoalescing() override {
    const Inside inside(shared_, "endCoalescing");
    TORCH_CHECK(batch_, "ncclGroupEnd without a group");
    calls.push_back("end");
    return push(std::exchange(batch_, nullptr), device_);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    Buffers use;
    return start("allreduce", tensors[0], use,
                 [self = self(), x = use.out(tensors[0]), op = opts.reduceOp] { return self.sum(x, op); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const bool root = opts.rootRank == getRank();
    Buffers use;
    const at::Tensor x = root ? use.out(tensors[0]) : use.in(tensors[0]);
    return start("reduce", tensors[0], use,
                 [self = self(), x, op = opts.reduceOp] { return self.sum(x, op); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    Buffers use;
    return start("broadcast", tensors[0], use, [self = self(), xs = use.out(tensors), opts]() mutable {
      return ends(self.gloo().broadcast(xs, opts));
    });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(out.numel() == in.numel() * getSize(), "output of another size");
    Buffers use;
    return gather_all("allgather_base", use, use.out(out).chunk(getSize()), in);
  }
  WorkPtr allgather(Lists& outs, Tensors& ins, const c10d::AllgatherOptions&) override {
    Buffers use;
    return gather_all("allgather", use, use.out(outs.at(0)), ins.at(0));
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& opts) override {
    TORCH_CHECK(in.numel() == out.numel() * getSize(), "input of another size");
    Buffers use;
    return scatter_sum("reduce_scatter_base", use, out, use.in(in).chunk(getSize()), opts.reduceOp);
  }
  WorkPtr reduce_scatter(Tensors& outs, Lists& ins, const c10d::ReduceScatterOptions& opts) override {
    Buffers use;
    return scatter_sum("reduce_scatter", use, outs.at(0), use.in(ins.at(0)), opts.reduceOp);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& outs,
                        std::vector<int64_t>& ins, const c10d::AllToAllOptions& opts) override {
    Buffers use;
    return start("alltoall_base", in, use,
                 [self = self(), y = use.out(out), x = use.in(in), outs, ins, opts]() mutable {
                   return ends(self.gloo().alltoall_base(y, x, outs, ins, opts));
                 });
  }
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& opts) override {
    Buffers use;
    return start("alltoall", ins.at(0), use, [self = self(), ys = use.out(outs), xs = use.in(ins), opts] {
      std::vector<int64_t> sent, received;
      for (const at::Tensor& x : xs) sent.push_back(x.numel());
      for (const at::Tensor& y : ys) received.push_back(y.numel());
      at::Tensor from = at::cat(xs), to = at::cat(ys);
      auto all = ends(self.gloo().alltoall_base(to, from, received, sent, opts));
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
    Buffers use;
    Lists lists;
    for (const Tensors& list : outs) lists.push_back(use.out(list));
    return start("gather", ins.at(0), use, [self = self(), lists, xs = use.in(ins), opts]() mutable {
      return ends(self.gloo().gather(lists, xs, opts));
    });
  }
  WorkPtr scatter(Tensors& outs, Lists& ins, const c10d::ScatterOptions& opts) override {
    Buffers use;
    Lists lists;
    for (const Tensors& list : ins) lists.push_back(use.in(list));
    return start("scatter", outs.at(0), use, [self = self(), lists, ys = use.out(outs), opts]() mutable {
      return ends(self.gloo().scatter(ys, lists, opts));
    });
  }
  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    Buffers use;
    return start("send", tensors.at(0), use, [self = self(), xs = use.in(tensors), dst, tag]() mutable {
      return ends(self.gloo().send(xs, dst, tag));
    });
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    Buffers use;
    return start("recv", tensors.at(0), use, [self = self(), xs = use.out(tensors), src, tag]() mutable {
      return ends(self.gloo().recv(xs, src, tag));
    });
  }

 private:
  Self self() const { return {shared_, getRank(), getSize()}; }
  WorkPtr gather_all(const char* name, Buffers& use, const Tensors& outs, const at::Tensor& in) {
    return start(name, in, use, [self = self(), outs, x = use.in(in)] {
      at::Tensor(outs.at(self.rank)).copy_(x.view_as(outs.at(self.rank)));
      Ends all;
      for (int p = 0; p < self.size; ++p) {
        c10d::BroadcastOptions options;
        options.rootRank = p;
        Tensors tensors{outs[p]};
        if (outs[p].numel()) all.push_back(ends(self.gloo().broadcast(tensors, options))[0]);
      }
      return all;
    });
  }

  WorkPtr scatter_sum(const char* name, Buffers& use, const at::Tensor& out, const Tensors& ins,
                      const c10d::ReduceOp& op) {
    return start(name, out, use, [self = self(), y = use.out(out), ins, op] {
      Tensors flat;
      std::vector<int64_t> lengths;
      for (const at::Tensor& in : ins) {
        flat.push_back(in.reshape({-1}));
        lengths.push_back(in.numel());
      }
      const at::Tensor all_parts = at::cat(flat);
      Ends all = self.sum(all_parts, op);
      all.push_back([y, all_parts, lengths, rank = self.rank] {
        at::Tensor(y).copy_(all_parts.split_with_sizes(lengths)[rank].view_as(y));
      });
      return all;
    });
  }

  // `use` is what `begin` works on; the caller has filled it by then.
  template <class Start>
  WorkPtr start(const char* name, const at::Tensor& tensor, Buffers& use, Start begin) {
    const Inside inside(shared_, name);
    calls.push_back(name);
    TORCH_CHECK(!count(refuse_after), "ncclInvalidUsage: refused here. Try again");
    if (count(stick_after)) {
      const Stuck stuck(*shared_);
      while (!aborted()) ::usleep(1000);
      throw std::runtime_error(aborted_text);
    }
    device_ = tensor.device();
    const JobPtr job = batch_ ? batch_ : std::make_shared<Job>();
    job->starts.push_back([begin]() mutable { return begin(); });
    job->buffers.append(use);
    return batch_ ? nullptr : push(job, tensor.device());
  }

  static bool count(int& left) { return left >= 0 && left-- == 0; }

  WorkPtr push(const JobPtr& job, c10::Device device) {
    job->state = std::make_shared<State>();
    job->ready = std::make_shared<c10::Event>(c10::kCUDA);
    job->ready->record(fake_current_stream(device));
    auto work = c10::make_intrusive<FakeWork>(job->state, device);
    if (count(fail_after)) job->starts = {[text = fail_text]() -> Ends { throw std::runtime_error(text); }};
    const bool hangs = count(hang_after);
    std::lock_guard lock(shared_->mutex);
    shared_->under_way.insert(job);
    if (!hangs) shared_->jobs.push_back(job);
    shared_->changed.notify_all();
    return work;
  }

  const std::shared_ptr<Shared> shared_;
  JobPtr batch_;
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
      .def_readwrite("stick_after", &FakeNccl::stick_after)
      .def_property("lingers", &FakeNccl::lingers, &FakeNccl::set_lingers)
      .def_readwrite("abort_hangs", &FakeNccl::abort_hangs)
      .def_readwrite("shutdown_hangs", &FakeNccl::shutdown_hangs)
      .def_readwrite("calls", &FakeNccl::calls)
      .def_property_readonly("aborted", &FakeNccl::aborted)
      .def_property_readonly("shut_down", &FakeNccl::shut_down);
}

}  // namespace pycomm::cuda
