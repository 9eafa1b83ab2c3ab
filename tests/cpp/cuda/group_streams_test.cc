// group_streams_test.cc -- csrc/cuda/group.h over the fake driver: order of streams, captures, lifetimes.
#include "group_ranks.h"

using namespace pycomm;
using namespace pycomm::cuda;

namespace {

const Setting together{2, 2}, apart{2, 1, 1, true}, in_order{2, 1};

// The host runs ahead of a stream that is held up; nothing is let go before it has ended.
void test_host_is_free(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    me.exercise();
    std::atomic<int> kept{2};
    Trial sync(me.group, rank, {.count = 10}), async(me.group, rank, {OpKind::all_gather, 10}),
        third(me.group, rank, {.count = 7});
    rank.barrier();
    {
      Gate gate(me.stream);
      Issue with_keep = me.issue(true);
      with_keep.keep = [guard = std::shared_ptr<void>(nullptr, [&kept](void*) { --kept; })] {};
      CudaWorkPtr work;
      const double seconds = seconds_of([&] {
        me.run(sync);
        async.fill(me.stream);
        work = me.group.issue(async.op(), with_keep);
        work->wait();
        async.look(me.stream);
        me.run(third);
      });
      require(seconds < 0.5, "nothing blocks the host: " + std::to_string(seconds));
      with_keep.keep = nullptr;
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      require(kept == 2 && !work->done() && !work->poll(), "the buffers are kept while the operation runs");
      gate.open();
      wait_until([&] { return work->done(); }, "the watching thread completes the work");
      require(kept == 1 && !work->error(), "the buffers are let go, the work is not");
    }
    me.own.synchronize();
    for (const Trial* trial : {&sync, &async, &third}) trial->check();
    me.finish();
  };
  expect("the host is free: " + setting.text(), run_ranks(run_options(setting), body));
}

// One group from two streams in turn, with the ranks' streams held up at different times.
void test_two_streams(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    OwnStream other(me.device);
    std::vector<std::unique_ptr<Trial>> trials;
    for (int i = 0; i < 30; ++i)
      trials.push_back(std::make_unique<Trial>(me.group, rank, Spec{.count = 50}, false, i));
    std::vector<std::unique_ptr<Gate>> gates;
    for (int i = 0; i < 30; ++i) {
      const Stream on = i % 2 ? other.stream : me.stream;
      if (i % 7 == rank.rank) gates.push_back(std::make_unique<Gate>(on));
      trials[i]->fill(on);
      const bool async_op = i % 3 == 0;
      const auto work = me.group.issue(trials[i]->op(), me.issue(async_op, on));
      if (async_op) work->wait();
      trials[i]->look(on);
    }
    for (auto& gate : gates) {
      gate->open();
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
    me.own.synchronize();
    other.synchronize();
    for (const auto& trial : trials) trial->check();
    me.finish();
  };
  expect("two streams: " + setting.text(), run_ranks(run_options(setting), body));
}

// wait() in one stream, the result used in another that the work is ordered into.
void test_order() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    OwnStream other(me.device);
    Trial trial(me.group, rank, {.count = 2000});
    Gate gate(me.stream);
    trial.fill(me.stream);
    const auto work = me.group.issue(trial.op(), me.issue(true));
    work->order(other.stream);
    trial.look(other.stream);
    gate.open();
    other.synchronize();
    trial.check();
    work->wait(5);  // blocks the host
    require(work->done() && work->poll(), "it has ended");
    me.finish();
  };
  expect("order()", run_ranks(run_options(together), body));
}

// What a caller puts behind an operation, in its stream, belongs to it: its end comes after that.
void test_after() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    OwnStream other(me.device);
    Trial trial(me.group, rank, {.count = 20});
    std::unique_ptr<Gate> gate;
    std::atomic<bool> opened{false};
    bool seen = false;
    Issue issue = me.issue(true);
    issue.after = [&gate](Stream stream) { gate = std::make_unique<Gate>(stream); };
    trial.fill(me.stream);
    const auto work = me.group.issue(trial.op(), issue);
    work->order(other.stream);
    fake_enqueue(other.stream, [&] { seen = opened; });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    require(!work->poll(), "what comes behind the operation has not ended");
    opened = true;
    gate->open();
    other.synchronize();
    require(seen, "order() waits for what comes behind the operation");
    me.finish();
  };
  expect("after an operation", run_ranks(run_options(together), body));
}

