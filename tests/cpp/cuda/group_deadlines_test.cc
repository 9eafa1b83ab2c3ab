// group_deadlines_test.cc -- csrc/cuda/deadlines.h and watch.h over the fake driver: when an operation is
// late, who is to blame, and when the host learns what is wrong.
//
// Where it matters what the watching thread sees, that is arranged and not left to the clock: it looks with
// the group's lock held, which a call that issues holds, too.
#include "group_ranks.h"

using namespace pycomm;
using namespace pycomm::cuda;

namespace {

const Setting in_order{2, 1}, three_in_order{3, 1};
const std::vector<Setting> all_settings = {
    {3, 3}, {3, 1, 1, true}, three_in_order, {3, 3, 1, false, "stream_ordered"}, {4, 2, 4}};

void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

void test_late_rank() {
  for (const Setting& setting : all_settings)
    for (bool message : {false, true}) {
      const int absent = 1;
      const auto body = [&](Rank& rank) {
        Member me(rank, setting.devices);
        me.exercise();
        rank.barrier();
        Issue issue = me.issue(true);
        issue.timeout = 1.0;
        float value = 0;
        const MessageCall recv{false, absent, 0, DType::f32, reinterpret_cast<std::byte*>(&value), 1};
        Trial trial(me.group, rank, {.count = 8});
        if (rank.rank == absent) {
          const CommError error = comm_error_of([&] {
            for (int i = 0; i < 5000; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(1)))
              rank.comm.transport().check({});
          });
          require_kind(error, ErrorKind::timeout);
          require_kind(comm_error_of([&] { me.group.issue(trial.op(), me.issue()); }), ErrorKind::timeout);
          return finish_broken(me, setting);
        }
        CudaWorkPtr work;
        const double seconds = seconds_of([&] {
          work = message ? me.group.issue(recv, issue) : me.group.issue(trial.op(), issue);
          const CommError error = error_soon(work);
          require_kind(error, ErrorKind::timeout);
          require_contains(error.what(), "rank 1 did not arrive within the timeout");
          require(error.peer == absent, "the peer");
          require_contains(error.what(), message ? "recv #1" : "all_reduce #2");
        });
        require(seconds < 1.5, "in time: " + std::to_string(seconds));
        finish_broken(me, setting);
      };
      expect("a late rank: " + setting.text() + (message ? ", a message" : ""),
             run_ranks(run_options(setting), body));
    }
}

// A deadline is that of one operation: a stream that is never idle for longer is not late.
void test_busy_for_long() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    Issue issue = me.issue();
    issue.timeout = 0.3;
    Buffer data(64, 1.0f);
    Op op;
    op.kind = OpKind::all_gather;
    op.dtype = DType::f32;
    op.count = 16;
    op.in = reinterpret_cast<std::byte*>(data.data());
    Buffer out(16 * rank.world_size);
    for (int p = 0; p < rank.world_size; ++p)
      op.out_parts.push_back({reinterpret_cast<std::byte*>(&out[16 * p]), 16});
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2500);
    for (bool more = true; more;) {
      for (int i = 0; i < 50; ++i) me.group.issue(op, issue);
      for (bool each : all_gather_value<uint8_t>(rank.comm, std::chrono::steady_clock::now() < end))
        more = more && each;
      if (fake_calls("cuStreamBatchMemOp") > 50000) me.own.synchronize();
    }
    me.own.synchronize();
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // nor is one that is idle
    require(!rank.comm.transport().broken(), "the group is whole");
    me.finish();
  };
  expect("busy for longer than the timeout", run_ranks(run_options({2, 1}), body));
}

