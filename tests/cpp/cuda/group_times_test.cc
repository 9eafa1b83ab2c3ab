// group_times_test.cc -- when operations ran on the device, in a trace (csrc/cuda/device_times.h), over the
// fake driver, whose events keep the host's time.
//
// A trace has a device's times up to a constant. So does a stamp that a test puts into the stream around an
// operation; times are right if there is one constant with which each operation lies between its stamps.
#include "../../../csrc/trace/record.h"
#include "group_ranks.h"

using namespace pycomm;
using namespace pycomm::cuda;

namespace {

const Setting alone{1, 1}, together{2, 2}, apart{2, 1, 1, true}, in_order{2, 1};
constexpr int64_t rounding = 1000;  // nanoseconds: the driver tells times as floats of milliseconds

// One rank's part of a trace, into a folder that each process has for itself.
class Recording {
 public:
  Recording() : folder_("/tmp/pycomm-times-" + std::to_string(::getpid())) {
    std::filesystem::create_directory(folder_);
    trace::Recorder::instance().begin(folder_, 1 << 20);
  }
  ~Recording() {
    end();
    std::error_code ignored;  // the other rank of the process may be at it
    std::filesystem::remove_all(folder_, ignored);
  }
  Recording(const Recording&) = delete;
  void end() {
    if (std::exchange(ended_, true)) return;
    trace::Recorder::instance().end();
  }

  struct Found {
    OpKind kind;
    uint64_t sequence, issued, seen, begin, in_stream, end, clock;
    bool timed() const { return begin != 0; }
  };
  // The operations on devices, by issue; of all ranks of the process.
  std::vector<Found> operations() const {
    std::vector<Found> found;
    for (const auto& file : std::filesystem::directory_iterator(folder_)) {
      std::ifstream in(file.path(), std::ios::binary);
      trace::FileHeader header;
      in.read(reinterpret_cast<char*>(&header), sizeof(header));
      in.seekg(trace::header_bytes + trace::text_capacity);
      for (uint64_t n = 0; n < std::min(header.tickets.load(), header.capacity); ++n) {
        uint64_t w[trace::record_words];
        in.read(reinterpret_cast<char*>(w), sizeof(w));
        if (static_cast<trace::Type>(w[7] >> 56 & 15) == trace::Type::device)
          found.push_back({static_cast<OpKind>(w[7] >> 48 & 15), w[7] & 0xffffffff, w[1], w[2], w[3], w[4],
                           w[5], w[6] >> 48});
      }
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.issued < b.issued; });
    return found;
  }

 private:
  const std::string folder_;
  bool ended_ = false;
};

// When a stream comes to a place.
class Stamps {
 public:
  void put(Stream stream) {
    auto at = std::make_shared<std::atomic<uint64_t>>(0);
    all_.push_back(at);
    fake_enqueue(stream, [at] { *at = trace::now_ns(); });
  }
  // Operation i ran between the stamps 2i and 2i + 1.
  void check(const std::vector<Recording::Found>& found) const {
    require(2 * found.size() == all_.size(), "an operation between each pair of stamps");
    int64_t least = INT64_MIN, most = INT64_MAX;
    for (size_t i = 0; i < found.size(); ++i) {
      const auto& each = found[i];
      require(each.timed(), "operation " + std::to_string(i) + " has times");
      require(each.begin <= each.end && each.issued <= each.in_stream, "begin before end");
      require(each.clock == found[0].clock, "one clock");
      least = std::max(least, static_cast<int64_t>(*all_[2 * i] - each.begin));
      most = std::min(most, static_cast<int64_t>(*all_[2 * i + 1] - each.end));
      require(each.seen + rounding >= *all_[2 * i], "nobody sees the end before the operation has begun");
    }
    require(least <= most + rounding,
            "operations lie between their stamps, not by " + std::to_string(least - most) + " ns");
  }

 private:
  std::vector<std::shared_ptr<std::atomic<uint64_t>>> all_;
};