// Each rank's default stream has the same handle, the null one. On one device that is one stream, on two it
// is not; a rank that has used no stream yet uses none.
void test_default_streams() {
  const auto issue_on_default = [](Member& me, Trial& trial) {
    return me.group.issue(trial.op(),
                          {.stream = nullptr, .async_op = true, .current = [] { return nullptr; }});
  };
  const auto one_device = [&](Rank& rank) {
    Member me(rank);
    Trial trial(me.group, rank, {.count = 3});
    CudaWorkPtr work;
    if (rank.rank == 0) work = issue_on_default(me, trial);
    rank.barrier();
    if (rank.rank == 1) {
      require_contains(error_of([&] { issue_on_default(me, trial); }), "use the same CUDA stream");
      work = me.group.issue(trial.op(), me.issue(true));
    }
    work->wait(9);
    me.finish();
  };
  expect("the default stream of one device", run_ranks(run_options(together), one_device));
  const Setting two_devices{2, 2, 2};
  const auto body = [&](Rank& rank) {
    Member me(rank, 2);
    Trial trial(me.group, rank, {.count = 3});
    issue_on_default(me, trial)->wait(9);
    me.finish();
  };
  expect("default streams of two devices", run_ranks(run_options(two_devices), body));
}

// What the group asks the driver for: streams that do not wait for the default stream and go first, and
// events that measure nothing.
struct Asked {
  std::mutex mutex;
  std::vector<std::pair<unsigned int, int>> streams;  // flags, priority
  std::vector<unsigned int> events;
} asked;

int create_stream(Stream* stream, unsigned int flags, int priority) {
  const std::lock_guard lock(asked.mutex);
  asked.streams.emplace_back(flags, priority);
  return fake_driver()->cuStreamCreateWithPriority(stream, flags, priority);
}
int create_event(Event* event, unsigned int flags) {
  const std::lock_guard lock(asked.mutex);
  asked.events.push_back(flags);
  return fake_driver()->cuEventCreate(event, flags);
}
const Driver* asking_driver() {
  static const Driver table = [] {
    Driver copy = *fake_driver();
    copy.cuStreamCreateWithPriority = create_stream;
    copy.cuEventCreate = create_event;
    return copy;
  }();
  return &table;
}

void test_what_is_asked_for() {
  const auto body = [](Rank& rank) {
    use_driver(asking_driver());
    Member me(rank);
    me.exercise();
    {
      const std::lock_guard lock(asked.mutex);
      asked.streams.clear();  // those of the set-up copy
    }
    me.exercise(true);
    {
      const std::lock_guard lock(asked.mutex);
      require(asked.streams.size() == 1 && asked.streams[0].first == flag::stream_non_blocking,
              "one stream more, which does not wait for the default stream");
      require(asked.streams[0].second < 0, "it goes before the caller's");
      for (const unsigned int flags : asked.events)
        require(flags == flag::event_disable_timing, "events that measure nothing");
    }
    me.finish();
  };
  expect("what is asked for", run_ranks(run_options(apart), body));
}

void test_recycling(const Setting& setting, int operations) {
  const auto body = [operations](Rank& rank) {
    Member me(rank);
    OwnStream other(me.device);
    std::vector<float> data(64, 1.0f);
    Op op;
    op.kind = OpKind::all_reduce;
    op.dtype = DType::f32;
    op.reduce_op = ReduceOp::max;
    op.count = data.size();
    op.in = op.out = reinterpret_cast<std::byte*>(data.data());
    rank.barrier();
    const FakeCounts before = fake_counts();
    int most = 0;
    for (int i = 0; i < operations; ++i) {
      const auto work = me.group.issue(op, me.issue(i % 2, i % 3 ? me.stream : other.stream));
      if (i % 2) work->wait();
      if (i % 20 == 0) me.own.synchronize(), other.synchronize();
      most = std::max(most, fake_counts().events);
    }
    me.own.synchronize();
    other.synchronize();
    require(most < 2 * 150, "events are used again, there were " + std::to_string(most));
    require(fake_counts().streams - before.streams <= 2,
            "a group has one stream for asynchronous collectives");
    require(data[0] == 1.0f, "the result");
    me.finish();
  };
  expect("recycling: " + setting.text(), run_ranks(run_options(setting), body));
}

// --- capture

// The fake driver with the rules of capture: which events were recorded in which, and that these must not be
// asked for or waited for elsewhere. A stream that waits for an event of a capture joins it.
struct Capturing {
  std::mutex mutex;
  std::map<Event, uint64_t> events;  // last record: id of the capture, 0 for none
  std::vector<std::string> broken;
} capturing;