// The second operation follows the first behind the watching thread's back, with the same ranks missing. It
// has a time of its own, though the first took longer than that.
void test_next_operation() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    me.exercise();
    pause(100);  // the watching thread has found the line idle
    Trial first(me.group, rank, {.count = 8}), second(me.group, rank, {.count = 8});
    if (rank.rank == 1) {
      rank.barrier();
      me.group.issue(first.op(), me.issue());
      me.own.synchronize();
      rank.barrier();
      wait_until([&] { return rank.comm.transport().broken(); }, "rank 0 has waited for too long");
      return finish_broken(me, in_order);
    }
    Issue slow = me.issue(true), quick = me.issue(true);
    slow.timeout = 30;
    quick.timeout = 0.1;
    const CudaWorkPtr work = me.group.issue(first.op(), slow);
    pause(400);
    std::atomic<bool> ended{false};
    fake_enqueue(work->stream(), [&ended] { ended = true; });
    quick.after = [&](Stream) {  // with the lock held, and the second operation in the stream
      rank.barrier();
      wait_until([&] { return ended.load(); }, "the first operation ends");
      pause(50);  // the second begins
      rank.barrier();
    };
    me.group.issue(second.op(), quick);
    // Completed by the look that finds the second operation.
    wait_until([&] { return work->done(); }, "the watching thread completes the first");
    require(!work->error(), "the second is not late when it begins");
    require_contains(comm_error_of([&] {
                       wait_until([&] { return rank.comm.transport().broken(); }, "it is late in the end");
                       rank.comm.transport().check({});
                     }).what(),
                     "rank 1 did not arrive within the timeout of 0.1 s");
    finish_broken(me, in_order);
  };
  expect("the next operation has its own time", run_ranks(run_options(in_order), body));
}

// The fake driver, of which a call for words can be held up: what comes before it in the stream goes on.
struct Holding {
  std::atomic<int> calls_before{-1};  // it; negative: none is
  std::function<void()> hold;
} holding;

int hold_words(Stream stream, unsigned int count, BatchMemOp* operations, unsigned int flags) {
  if (holding.calls_before-- == 0) holding.hold();
  return fake_driver()->cuStreamBatchMemOp(stream, count, operations, flags);
}
const Driver* holding_driver() {
  static const Driver table = [] {
    Driver copy = *fake_driver();
    copy.cuStreamBatchMemOp = hold_words;
    return copy;
  }();
  return &table;
}

// Rank 1 comes to the first exchange of an operation and not to the second; rank 2 comes to both. Where rank
// 0 has less patience than this machine gives rank 2 time to come, it is to have more.
void test_second_exchange() {
  const auto body = [](Rank& rank, double patience) {
    use_driver(holding_driver());
    Member me(rank);
    me.exercise();
    rank.barrier();
    const auto broken = [&] { return rank.comm.transport().broken(); };
    Trial trial(me.group, rank, {.count = 8});
    Issue issue = me.issue();
    issue.timeout = rank.rank == 0 ? patience : 30;
    if (rank.rank == 1) {
      holding.hold = [&] { wait_until(broken, "rank 0 gives up"); };
      holding.calls_before = 2;  // one says what is under way, one is the first exchange
    }
    me.group.issue(trial.op(), issue);
    wait_until(broken, "rank 0 gives up");
    const CommError error = comm_error_of([&] { rank.comm.transport().check({}); });
    require_kind(error, ErrorKind::timeout);
    require_contains(error.what(), "rank 1 did not arrive within the timeout");
    if (rank.rank == 0) require(error.peer == 1, "the peer");
    finish_broken(me, three_in_order);
  };
  bool well = false;
  for (double patience = 0.3; !well && patience < 10; patience *= 5)
    well = run_ranks(run_options(three_in_order), [&body, patience](Rank& rank) { body(rank, patience); });
  expect("who came to the second exchange", well);
}

// Two ranks send to each other, and neither receives. That the peer's own message has come says nothing of
// this rank's.
void test_messages_both_ways(bool sends) {
  const auto body = [sends](Rank& rank) {
    Member me(rank);
    me.exercise();
    rank.barrier();
    Buffer data(1000);
    const MessageCall message{
        sends, 1 - rank.rank, 0, DType::f32, reinterpret_cast<std::byte*>(data.data()), data.size()};
    Issue issue = me.issue();
    issue.timeout = rank.rank == 0 ? 0.5 : 30;
    me.group.issue(message, issue);
    wait_until([&] { return rank.comm.transport().broken(); }, "rank 0 gives up");
    const CommError error = comm_error_of([&] { rank.comm.transport().check({}); });
    require_kind(error, ErrorKind::timeout);
    require_contains(error.what(), "rank 1 did not arrive within the timeout of 0.5 s");
    finish_broken(me, in_order);
  };
  expect(sends ? "two sends that cross" : "two receives that cross", run_ranks(run_options(in_order), body));
}