// Operations behind a stream that is held up begin when it goes on, not when they were issued; those of two
// streams, synchronous and asynchronous ones, end in another order than they were issued in.
void test_held_up(const Setting& setting) {
  const auto body = [&](Rank& rank) {
    Member me(rank);
    me.exercise(true);
    OwnStream other(me.device);
    Recording recording;
    Stamps stamps;
    std::list<Trial> trials;
    const auto run = [&](Stream stream, bool async_op) {
      Trial& trial = trials.emplace_back(me.group, rank, Spec{.count = 100});
      trial.fill(stream);
      stamps.put(stream);
      const auto work = me.group.issue(trial.op(), me.issue(async_op, stream));
      if (async_op) work->wait();
      stamps.put(stream);
      trial.look(stream);
    };
    rank.barrier();  // both record
    run(me.stream, false);
    me.own.synchronize();
    {
      Gate gate(me.stream);
      run(me.stream, false);
      run(me.stream, true);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    run(other.stream, true);
    run(me.stream, false);
    me.own.synchronize();
    other.synchronize();
    rank.barrier();
    recording.end();  // asks for what has ended
    rank.barrier();
    const auto found = recording.operations();
    require(found.size() == 5u * setting.threads, "the operations of the process");
    for (const auto& each : found) require(each.timed() && each.begin <= each.end, "each has times");
    if (setting.threads == 1) {
      stamps.check(found);
      require(found[1].begin + rounding > found[0].end + 20'000'000, "the second waits for the gate");
      for (size_t i = 1; i < found.size(); ++i)
        require(found[i - 1].end <= found[i].begin + rounding, "the operations of a line are in order");
    }
    for (const Trial& trial : trials) trial.check();
    me.finish();
  };
  expect("held up: " + setting.text(), run_ranks(run_options(setting), body));
}

// Two launches, of which the first ends last, so that its begin lies before the base of the clock; with a
// driver that does not tell negative times, too.
void test_backwards() {
  for (const bool negative_times : {true, false}) {
    const auto body = [&](Rank& rank) {
      fake_settings().negative_times = negative_times;
      Member me(rank);
      OwnStream other(me.device);
      Recording recording;
      Stamps stamps;
      std::atomic<bool> begun{false};
      stamps.put(other.stream);
      me.group.launch_begins(other.stream, 1);
      fake_enqueue(other.stream, [&] { begun = true; });
      Gate gate(other.stream);
      me.group.launch_ends(other.stream);
      stamps.put(other.stream);
      wait_until([&] { return begun.load(); }, "the first launch begins");
      stamps.put(me.stream);
      me.group.launch_begins(me.stream, 2);
      me.group.launch_ends(me.stream);
      stamps.put(me.stream);
      wait_until([] { return fake_calls("cuEventElapsedTime") > 0; }, "the watching thread takes the second");
      gate.open();
      other.synchronize();
      me.own.synchronize();
      recording.end();
      const auto found = recording.operations();
      stamps.check(found);
      require(found[0].kind == OpKind::none && found[0].sequence == 1 && found[1].sequence == 2, "launches");
      require(found[0].begin < found[1].begin && found[1].end < found[0].end,
              "the second is inside the first");
      me.finish();
    };
    expect(negative_times ? "backwards" : "backwards, no negative times",
           run_ranks(run_options(alone), body));
  }
}

// What is captured has no times: it runs at each replay. What is not has, beside it.
void test_capture() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    OwnStream graph(me.device);
    me.exercise();
    Recording recording;
    Trial eager(me.group, rank, {.count = 3}), captured(me.group, rank, {.count = 3});
    fake_capture(graph.stream, flag::capture_active, 7);
    me.group.issue(captured.op(), me.issue(false, graph.stream));
    me.group.launch_begins(graph.stream, 1);
    me.group.launch_ends(graph.stream);
    me.run(eager);
    wait_until([] { return fake_calls("cuEventElapsedTime") > 0; }, "the watching thread takes the other");
    fake_capture(graph.stream, flag::capture_none, 0);
    me.own.synchronize();
    graph.synchronize();
    recording.end();
    const auto found = recording.operations();
    require(found.size() == 3 && !found[0].timed() && !found[1].timed() && found[2].timed(), "who has times");
    me.finish();
  };
  expect("capture", run_ranks(run_options(alone), body));
}

// Operations that are under way when the trace ends or the group is closed; a trace anew in between.
void test_ends(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    Trial first(me.group, rank, {.count = 30}), second(me.group, rank, {.count = 30}),
        third(me.group, rank, {.count = 30});
    {
      Recording recording;
      rank.barrier();
      {
        Gate gate(me.stream);
        me.run(first);
        recording.end();
        rank.barrier();
        for (const auto& each : recording.operations()) require(!each.timed(), "nothing has ended in time");
        rank.barrier();
      }
    }
    rank.barrier();
    Recording recording;
    rank.barrier();
    me.run(second, true);
    me.own.synchronize();
    Gate gate(me.stream);
    me.run(third);
    std::thread opens([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      gate.open();
    });
    me.group.close();
    opens.join();
    me.own.synchronize();
    rank.barrier();
    recording.end();
    rank.barrier();
    const auto found = recording.operations();
    for (const auto& each : found)
      require(each.timed() && each.begin <= each.end, "a group that is closed waits for its operations");
    rank.barrier();  // who leaves first removes the trace
    PeerMemory::free_parked();
  };
  expect("ends: " + setting.text(), run_ranks(run_options(setting), body));
}

