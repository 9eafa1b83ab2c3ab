// group_faults_test.cc -- csrc/cuda/group.h over the fake driver: calls that differ, ranks that start late,
// die, abort or close, driver calls that fail. Everything becomes an error on every rank within a bounded
// time, and nothing is left over.
#include <sys/mman.h>

#include "group_ranks.h"

using namespace pycomm;
using namespace pycomm::cuda;

namespace {
const Setting together{3, 3}, apart{3, 1, 1, true}, in_order{3, 1},
    in_order_together{3, 3, 1, false, "stream_ordered"}, mixed{4, 2, 4};
const std::vector<Setting> all_settings = {together, apart, in_order, in_order_together, mixed};

bool resident(const Member& me) { return description(me.group, "protocol") == "resident"; }

// --- calls that differ
struct Difference {
  const char* name;
  std::function<void(Op&)> change;  // of rank 1's call
  std::string text;                 // on rank 0, and on rank 1 the other way round
  std::string there;
};

const std::vector<Difference>& differences() {
  static const std::vector<Difference> list = {
      {"count", [](Op& op) { op.count = 4; }, "count=8 here, 4 on rank 1", "count=4 here, 8 on rank 0"},
      {"dtype", [](Op& op) { op.dtype = DType::i32; }, "dtype=f32 here, i32 on rank 1",
       "dtype=i32 here, f32 on rank 0"},
      {"op", [](Op& op) { op.reduce_op = ReduceOp::max; }, "reduce op=sum here, max on rank 1",
       "reduce op=max here, sum on rank 0"},
      {"kind", [](Op& op) { op.kind = OpKind::reduce; }, "operation=all_reduce here, reduce on rank 1",
       "operation=reduce here, all_reduce on rank 0"},
      {"root", [](Op& op) { op.root = 1; }, "root=0 here, 1 on rank 1", "root=1 here, 0 on rank 0"}};
  return list;
}

void test_mismatches() {
  for (const Setting& setting : all_settings)
    for (size_t i = 0; i < differences().size(); ++i) {
      const Difference& difference = differences()[i];
      const auto body = [&](Rank& rank) {
        Member me(rank, setting.devices);
        me.exercise();
        Trial trial(me.group, rank, {.count = 8});
        Op op = trial.op();
        if (i == 4) op.kind = OpKind::reduce;
        if (rank.rank == 1) difference.change(op);
        const auto work = me.group.issue(op, me.issue(true));
        // Each way to hear of it, in turn.
        const CommError error = i % 4 == 0   ? error_soon(work)
                                : i % 4 == 1 ? comm_error_of([&] { work->wait(5); })
                                             : comm_error_of([&] {
                                                 OwnStream other(me.device);
                                                 work->order(other.stream);
                                                 other.synchronize();
                                                 if (i % 4 == 2) me.group.barrier(me.issue());
                                                 else me.group.issue(op, me.issue());
                                               });
        require_kind(error, ErrorKind::mismatch);
        require(error.op.kind == (rank.rank == 1 || i == 4 ? op.kind : OpKind::all_reduce) || !resident(me),
                "the operation");
        if (resident(me)) {
          require_contains(error.what(), rank.rank == 1 ? difference.there : difference.text);
          require(error.op.sequence == 2, "its number");
          require(error.peer == (rank.rank == 1 ? 0 : 1) && error.rank == rank.rank, "the ranks");
          rank.barrier();
          me.exercise(true);
          me.finish();
        } else {
          require_contains(error.what(), "The group is broken");
          require(contains(error.what(), difference.text) || contains(error.what(), difference.there),
                  error.what());
          require_kind(comm_error_of([&] { me.group.issue(trial.op(), me.issue()); }), ErrorKind::mismatch);
          finish_broken(me, setting);
        }
      };
      expect(std::string("mismatch of ") + difference.name + ": " + setting.text(),
             run_ranks(run_options(setting), body));
    }
}

// Among threads on one device the group goes on. Elsewhere, on a shared device, ranks that disagree may take
// unequally many turns, so it breaks.
void test_message_mismatches(const Setting& setting) {
  const bool goes_on = setting.threads == setting.ranks;
  const auto body = [&](Rank& rank) {
    Member me(rank);
    if (rank.rank < 2)
      for (bool by_tag : {true, false}) {
        if (!goes_on && !by_tag) break;
        std::vector<float> data(10);
        const size_t count = rank.rank && !by_tag ? 9 : 10;
        const MessageCall call{rank.rank == 0,
                               1 - rank.rank,
                               by_tag ? rank.rank : 0,
                               DType::f32,
                               reinterpret_cast<std::byte*>(data.data()),
                               count};
        const CommError error = comm_error_of([&] { me.group.issue(call, me.issue())->wait(5); });
        require_kind(error, ErrorKind::mismatch);
        if (!goes_on) {
          require_contains(error.what(), "The group is broken");
          break;
        }
        require(
            error.op.kind == (rank.rank == 0 ? OpKind::send : OpKind::recv) && error.peer == 1 - rank.rank,
            "who and what");
        const std::string here = by_tag ? std::to_string(rank.rank) : std::to_string(count);
        const std::string there = by_tag ? std::to_string(1 - rank.rank) : std::to_string(19 - count);
        require_contains(error.what(), (by_tag ? "tag=" : "count=") + here + " here, " + there + " on rank ");
      }
    if (!goes_on) return finish_broken(me, setting);
    rank.barrier();
    me.exercise();
    me.finish();
  };
  expect("messages that differ: " + setting.text(), run_ranks(run_options(setting), body));
}

// An error is that of its operation, not of another line's with the same number; what was thrown is not
// thrown again.
void test_whose_error(bool completed) {
  const auto body = [completed](Rank& rank) {
    Member me(rank);
    Buffer data(10);
    Trial trial(me.group, rank, {.count = 20});
    const auto reduced = me.run(trial);
    if (rank.rank < 2) {
      const MessageCall call{rank.rank == 0, 1 - rank.rank,
                             rank.rank,  // the tag
                             DType::f32,     reinterpret_cast<std::byte*>(data.data()),
                             data.size()};
      Issue issue = me.issue();
      issue.watched = completed;
      const auto sent = me.group.issue(call, issue);
      me.own.synchronize();
      if (completed) wait_until([&] { return sent->done(); }, "the watching thread completes it");
      require(reduced->info().sequence == sent->info().sequence, "the numbers are alike");
      require(reduced->poll() && !reduced->error(), "the collective has ended well");
      require_kind(comm_error_of([&] { sent->wait(9); }), ErrorKind::mismatch);
    }
    me.own.synchronize();
    trial.check();
    me.exercise();  // throws nothing
    me.finish();
  };
  expect(std::string("whose error it is, ") + (completed ? "completed" : "asked for"),
         run_ranks(run_options(together), body));
}

// Of several errors the first is told.
void test_first_error() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    Buffer data(10);
    const MessageCall call{
        rank.rank == 0, 1 - rank.rank, rank.rank, DType::f32, reinterpret_cast<std::byte*>(data.data()), 10};
    Trial trial(me.group, rank, {.count = rank.rank ? size_t{5} : size_t{6}});
    const auto work = me.group.issue(trial.op(), me.issue());
    if (rank.rank < 2) me.group.issue(call, me.issue());
    me.own.synchronize();
    const CommError error = comm_error_of([&] { work->wait(9); });
    require(error.kind == ErrorKind::mismatch && error.op.kind == OpKind::all_reduce, kind_of(error));
    rank.barrier();
    me.exercise();
    me.finish();
  };
  expect("the first error", run_ranks(run_options(together), body));
}