// What has not begun when it is looked for keeps its time: here it is behind the caller's own work.
void test_not_begun() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    me.exercise();
    Trial trial(me.group, rank, {.count = 8});
    rank.barrier();
    if (rank.rank == 0) {
      Gate gate(me.stream);
      Issue issue = me.issue();
      issue.timeout = 0.3;
      me.group.issue(trial.op(), issue);
      pause(100);  // the watching thread has looked
    }
    wait_until([&] { return rank.comm.transport().broken(); }, "rank 0 gives up");
    require_contains(comm_error_of([&] { rank.comm.transport().check({}); }).what(),
                     "rank 1 did not arrive within the timeout of 0.3 s");
    finish_broken(me, in_order);
  };
  expect("an operation that has not begun", run_ranks(run_options(in_order, 30), body));
}

// A replayed operation has the longest time that any call asked for: which one it is, the host does not know.
void test_replayed() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    OwnStream graph(me.device);
    me.exercise();
    Trial quick(me.group, rank, {.count = 8}), replayed(me.group, rank, {.count = 8});
    Issue issue = me.issue();
    issue.timeout = 1;
    fake_capture(graph.stream, flag::capture_active, 1 + rank.rank);
    Gate gate(graph.stream);  // what is captured does not run yet
    replayed.fill(graph.stream);
    me.group.issue(replayed.op(), me.issue(false, graph.stream));
    replayed.look(graph.stream);
    fake_capture(graph.stream, flag::capture_none, 0);
    rank.barrier();
    try {
      me.group.issue(quick.op(), issue);
      me.own.synchronize();
      rank.barrier();
    } catch (const CommError&) {
      gate.open();  // this machine stood still, and the test says nothing
      graph.synchronize();
      return finish_broken(me, in_order);
    }
    if (rank.rank == 1) pause(2000);
    gate.open();
    graph.synchronize();
    replayed.check();
    require(!rank.comm.transport().broken(), "the group is whole");
    me.finish();
  };
  expect("a replayed operation", run_ranks(run_options(in_order, 30), body));
}

// Nobody asks, and all ranks hear of it.
void test_unasked(const Setting& setting) {
  const auto body = [&](Rank& rank) {
    Member me(rank);
    me.exercise();
    Trial trial(me.group, rank, {.count = 8});
    rank.barrier();
    Issue issue = me.issue();  // not asynchronous: no work is watched
    issue.timeout = 0.3;
    if (rank.rank != 1) me.group.issue(trial.op(), issue);
    wait_until([&] { return rank.comm.transport().broken(); }, "the group is broken");
    require_kind(comm_error_of([&] { rank.comm.transport().check({}); }), ErrorKind::timeout);
    finish_broken(me, setting);
  };
  expect("unasked: " + setting.text(), run_ranks(run_options(setting), body));
}

// The fake driver, where an operation ends just when it is asked for: what went wrong in it was not there at
// the look before.
thread_local bool asks = false;  // this thread does; else the watching one
std::atomic<bool> watching{false};

int end_and_query(Event event) {
  if (asks != watching) fake_driver()->cuEventSynchronize(event);
  return fake_driver()->cuEventQuery(event);
}
const Driver* ending_driver() {
  static const Driver table = [] {
    Driver copy = *fake_driver();
    copy.cuEventQuery = end_and_query;
    return copy;
  }();
  return &table;
}

