// group_deadlines_test.cc -- csrc/cuda/deadlines.h over the fake driver: when an operation in stream order is
// late, and who is to blame.
//
// What the watching thread sees is arranged, not left to the clock: it looks with the group's lock held, and
// so does a call that issues.
#include "group_ranks.h"

using namespace pycomm;
using namespace pycomm::cuda;

namespace {

const Setting in_order{2, 1}, three_in_order{3, 1};

void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

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
    well = run_ranks(run_options(three_in_order),
                     [&body, patience](Rank& rank) { body(rank, patience); });
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

}  // namespace

int main(int count, char** arguments) {
  return run_suites(count, arguments, {{"next operation", test_next_operation},
                     {"second exchange", test_second_exchange},
                     {"messages both ways", [] {
                        for (bool sends : {true, false}) test_messages_both_ways(sends);
                      }}});
}
