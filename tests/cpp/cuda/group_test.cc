// group_test.cc -- csrc/cuda/group.h over the fake driver: results, messages, protocols.
#include "group_ranks.h"

using namespace pycomm;
using namespace pycomm::cuda;

namespace {

const std::vector<Setting> settings = {{1, 1},    {2, 2}, {2, 1, 1, true}, {2, 1},
                                       {2, 2, 2}, {3, 3}, {3, 1},          {3, 3, 1, false, "stream_ordered"},
                                       {4, 2, 4}, {4, 2}, {4, 1, 2, true}, {8, 8, 1, false, "", 16}};

std::vector<Spec> forms(int world_size, size_t count, bool registered) {
  using enum OpKind;
  const int last = world_size - 1;
  std::vector<Spec> all = {{all_reduce, count},
                           {all_reduce, count, Algorithm::one_shot},
                           {all_reduce, count, Algorithm::two_shot},
                           {all_reduce, count, Algorithm::ring},
                           {all_reduce, count, Algorithm::automatic, false, 0, ReduceOp::max},
                           {reduce, count, Algorithm::automatic, false, last},
                           {broadcast, count, Algorithm::automatic, false, last},
                           {broadcast, count, Algorithm::two_shot},
                           {all_gather, count},
                           {all_gather, count, Algorithm::automatic, true},
                           {reduce_scatter, count},
                           {reduce_scatter, count, Algorithm::automatic, true},
                           {all_to_all, count},
                           {all_to_all, std::min<size_t>(count, 5000), Algorithm::automatic, true},
                           {gather, count, Algorithm::automatic, false, last},
                           {scatter, count, Algorithm::automatic, false, last},
                           {barrier}};
  if (registered) {
    all.push_back({all_gather, count, Algorithm::copy_engine});
    all.push_back({all_to_all, count, Algorithm::copy_engine});
  }
  return all;
}

// Back to back, without a look from the host until the end.
void run_forms(Member& me, size_t count, bool registered) {
  std::vector<std::unique_ptr<Trial>> calls;
  for (const Spec& spec : forms(me.rank.world_size, count, registered))
    calls.push_back(std::make_unique<Trial>(me.group, me.rank, spec, registered, calls.size()));
  for (size_t i = 0; i < calls.size(); ++i) {
    me.run(*calls[i], i % 3 == 1);
    if (i % 4 == 3) me.run(*calls[i]);
  }
  me.own.synchronize();
  for (size_t i = 0; i < calls.size(); ++i) calls[i]->check(i % 4 == 3 ? 2 : 1);
}

void test_collectives() {
  for (const Setting& setting : settings) {
    const auto body = [&](Rank& rank) {
      Member me(rank, setting.devices);
      for (bool registered : {false, true})
        for (size_t count : {0, 1, 37, 20000})
          if (rank.world_size < 8 || count == 37) run_forms(me, count, registered);
      me.group.barrier(me.issue());
      me.finish();
    };
    expect("collectives: " + setting.text(), run_ranks(run_options(setting), body));
  }
}

// --- messages

// A message of `count` floats in plain or registered memory, filled or looked at in stream order.
struct Letter {
  Letter(size_t count, float first) : data(count), first(first) {}
  MessageCall call(bool sends, int peer, int tag = 0) {
    return {sends, peer, tag, DType::f32, reinterpret_cast<std::byte*>(data.data()), data.size()};
  }
  void fill(Stream stream) {
    fake_enqueue(stream, [this] {
      for (size_t i = 0; i < data.size(); ++i) data[i] = first + static_cast<float>(i % 1000);
    });
  }
  void check() const {
    for (size_t i = 0; i < data.size(); ++i)
      require(data[i] == first + static_cast<float>(i % 1000), "element " + std::to_string(i));
  }
  std::vector<float> data;
  float first;
};

// To the right and from the left, both at once, beside a collective.
void exchange_letters(Member& me, size_t count) {
  const int n = me.rank.world_size, right = (me.rank.rank + 1) % n, left = (me.rank.rank + n - 1) % n;
  std::list<Letter> sent, received;
  std::vector<CudaWorkPtr> works;
  for (int i = 0; i < 3; ++i) {
    sent.emplace_back(count, 1000.0f * me.rank.rank + i).fill(me.stream);
    works.push_back(me.group.issue(sent.back().call(true, right, i), me.issue(true)));
  }
  Trial trial(me.group, me.rank, {.count = 100});
  me.run(trial, true);
  for (int i = 0; i < 3; ++i) {
    received.emplace_back(count, 1000.0f * left + i);
    works.push_back(me.group.issue(received.back().call(false, left, i), me.issue(true)));
  }
  for (const auto& work : works) work->wait();
  me.own.synchronize();
  trial.check();
  for (const Letter& letter : received) letter.check();
}

void ping_pong(Member& me, size_t count) {
  if (me.rank.rank > 1) return;
  const int peer = 1 - me.rank.rank;
  for (int i = 0; i < 4; ++i) {
    Letter letter(count, static_cast<float>(i));
    const bool sends = (i + me.rank.rank) % 2 == 0;
    if (sends) letter.fill(me.stream);
    me.group.issue(letter.call(sends, peer), me.issue());
    me.own.synchronize();
    letter.check();
  }
}

void self_send(Member& me) {
  Letter out(3000, 5), in(3000, 5);
  out.fill(me.stream);
  const auto sent = me.group.issue(out.call(true, me.rank.rank), me.issue(true));
  const auto got = me.group.issue(in.call(false, me.rank.rank), me.issue(true));
  sent->wait();
  got->wait();
  me.own.synchronize();
  in.check();
}

void test_messages() {
  for (const Setting& setting : settings) {
    const auto body = [&](Rank& rank) {
      Member me(rank, setting.devices);
      for (size_t count : {0, 1, 3000, 60000}) exchange_letters(me, count);
      if (rank.world_size > 1)
        for (size_t count : {7, 30000}) ping_pong(me, count);
      if (rank.world_size < 8) self_send(me);  // with 8 no hardware queues are left for two lines more
      require_contains(
          error_of([&] { me.group.issue(Letter(1, 0).call(true, rank.world_size), me.issue()); }),
          "is not in this group of");
      require_contains(error_of([&] { me.group.issue(Letter(1, 0).call(false, -1), me.issue()); }),
                       "CUDA messages have a definite source");
      me.finish();
    };
    expect("messages: " + setting.text(), run_ranks(run_options(setting), body));
  }
}

// --- which protocol, and what cannot be

// Of the driver, in stream order, for any number of ranks: before the first launch, between the two, and
// behind the last. A change of context may lie in each.
void require_few_calls(Member& me, Rank& rank, int threads) {
  Trial trial(me.group, rank, {.count = 8});
  rank.barrier();
  const int before = fake_calls("cuStreamBatchMemOp");
  rank.barrier();
  me.group.issue(trial.op(), me.issue());
  me.own.synchronize();
  rank.barrier();
  const int calls = fake_calls("cuStreamBatchMemOp") - before;
  require(calls == 3 * threads, "calls for words: " + std::to_string(calls));
  rank.barrier();
}

void test_protocols() {
  struct Wanted {
    Setting setting;
    const char *protocol, *reason, *buffers;
  };
  const std::vector<Wanted> table = {
      {{2, 2}, "resident", "the ranks on a device are threads of one process", "any, by pointer"},
      {{2, 1, 1, true},
       "resident",
       "the processes on a device run together under MPS",
       "registered ones in place"},
      {{2, 1},
       "stream_ordered",
       "ranks 0 and 1 are processes that share a device without MPS",
       "registered ones in place"},
      {{2, 2, 2}, "resident", "every rank has its own device", "registered ones in place"},
      {{4, 1, 4}, "resident", "every rank has its own device", "registered ones in place"},
      {{3, 3, 1, false, "stream_ordered"}, "stream_ordered", "as requested", "any, by pointer"},
      {{8, 8}, "stream_ordered", "more ranks share a device than it has multiprocessors", "any, by pointer"}};
  for (const Wanted& wanted : table) {
    const auto body = [&](Rank& rank) {
      Member me(rank, wanted.setting.devices);
      require(description(me.group, "protocol") == wanted.protocol, description(me.group, "protocol"));
      require_contains(description(me.group, "protocol_reason"), wanted.reason);
      require_contains(description(me.group, "buffers"), wanted.buffers);
      require(description(me.group, "device") == "cuda:" + std::to_string(me.device), "the device");
      me.exercise();
      if (description(me.group, "protocol") == "stream_ordered")
        require_few_calls(me, rank, wanted.setting.threads);
      require_contains(error_of([&] { CudaGroup::of(rank.comm, me.device + 1); }),
                       "A rank of a group uses one device.");
      me.finish();
    };
    expect("protocol: " + wanted.setting.text(), run_ranks(run_options(wanted.setting), body));
  }
}

void test_refusals() {
  auto refused = [](const std::string& name, Setting setting, const std::string& text,
                    const std::function<void(RunOptions&)>& change) {
    RunOptions options = run_options(setting);
    change(options);
    const auto body = [&](Rank& rank) {
      if (rank.rank == 1 && text.starts_with("staging_bytes"))
        const_cast<DeviceOptions&>(rank.comm.transport().device_options()).staging_bytes = 1 << 20;
      require_contains(error_of([&] { CudaGroup::of(rank.comm, 0); }), text);
      rank.barrier();  // the group of the CPU side goes on
    };
    expect(name, run_ranks(options, body));
  };
  refused("hardware queues", {8, 8}, "need 16 hardware queues, and there are 8",
          [](RunOptions& o) { o.device.connections = 0; });
  refused("17 ranks", {17, 17}, "at most 16 ranks, this one has 17", [](RunOptions&) {});
  refused("a protocol that cannot work", {2, 1, 1, false, "resident"}, "protocol resident cannot work",
          [](RunOptions&) {});
  refused("an unknown protocol", {2, 1, 1, false, "fast"}, "PYCOMM_CUDA_PROTOCOL=fast: must be",
          [](RunOptions&) {});
  refused("settings that differ", {2, 1, 1, true}, "staging_bytes=65536 protocol=resident blocks=2 on rank 0",
          [](RunOptions&) {});
}

void test_shared_stream() {
  Stream shared = nullptr;
  const auto body = [&](Rank& rank) {
    Member me(rank);
    if (rank.rank == 0) shared = me.stream;
    rank.barrier();
    Trial trial(me.group, rank, {.count = 3});
    if (rank.rank == 0) me.run(trial);
    rank.barrier();
    if (rank.rank == 1) {
      require_contains(error_of([&] { me.group.issue(trial.op(), me.issue(false, shared)); }),
                       "use the same CUDA stream");
      me.run(trial);  // the group is as before
    }
    me.own.synchronize();
    trial.check();
    me.exercise();
    me.finish();
  };
  expect("a stream for two ranks", run_ranks(run_options({2, 2}), body));
}

}  // namespace

int main(int count, char** arguments) {
  return run_suites(count, arguments,
                    {{"collectives", test_collectives},
                     {"messages", test_messages},
                     {"protocols", test_protocols},
                     {"refusals", test_refusals},
                     {"shared stream", test_shared_stream}});
}