void test_ended_between_looks(bool watched) {
  const auto body = [watched](Rank& rank) {
    use_driver(ending_driver());
    asks = true;
    watching = watched;
    Member me(rank);
    Trial trial(me.group, rank, {.count = rank.rank ? size_t{8} : size_t{9}});
    auto gate = std::make_unique<Gate>(me.stream);
    Issue issue = me.issue();
    issue.watched = watched;
    const auto work = me.group.issue(trial.op(), issue);
    pause(30);  // the watching thread has looked, or waits for the end
    std::thread opener([&] {
      pause(30);
      gate.reset();
    });
    if (watched) wait_until([&] { return work->done(); }, "the watching thread completes it");
    else require(work->poll(), "it has ended");
    opener.join();
    require(work->error() != nullptr, "what has ended knows its error");
    require_kind(comm_error_of([&] { work->wait(); }), ErrorKind::mismatch);
    rank.barrier();
    me.exercise();
    me.finish();
  };
  expect(std::string("ended between two looks, ") + (watched ? "watched" : "asked for"),
         run_ranks(run_options({2, 1, 1, true}), body));
}

// Rank 1's collectives say nothing of what rank 0 receives: each line of each rank has a word of its own.
void test_beside_other_lines() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    me.exercise();
    Buffer data(10);
    rank.barrier();
    Issue issue = me.issue(true);
    issue.timeout = 1;
    if (rank.rank == 0)
      me.group.issue({false, 1, 0, DType::f32, reinterpret_cast<std::byte*>(data.data()), data.size()},
                     issue);
    rank.barrier();
    try {
      me.exercise();
    } catch (const CommError&) {
      // On a slow machine the message may be late by now.
    }
    wait_until([&] { return rank.comm.transport().broken(); }, "rank 0 gives up");
    const CommError error = comm_error_of([&] { rank.comm.transport().check({}); });
    require_kind(error, ErrorKind::timeout);
    require_contains(error.what(), "recv #1");
    finish_broken(me, in_order);
  };
  expect("a late message beside collectives", run_ranks(run_options(in_order), body));
}

// Each operation that a peer may have left has all of the patience: here two that do end, with a longer time
// between them.
void test_patience() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    me.exercise();
    rank.barrier();
    if (rank.rank == 1) {
      rank.comm.close();
      return wait_until([] { return !PeerMemory::free_parked(); }, "rank 0 lets go of its memory");
    }
    wait_until([&] { return rank.comm.transport().peer_closed(1); }, "rank 1 closes");
    for (int round = 0; round < 2; ++round) {
      Buffer out(10, 5.0f), in(10);
      const auto call = [](bool sends, Buffer& data) {
        return MessageCall{sends, 0, 0, DType::f32, reinterpret_cast<std::byte*>(data.data()), data.size()};
      };
      Issue issue = me.issue(true);
      issue.after = [](Stream stream) {
        fake_enqueue(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(60)); });
      };
      const auto sent = me.group.issue(call(true, out), issue), got = me.group.issue(call(false, in), issue);
      sent->wait(9);
      got->wait(9);
      require(in[9] == 5.0f, "what came");
      std::this_thread::sleep_for(std::chrono::milliseconds(round ? 0 : 600));
    }
    require(!rank.comm.transport().broken(), "the group is whole");
    me.group.close();
    wait_until([] { return !PeerMemory::free_parked(); }, "its memory goes back");
  };
  expect("patience begins anew", run_ranks(run_options({2, 1, 1, true}), body));
}

}  // namespace

int main(int count, char** arguments) {
  return run_suites(count, arguments,
                    {{"late rank", test_late_rank},
                     {"busy for long", test_busy_for_long},
                     {"next operation", test_next_operation},
                     {"second exchange", test_second_exchange},
                     {"not begun", test_not_begun},
                     {"replayed", test_replayed},
                     {"patience", test_patience},
                     {"unasked",
                      [] {
                        for (const Setting& setting : {Setting{3, 3}, {3, 1, 1, true}}) test_unasked(setting);
                      }},
                     {"between looks",
                      [] {
                        for (bool watched : {true, false}) test_ended_between_looks(watched);
                      }},
                     {"beside other lines", test_beside_other_lines},
                     {"messages both ways", [] {
                        for (bool sends : {true, false}) test_messages_both_ways(sends);
                      }}});
}
