// group_ends_test.cc -- csrc/cuda/group.h over the fake driver: closed and released while it is in use.
#include "group_ranks.h"

using namespace pycomm;
using namespace pycomm::cuda;

namespace {

const Setting together{2, 2}, apart{2, 1, 1, true}, in_order{2, 1};

// Closed with operations under way: their results are there afterwards.
void test_close_under_way(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    std::list<Trial> trials;
    std::vector<CudaWorkPtr> works;
    for (int i = 0; i < 10; ++i) {
      Trial& trial = trials.emplace_back(me.group, rank, Spec{.count = 3000});
      trial.fill(me.stream);
      works.push_back(me.group.issue(trial.op(), me.issue(i % 2)));
      works.back()->wait();
      trial.look(me.stream);
    }
    me.group.close();
    me.own.synchronize();
    for (const Trial& trial : trials) trial.check();
    for (size_t i = 1; i < works.size(); i += 2)
      require(works[i]->done() && !works[i]->error(), "every work is done");
    require_contains(error_of([&] { me.group.issue(trials.front().op(), me.issue()); }),
                     "the communicator is closed");
    trials.clear();
    rank.barrier();
    PeerMemory::free_parked();
  };
  expect("close under way: " + setting.text(), run_ranks(run_options(setting), body));
}

// Works, memory and streams outlive the group in any order.
void test_destruction() {
  RunOptions options = run_options(together);
  const auto body = [](Rank& rank) {
    CudaWorkPtr work;
    Registered registered;
    {
      Member me(rank);
      registered = me.group.allocate(1000);
      Trial trial(me.group, rank, {.count = 9});
      work = me.run(trial, true);
      me.own.synchronize();
      trial.check();
    }
    rank.comm.close();
    require_contains(error_of([&] { work->wait(); }), "the communicator is closed");
    registered.memory.reset();
  };
  expect("destruction", run_ranks(options, body));
}

// A callback, which runs on the watching thread, closes the group.
void test_close_in_callback() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    Trial trial(me.group, rank, {.count = 9});
    std::atomic<bool> closed{false};
    const auto work = me.run(trial, true);
    work->on_completion([&] {
      me.group.close();
      closed = true;
    });
    wait_until([&] { return closed.load(); }, "the callback returns");
    me.own.synchronize();
    trial.check();
    rank.barrier();
    PeerMemory::free_parked();
  };
  expect("closed in a callback", run_ranks(run_options(apart), body));
}

// Registered memory that is given back while an operation uses it lives until that has ended.
void test_release_under_way(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    Registered registered = me.group.allocate(4000);
    auto* data = reinterpret_cast<float*>(registered.data);
    std::fill_n(data, 1000, 1.0f + rank.rank);
    Op op;
    op.kind = OpKind::all_reduce;
    op.dtype = DType::f32;
    op.count = 1000;
    op.in = op.out = registered.data;
    rank.barrier();
    auto gate = std::make_unique<Gate>(me.stream);
    me.group.issue(op, me.issue(rank.rank == 0));
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30 * (1 + rank.rank)));
      gate->open();
    });
    me.group.release(registered);
    require(data[999] == 3.0f, "the operation has ended");
    opener.join();
    require_contains(error_of([&] {
                       op.algorithm = Algorithm::copy_engine;
                       op.kind = OpKind::all_gather;
                       op.out = nullptr;
                       op.out_parts = {{registered.data, 10}, {registered.data + 40, 10}};
                       op.count = 10;
                       me.group.issue(op, me.issue());
                     }),
                     "needs buffers from pycomm.empty");
    registered.memory.reset();
    me.finish();
  };
  expect("release() under way: " + setting.text(), run_ranks(run_options(setting), body));
}

// So does what a message uses.
void test_release_beside_a_message(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    Registered registered = me.group.allocate(4000);
    auto* const data = reinterpret_cast<float*>(registered.data);
    if (rank.rank == 0) std::fill_n(data, 1000, 7.0f);
    const MessageCall call{
        rank.rank == 0, 1 - rank.rank, 0, DType::f32, reinterpret_cast<std::byte*>(data), 1000};
    rank.barrier();
    std::atomic<bool> opened{rank.rank != 0};
    std::unique_ptr<Gate> gate;
    if (rank.rank == 0) gate = std::make_unique<Gate>(me.stream);
    me.group.issue(call, me.issue());
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      opened = true;
      gate.reset();
    });
    me.group.release(registered);
    require(opened, "release() waits for the message");
    opener.join();
    me.own.synchronize();
    require(data[0] == 7.0f && data[999] == 7.0f, "what came");
    registered.memory.reset();
    me.finish();
  };
  expect("release() beside a message: " + setting.text(), run_ranks(run_options(setting), body));
}

// A buffer that one rank has released and its peer has not: a new one is never taken for it.
void test_released_by_one(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    Registered first = me.group.allocate(4000), second = me.group.allocate(4000);
    if (rank.rank == 0) me.group.release(first);
    Registered third = me.group.allocate(4000);
    auto* const data = reinterpret_cast<float*>(third.data);
    std::fill_n(data, 1000, 1.0f + rank.rank);
    Op op;
    op.kind = OpKind::all_reduce;
    op.algorithm = Algorithm::two_shot;
    op.dtype = DType::f32;
    op.count = 1000;
    op.in = op.out = third.data;
    rank.barrier();
    me.group.issue(op, me.issue());
    me.own.synchronize();
    require(data[0] == 3.0f && data[999] == 3.0f, "the sum");
    if (rank.rank == 1) me.group.release(first);
    me.group.release(second);
    me.group.release(third);
    for (Registered* each : {&first, &second, &third}) each->memory.reset();
    me.finish();
  };
  expect("released by one: " + setting.text(), run_ranks(run_options(setting), body));
}