// Of an exchange of unequal sizes two ranks disagree; the third hears who found it.
void test_sizes() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    Buffer in(60), out(60);
    Op op;
    op.kind = OpKind::all_to_all;
    op.dtype = DType::f32;
    op.uneven = true;
    for (size_t p = 0; p < 3; ++p) {
      const size_t wrong = rank.rank == 1 && p == 0;
      op.in_parts.push_back({reinterpret_cast<std::byte*>(&in[20 * p]), 5 + wrong});
      op.out_parts.push_back({reinterpret_cast<std::byte*>(&out[20 * p]), 5});
    }
    const CommError error = comm_error_of([&] { me.group.issue(op, me.issue())->wait(9); });
    require_kind(error, ErrorKind::mismatch);
    if (rank.rank == 0)
      require_contains(error.what(), "rank 1 sends 24 bytes to this rank, which expects 20");
    if (rank.rank == 2) require_contains(error.what(), "rank 0 found that its sizes differ from those of");
    require(error.peer == (rank.rank == 0 ? 1 : 0), "who found it");
    rank.barrier();
    me.exercise();
    me.finish();
  };
  expect("sizes that differ", run_ranks(run_options(together), body));
}

// --- ranks that do not come

// Memory that can no longer be touched when it has been given back.
class Pages {
 public:
  explicit Pages(size_t count)
      : nbytes_(count * sizeof(float)),
        data_(static_cast<float*>(
            ::mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Pages() { ::munmap(data_, nbytes_); }
  Pages(const Pages&) = delete;
  void forbid() { ::mprotect(data_, nbytes_, PROT_NONE); }
  std::byte* data() const { return reinterpret_cast<std::byte*>(data_); }

 private:
  const size_t nbytes_;
  float* const data_;
};

// A kernel that starts when its peers have given up leaves their buffers alone: their callers have the error
// and may have given them back. It starts at once then: its own host does not know yet.
void test_late_start(const Setting& setting) {
  constexpr size_t count = 40000;
  enum { sum, gathering, message, num_calls };
  for (int call = sum; call < num_calls; ++call) {
    const int late = 1;
    std::atomic<bool> open{false};
    std::atomic<int> given_back{0};
    const auto body = [&](Rank& rank) {
      Member me(rank);
      me.exercise();
      Pages in(count), out(rank.world_size * count);
      Op op;
      op.kind = call == sum ? OpKind::all_reduce : OpKind::all_gather;
      op.algorithm = call == sum ? Algorithm::two_shot : Algorithm::direct;
      op.dtype = DType::f32;
      op.count = count;
      op.in = in.data();
      op.out = call == sum ? out.data() : nullptr;
      for (int p = 0; p < rank.world_size && call == gathering; ++p)
        op.out_parts.push_back({out.data() + p * count * sizeof(float), count});
      const MessageCall mail{
          rank.rank != late, rank.rank == late ? 0 : late, 0, DType::f32, in.data(), count};
      rank.barrier();
      if (rank.rank == late)
        fake_enqueue(me.stream, [&open] {
          while (!open.load()) std::this_thread::sleep_for(std::chrono::microseconds(100));
        });
      Issue issue = me.issue(true);
      issue.timeout = rank.rank == late ? 9 : 0.3;
      const auto work = call == message ? me.group.issue(mail, issue) : me.group.issue(op, issue);
      if (rank.rank != late) {
        require_kind(error_soon(work), ErrorKind::timeout);
        in.forbid();
        out.forbid();
        ++given_back;
      }
      while (given_back < setting.ranks - 1) std::this_thread::yield();
      open = true;
      finish_broken(me, setting);
    };
    const char* names[] = {"all_reduce", "all_gather", "recv"};
    expect(std::string("a late start: ") + names[call] + ", " + setting.text(),
           run_ranks(run_options(setting), body));
  }
}

void test_killed() {
  for (const Setting& setting : {apart, in_order, Setting{4, 1, 4}}) {
    const int victim = setting.ranks - 1;
    RunOptions options = run_options(setting);
    options.may_die = victim;
    const auto body = [&](Rank& rank) {
      Member me(rank, setting.devices);
      me.exercise();
      rank.barrier();
      if (rank.rank == victim) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        ::raise(SIGKILL);
      }
      std::list<Trial> trials;
      std::vector<CudaWorkPtr> works;
      const double seconds = seconds_of([&] {
        for (int i = 0; i < 3; ++i)
          works.push_back(
              me.group.issue(trials.emplace_back(me.group, rank, Spec{.count = 100}).op(), me.issue(true)));
        const CommError error = comm_error_of([&] { me.group.barrier(me.issue()); });
        require_kind(error, ErrorKind::peer);
        require(error.peer == victim, "who died");
        require_contains(error.what(), "rank " + std::to_string(victim) + " died");
      });
      require(seconds < 0.1 + 0.5, "in time: " + std::to_string(seconds));
      finish_broken(me, setting);
      for (const auto& work : works) {
        require(work->done() && work->error(), "every work ends with the error");
        require_kind(comm_error_of([&] { work->wait(); }), ErrorKind::peer);
      }
    };
    expect("killed: " + setting.text(), run_ranks(options, body));
  }
}

void test_abort_and_close() {
  for (const Setting& setting : all_settings)
    for (bool aborts : {true, false}) {
      if (!aborts && setting.threads > 1) continue;
      const auto body = [&](Rank& rank) {
        Member me(rank, setting.devices);
        me.exercise();
        rank.barrier();
        if (rank.rank == 0 && !aborts) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          rank.comm.close();
        } else {
          std::thread other([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            if (rank.rank == 0) rank.comm.abort("enough");
          });
          CudaWorkPtr work;
          Trial trial(me.group, rank, {.count = 8});
          if (rank.rank != 0) work = me.group.issue(trial.op(), me.issue(true));
          const double seconds = seconds_of([&] {
            const CommError error = comm_error_of([&] {
              if (rank.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(80));
              me.group.barrier(me.issue());
            });
            require_kind(error, aborts ? ErrorKind::aborted : ErrorKind::peer);
            require_contains(error.what(),
                             aborts ? "rank 0 aborted the group: enough" : "rank 0 closed the group");
          });
          require(seconds < 1.5, "in time: " + std::to_string(seconds));
          other.join();
          finish_broken(me, setting);
          require(!work || (work->done() && work->error()), "the work ends with the error");
        }
        for (int i = 0; i < 3000 && PeerMemory::free_parked(); ++i)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
      };
      expect((aborts ? "abort: " : "closed early: ") + setting.text(), run_ranks(run_options(setting), body));
    }
}