uint64_t capture_id(Stream stream) {
  const Capture capture = capture_of(stream);
  return capture.active ? capture.id : 0;
}

int record_event(Event event, Stream stream) {
  const uint64_t id = capture_id(stream);
  std::lock_guard lock(capturing.mutex);
  capturing.events[event] = id;
  return fake_driver()->cuEventRecord(event, stream);
}
int query_event(Event event) {
  std::lock_guard lock(capturing.mutex);
  if (capturing.events[event]) capturing.broken.push_back("a query of a captured event");
  return fake_driver()->cuEventQuery(event);
}
int wait_event(Stream stream, Event event, unsigned int flags) {
  const uint64_t id = capture_id(stream);
  std::lock_guard lock(capturing.mutex);
  const uint64_t origin = capturing.events[event];
  if (id && id != origin) capturing.broken.push_back("a captured stream waits for an event from elsewhere");
  if (!id && origin) fake_capture(stream, flag::capture_active, origin);
  return fake_driver()->cuStreamWaitEvent(stream, event, flags);
}
const Driver* capturing_driver() {
  static const Driver table = [] {
    Driver copy = *fake_driver();
    copy.cuEventRecord = record_event;
    copy.cuEventQuery = query_event;
    copy.cuStreamWaitEvent = wait_event;
    return copy;
  }();
  return &table;
}

void test_capture(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    OwnStream graphs[2] = {OwnStream(me.device), OwnStream(me.device)};
    me.exercise(true);
    std::list<Trial> trials;
    auto run_on = [&](Stream stream, bool async_op) {
      Trial& trial = trials.emplace_back(me.group, rank, Spec{.count = 20});
      trial.fill(stream);
      const auto work = me.group.issue(trial.op(), me.issue(async_op, stream));
      if (async_op) work->wait();
      trial.look(stream);
      return work;
    };
    Stream joined = nullptr;
    for (uint64_t id : {0, 1}) {
      OwnStream& graph = graphs[id];
      run_on(me.stream, true);  // eager work that has not ended, before and after
      Trial outside(me.group, rank, {.count = 4});
      outside.fill(me.stream);
      const auto eager = me.group.issue(outside.op(), me.issue(true));
      me.own.synchronize();
      wait_until([&] { return eager->poll(); }, "the eager operation ends");
      fake_capture(graph.stream, flag::capture_active, 7 + 2 * id + rank.rank);
      run_on(graph.stream, false);  // where the last captured operation was in another capture and stream
      const auto captured = run_on(graph.stream, true);
      joined = captured->stream();
      run_on(graph.stream, false);
      Trial inside(me.group, rank, {.count = 4});
      inside.fill(graph.stream);
      const auto late = me.group.issue(inside.op(), me.issue(true, graph.stream));
      require(!late->poll(), "a captured operation has not run");
      require_contains(error_of([&] { late->order(me.stream); }),
                       "in the graph capture in which it was issued");
      require_contains(error_of([&] { eager->order(graph.stream); }),
                       "in the graph capture in which it was issued");
      late->wait();
      inside.look(graph.stream);
      graph.synchronize();
      fake_capture(graph.stream, flag::capture_none, 0);
      fake_capture(joined, flag::capture_none, 0);
      run_on(me.stream, false);
      run_on(graph.stream, true);
      me.own.synchronize();
      graph.synchronize();
      inside.check();
    }
    for (const Trial& trial : trials) trial.check();
    std::this_thread::sleep_for(
        std::chrono::milliseconds(20));  // the watching thread looks at what it looks at
    me.finish();
    std::lock_guard lock(capturing.mutex);
    require(capturing.broken.empty(), capturing.broken.empty() ? "" : capturing.broken[0]);
  };
  expect("capture: " + setting.text(), run_ranks(run_options(setting), [&](Rank& rank) {
           if (rank.rank % setting.threads == 0) use_driver(capturing_driver());
           rank.barrier();
           body(rank);
         }));
}

// A wait of this rank ends no capture of another thread.
void test_waits_beside_a_capture(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    OwnStream graph(me.device);
    Registered registered = me.group.allocate(1000);
    Trial trial(me.group, rank, {.count = 20});
    rank.barrier();
    fake_capture(graph.stream, flag::capture_active, 1 + rank.rank);
    rank.barrier();
    trial.fill(me.stream);
    Gate gate(me.stream);
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      gate.open();
    });
    me.group.issue(trial.op(), me.issue(true))->wait(9);
    opener.join();
    me.group.release(registered);
    rank.barrier();
    fake_capture(graph.stream, flag::capture_none, 0);
    registered.memory.reset();
    me.finish();
  };
  expect("waits beside a capture: " + setting.text(), run_ranks(run_options(setting), body));
}