// A registered buffer goes to its last byte, and no further.
void test_end_of_a_region(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    constexpr size_t count = 10, nbytes = count * sizeof(float);
    Registered registered = me.group.allocate(4 * nbytes);
    std::byte* const out = registered.data + 2 * nbytes;
    std::fill_n(reinterpret_cast<float*>(registered.data), count, 1.0f + rank.rank);
    Op op;
    op.kind = OpKind::all_gather;
    op.algorithm = Algorithm::copy_engine;
    op.dtype = DType::f32;
    op.count = count;
    op.in = registered.data;
    op.out_parts = {{out, count}, {out + nbytes, count}};
    rank.barrier();
    me.group.issue(op, me.issue())->wait(9);
    for (int p : {0, 1})
      require(reinterpret_cast<float*>(out + p * nbytes)[count - 1] == 1.0f + p, "what came");
    op.out_parts[1].data += sizeof(float);
    require_contains(error_of([&] { me.group.issue(op, me.issue()); }), "needs buffers from pycomm.empty");
    rank.barrier();
    me.group.release(registered);
    registered.memory.reset();
    me.finish();
  };
  expect("the end of a region: " + setting.text(), run_ranks(run_options(setting), body));
}

// What all ranks have released goes back with the next buffer, all of it.
void test_released_by_all(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    const auto mapped = [&rank] {
      rank.barrier();
      wait_until([] { return !PeerMemory::free_parked(); }, "all ranks have let go of it");
      return fake_counts().allocations + fake_counts().ipc_mappings;
    };
    Registered one = me.group.allocate(4000);
    const int before = mapped();
    std::list<Registered> more;
    for (int i = 0; i < 3; ++i) more.push_back(me.group.allocate(4000));
    require(mapped() == before + 3 * 2, "a block, and that of the peer, for each");
    for (const Registered& each : more) me.group.release(each);
    more.clear();
    me.group.release(one);
    one.memory.reset();
    one = me.group.allocate(4000);
    require(mapped() == before, "one is left");
    me.group.release(one);
    one.memory.reset();
    me.finish();
  };
  expect("released by all: " + setting.text(), run_ranks(run_options(setting), body));
}

// A buffer whose row one rank cannot write is there on no rank, and takes no number and no memory.
void test_failing_row(const Setting& setting) {
  const auto body = [](Rank& rank) {
    Member me(rank);
    const auto copies_of = [&](const std::function<void()>& body) {
      rank.barrier();
      const int before = fake_calls("cuMemcpyAsync");
      rank.barrier();
      body();
      rank.barrier();
      return fake_calls("cuMemcpyAsync") - before;
    };
    const int copies = copies_of([&] { me.group.release(me.group.allocate(1000)); });
    int kept = 0;
    for (int round = 0; round < 3; ++round) {
      // The last copy in a process is that of a row.
      if (rank.rank == 1) fake_fail("cuMemcpyAsync", copies, result::out_of_memory);
      rank.barrier();
      require_contains(error_of([&] { me.group.allocate(1000); }), "cuMemcpyAsync failed");
      wait_until([] { return !PeerMemory::free_parked(); }, "all ranks have let go of it");
      rank.barrier();
      const int now = fake_counts().allocations + fake_counts().ipc_mappings;
      require(round == 0 || now == kept, "its memory is given back");
      kept = now;
      if (rank.rank == 1) fake_fail("cuMemcpyAsync", 1 << 30, 0);
      rank.barrier();
    }
    {
      Trial trial(me.group, rank, {OpKind::all_gather, 1000, Algorithm::copy_engine}, true);
      me.run(trial);
      me.own.synchronize();
      trial.check();
    }
    me.finish();
  };
  expect("a row that cannot be written: " + setting.text(), run_ranks(run_options(setting), body));
}

// A peer that closes while this rank has nothing under way is no fault, however long that lasts.
void test_closed_in_good_order() {
  const auto body = [](Rank& rank) {
    Member me(rank);
    me.exercise();
    rank.barrier();
    if (rank.rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(900));
      require(!rank.comm.transport().broken(), "the group is whole");
    }
    rank.comm.close();
    for (int i = 0; i < 3000 && PeerMemory::free_parked(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  expect("closed in good order", run_ranks(run_options({2, 1, 1, true}), body));
}

}  // namespace

int main(int count, char** arguments) {
  const auto each = [](void (*test)(const Setting&)) {
    return [test] {
      for (const Setting& setting : {together, apart, in_order}) test(setting);
    };
  };
  return run_suites(count, arguments,
                    {{"close under way", each(test_close_under_way)},
                     {"release under way", each(test_release_under_way)},
                     {"release beside a message", each(test_release_beside_a_message)},
                     {"released by one", each(test_released_by_one)},
                     {"end of a region", each(test_end_of_a_region)},
                     {"released by all",
                      [] {
                        for (const Setting& setting : {apart, in_order}) test_released_by_all(setting);
                      }},
                     {"failing row", each(test_failing_row)},
                     {"destruction", test_destruction},
                     {"close in callback", test_close_in_callback},
                     {"closed in good order", test_closed_in_good_order}});
}