// --- the driver fails
void test_failing_set_up() {
  const std::vector<std::pair<const char*, int>> calls = {{"cuDeviceGetCount", 1},
                                                          {"cuDeviceGet", 1},
                                                          {"cuDeviceGetUuid", 1},
                                                          {"cuDeviceGetName", 1},
                                                          {"cuDeviceGetAttribute", 3},
                                                          {"cuMemAlloc", 1},
                                                          {"cuMemAlloc", 2},
                                                          {"cuMemHostAlloc", 1},
                                                          {"cuMemHostRegister", 1},
                                                          {"cuMemHostGetDevicePointer", 1},
                                                          {"cuMemHostGetDevicePointer", 2},
                                                          {"cuMemsetD8Async", 1},
                                                          {"cuMemsetD8Async", 2},
                                                          {"cuMemcpyAsync", 1},
                                                          {"cuMemcpyAsync", 2},
                                                          {"cuMemcpyAsync", 3},
                                                          {"cuMemcpyAsync", 5},
                                                          {"cuIpcGetMemHandle", 1},
                                                          {"cuIpcOpenMemHandle", 2},
                                                          {"cuStreamCreateWithPriority", 1},
                                                          {"cuStreamCreateWithPriority", 3},
                                                          {"cuStreamCreateWithPriority", 6},
                                                          {"cuStreamSynchronize", 1},
                                                          {"cuStreamSynchronize", 4},
                                                          {"cuStreamSynchronize", 6},
                                                          {"cuStreamSynchronize", 8},
                                                          {"cudaFuncGetAttributes", 1},
                                                          {"cuCtxSetCurrent", 1}};
  for (const Setting& setting : {apart, in_order})
    for (const auto& [function, nth] : calls) {
      const auto body = [&, function = function, nth = nth](Rank& rank) {
        if (rank.rank == 1) fake_fail(function, nth, result::out_of_memory);
        std::string error;
        try {
          CudaGroup& group = CudaGroup::of(rank.comm, 0);
          const auto registered = group.allocate(1000);
          group.release(registered);
        } catch (const std::exception& e) {
          error = e.what();
        }
        for (uint8_t well : all_gather_value<uint8_t>(rank.comm, error.empty()))
          require(well == error.empty(), "all alike: " + error);
        if (!error.empty()) require(contains(error, "rank 1") && contains(error, function), error);
        if (rank.rank == 1) fake_fail(function, 1 << 30, 0);
        Member me(rank);  // again, and well
        me.exercise();
        me.finish();
      };
      expect("set-up without " + std::string(function) + " " + std::to_string(nth) + ": " + setting.text(),
             run_ranks(run_options(setting), body));
    }
}