// What was issued before a capture still counts when the group ends.
void test_capture_does_not_hide_work() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    OwnStream graph(me.device);
    Trial trial(me.group, rank, {.count = 20}), captured(me.group, rank, {.count = 20});
    std::atomic<bool> released{false};
    Gate gate(me.stream);
    me.run(trial);
    fake_capture(graph.stream, flag::capture_active, 1 + rank.rank);
    captured.fill(graph.stream);
    me.group.issue(captured.op(), me.issue(false, graph.stream));
    captured.look(graph.stream);
    graph.synchronize();
    fake_capture(graph.stream, flag::capture_none, 0);
    rank.barrier();
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      released = true;
      gate.open();
    });
    me.group.release({});
    require(released, "release() waits for eager work");
    opener.join();
    me.own.synchronize();
    trial.check();
    captured.check();
    me.finish();
  };
  expect("release() waits", run_ranks(run_options(together), body));
}

// --- the end

void test_barrier(const Setting& setting) {
  const auto body = [&](Rank& rank) {
    Member me(rank);
    rank.barrier();
    const double seconds = seconds_of([&] {
      if (rank.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(60));
      me.group.barrier(me.issue());
    });
    require(seconds > 0.05, "the barrier waits for all: " + std::to_string(seconds));
    me.finish();
  };
  expect("barrier: " + setting.text(), run_ranks(run_options(setting), body));
}

// While a rank has not come, no kernel of its peers waits for it: it may be at something that waits for the
// kernels that run.
void test_barrier_leaves_the_device_alone(const Setting& setting) {
  const auto body = [&](Rank& rank) {
    Member me(rank);
    me.exercise();
    rank.barrier();
    int found = result::success;
    const auto began = std::chrono::steady_clock::now();
    std::thread looks([&] {
      if (rank.rank != 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(40));
        ContextGuard guard(me.group.device());
        found = fake_driver()->cuStreamQuery(me.own.stream);
        // On a machine that stood still the host's patience may be over: then this says nothing.
        if (std::chrono::steady_clock::now() - began > std::chrono::seconds(1)) found = result::success;
      }
      rank.barrier();  // of the CPU side
    });
    if (rank.rank == 1) looks.join();
    me.group.barrier(me.issue());
    if (looks.joinable()) looks.join();
    require(found == result::success, "the device is idle while a rank is awaited");
    me.finish();
  };
  expect("barrier, device idle: " + setting.text(), run_ranks(run_options(setting), body));
}

// The child of a fork uses nothing of the parent's group, and does not hang.
void test_fork() {
  const auto body = [](Rank& rank) {
    auto me = std::make_unique<Member>(rank);
    me->exercise(true);
    Trial trial(me->group, rank, {.count = 9});
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(5);
      const std::string refusal = "created before a fork";
      bool well = contains(error_of([&] { me->group.issue(trial.op(), me->issue()); }), refusal);
      well = well && contains(error_of([&] { CudaGroup::of(rank.comm, 0); }), refusal);
      me->group.close();
      rank.comm.close();
      ::_exit(well && fake_counts().total() == 0 && fake_calls("cuEventDestroy") == 0 ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    require(status == 0, "the child ends well");
    me->exercise();
    me->finish();
  };
  expect("fork", run_ranks(run_options(apart), body));
}

}  // namespace

int main(int count, char** arguments) {
  const auto each = [](void (*test)(const Setting&)) {
    return [test] {
      for (const Setting& setting : {together, apart, in_order}) test(setting);
    };
  };
  const auto recycling = [] {
    test_recycling(together, 1000);
    test_recycling(in_order, 200);
  };
  return run_suites(count, arguments,
                    {{"host is free", each(test_host_is_free)},
                     {"two streams", each(test_two_streams)},
                     {"capture", each(test_capture)},
                     {"barrier", each(test_barrier)},
                     {"device idle in a barrier", each(test_barrier_leaves_the_device_alone)},
                     {"order", test_order},
                     {"after", test_after},
                     {"default streams", test_default_streams},
                     {"what is asked for", test_what_is_asked_for},
                     {"recycling", recycling},
                     {"waits beside a capture", each(test_waits_beside_a_capture)},
                     {"capture hides nothing", test_capture_does_not_hide_work},
                     {"fork", test_fork}});
}