// Times are lost, operations are not: a driver that makes no events with times, one that does not record
// them, one that does not tell what they hold.
std::mutex mutex;
std::set<Event> timed;  // events with times
int create_none(Event* event, unsigned int flags) {
  return flags & flag::event_disable_timing ? fake_driver()->cuEventCreate(event, flags)
                                            : result::out_of_memory;
}
int create_known(Event* event, unsigned int flags) {
  const int result = fake_driver()->cuEventCreate(event, flags);
  const std::lock_guard lock(mutex);
  if (!(flags & flag::event_disable_timing)) timed.insert(*event);
  return result;
}
int destroy_known(Event event) {
  const std::lock_guard lock(mutex);
  timed.erase(event);
  return fake_driver()->cuEventDestroy(event);
}
size_t num_timed() {
  const std::lock_guard lock(mutex);
  return timed.size();
}
int record_none(Event event, Stream stream) {
  const std::lock_guard lock(mutex);
  return timed.count(event) ? result::unknown : fake_driver()->cuEventRecord(event, stream);
}
int tell_nothing(float*, Event, Event) { return result::unknown; }

void test_refusals() {
  for (int what = 0; what < 3; ++what) {
    const auto body = [what](Rank& rank) {
      static Driver table = *fake_driver();
      if (what == 0) table.cuEventCreate = create_none;
      if (what == 1) table.cuEventCreate = create_known, table.cuEventRecord = record_none;
      if (what == 2) table.cuEventElapsedTime = tell_nothing;
      use_driver(&table);
      Member me(rank);
      Recording recording;
      for (int i = 0; i < 20; ++i) me.exercise(i % 2);
      recording.end();
      const auto found = recording.operations();
      require(found.size() == 20, "all are in the trace");
      for (const auto& each : found) require(!each.timed() && each.in_stream, "their host's side is");
      if (what == 1) require(num_timed() <= 2, "what was not recorded is used again");
      me.finish();
    };
    expect("a driver that refuses " + std::to_string(what), run_ranks(run_options(apart), body));
  }
}

// Beyond a number of operations under way there are no more times, until some have ended.
void test_many() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    Recording recording;
    Trial trial(me.group, rank, {.count = 1});
    constexpr size_t most = 4096, more = 50;
    {
      Gate gate(me.stream);
      for (size_t i = 0; i < most + more; ++i) me.group.issue(trial.op(), me.issue());
      require(fake_counts().events <= static_cast<int>(2 * most + 100), "events are bounded");
    }
    me.own.synchronize();
    wait_until([] { return fake_calls("cuEventElapsedTime") >= static_cast<int>(2 * most - 1); }, "a look");
    me.exercise();
    recording.end();
    const auto found = recording.operations();
    require(found.size() == most + more + 1 && found.back().timed(), "then there are again");
    require(
        std::count_if(found.begin(), found.end(), [](const auto& each) { return each.timed(); }) == most + 1,
        "so many have times");
    me.finish();
  };
  expect("many", run_ranks(run_options(alone), body));
}

// Traces that begin and end on a thread of their own while operations are issued from two others.
void test_beside(const Setting& setting) {
  const auto body = [&](Rank& rank) {
    Member me(rank);
    std::atomic<bool> enough{false};
    std::thread traces([&] {
      while (!enough && rank.rank % setting.threads == 0) {  // one of the process
        Recording recording;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
    for (int i = 0; i < 60; ++i) me.exercise(i % 3);
    enough = true;
    traces.join();
    rank.barrier();
    require(!trace::Recorder::instance().active(), "no trace is left");
    me.finish();
  };
  expect("beside: " + setting.text(), run_ranks(run_options(setting), body));
}

// Without a trace there are no such events, and when it is over they go.
void test_off() {
  const auto body = [](Rank& rank) {
    static Driver table = *fake_driver();
    table.cuEventCreate = create_known;
    table.cuEventDestroy = destroy_known;
    use_driver(&table);
    Member me(rank);
    me.exercise(true);
    me.group.launch_begins(me.stream, 1);
    me.group.launch_ends(me.stream);
    require(num_timed() == 0, "none");
    {
      Recording recording;
      me.exercise(true);
      require(num_timed() == 2, "two of an operation");
    }
    wait_until([&] { return num_timed() == 0; }, "they are given back");
    me.exercise(true);
    require(num_timed() == 0, "none");
    me.finish();
  };
  expect("off", run_ranks(run_options(alone), body));
}

}  // namespace

int main(int count, char** arguments) {
  const auto each = [](void (*test)(const Setting&)) {
    return [test] {
      for (const Setting& setting : {together, apart, in_order}) test(setting);
    };
  };
  return run_suites(count, arguments,
                    {{"held up", each(test_held_up)},
                     {"backwards", test_backwards},
                     {"capture", test_capture},
                     {"ends", each(test_ends)},
                     {"refusals", test_refusals},
                     {"many", test_many},
                     {"beside", each(test_beside)},
                     {"off", test_off}});
}