void test_failing_issue() {
  struct Failure {
    const char* function;
    int nth;
    bool async_op, in_order_only;
  };
  const std::vector<Failure> failures = {{"cuEventRecord", 1, false, false},
                                         {"cuEventRecord", 1, true, false},
                                         {"cuEventRecord", 2, true, false},
                                         {"cuEventCreate", 1, true, false},
                                         {"cuStreamWaitEvent", 1, true, false},
                                         {"cuStreamGetCaptureInfo", 1, false, false},
                                         {"cudaLaunchKernel", 1, false, false},
                                         {"cudaLaunchKernel", 1, true, false},
                                         {"cuStreamCreateWithPriority", 1, true, false},
                                         {"cuStreamBatchMemOp", 1, false, true},
                                         {"cuStreamBatchMemOp", 2, true, true},
                                         {"cudaLaunchKernel", 2, true, true}};
  for (const Setting& setting : {together, in_order})
    for (const Failure& failure : failures) {
      if (failure.in_order_only && setting.threads > 1) continue;
      const auto body = [&](Rank& rank) {
        Member me(rank);
        rank.barrier();
        Trial trial(me.group, rank, {.count = 8});
        std::string text;
        if (rank.rank == 1) {
          fake_fail(failure.function, failure.nth, result::out_of_memory);
          text = error_of([&] { me.group.issue(trial.op(), me.issue(failure.async_op)); });
          require_contains(text, failure.function);
        } else {
          while (!rank.comm.transport().broken()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        const CommError error = comm_error_of([&] { me.group.issue(trial.op(), me.issue()); });
        require_kind(error, ErrorKind::aborted);
        require_contains(error.what(), "rank 1 aborted the group: all_reduce could not be enqueued: ");
        finish_broken(me, setting);
      };
      expect("issue without " + std::string(failure.function) + " " + std::to_string(failure.nth) + ": " +
                 setting.text(),
             run_ranks(run_options(setting), body));
    }
}

// The device of rank 1 fails while an operation is under way.
void test_failing_device() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    me.exercise();
    rank.barrier();
    Trial trial(me.group, rank, {.count = 8});
    if (rank.rank == 1) fake_fail("cuEventQuery", 1, result::launch_timeout);
    const CommError error = comm_error_of([&] {
      me.group.issue(trial.op(), me.issue(true));
      for (int i = 0; i < 2000; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(1)))
        rank.comm.transport().check({});
    });
    require_kind(error, ErrorKind::aborted);
    require_contains(error.what(),
                     "the device of rank 1 has failed: cuEventQuery failed: CUDA_ERROR_LAUNCH_TIMEOUT");
    finish_broken(me, apart);
  };
  expect("a device that fails", run_ranks(run_options(apart), body));
}

}  // namespace

int main(int count, char** arguments) {
  const auto messages = [] {
    for (const Setting& setting : {together, apart}) test_message_mismatches(setting);
  };
  const auto late_start = [] {
    for (const Setting& setting : {together, in_order_together}) test_late_start(setting);
  };
  return run_suites(count, arguments,
                    {{"mismatches", test_mismatches},
                     {"messages that differ", messages},
                     {"whose error",
                      [] {
                        for (bool completed : {false, true}) test_whose_error(completed);
                      }},
                     {"first error", test_first_error},
                     {"sizes", test_sizes},
                     {"late start", late_start},
                     {"killed", test_killed},
                     {"abort and close", test_abort_and_close},
                     {"failing set-up", test_failing_set_up},
                     {"failing issue", test_failing_issue},
                     {"failing device", test_failing_device}});
}
