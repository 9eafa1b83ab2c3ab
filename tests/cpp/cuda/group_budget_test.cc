// group_budget_test.cc -- csrc/cuda/budget.h over the fake driver: operations of several groups and many
// messages at once, more than the device has room for. What cannot start because of that ends in a timeout.
#include "fake_processors.h"
#include "group_ranks.h"

using namespace pycomm;
using namespace pycomm::cuda;

namespace {

constexpr double timeout = 20;  // seconds; nothing here takes one, but for a machine that has no time
constexpr size_t large = 200'000;  // elements: as many blocks as may be

// The same ranks, or some of them, as another group; each call of all of them makes one.
class MoreGroups {
 public:
  explicit MoreGroups(int connections = 0) : connections_(connections) {
    char folder[] = "/tmp/pycomm-groups-XXXXXX";
    if (::mkdtemp(folder)) folder_ = folder;
  }
  ~MoreGroups() { std::filesystem::remove_all(folder_); }
  std::shared_ptr<Communicator> make(const std::string& name, int rank, int world_size,
                                     const std::string& protocol = {}) const {
    std::filesystem::create_directories(folder_ + "/" + name);
    FolderStore store(folder_ + "/" + name);
    TransportOptions options;
    options.timeout = timeout;
    options.device = run_options({.connections = connections_}).device;
    options.device.protocol = protocol;
    return join_group(store, rank, world_size, options);
  }

 private:
  const int connections_;  // hardware queues that the groups count with
  std::string folder_;
};

std::string protocol_of(const Member& me) { return description(me.group, "protocol"); }

// Two groups of the same ranks in two streams, used in orders that differ from rank to rank.
void test_two_groups(int ranks, int multiprocessors, int groups) {
  const MoreGroups more;
  const auto body = [&](Rank& rank) {
    std::vector<std::shared_ptr<Communicator>> comms;
    std::list<Rank> handles;
    std::list<Member> members;
    for (int g = 0; g < groups; ++g) {
      comms.push_back(more.make("group " + std::to_string(g), rank.rank, rank.world_size));
      members.emplace_back(handles.emplace_back(Rank{*comms.back(), rank.rank, rank.world_size}));
    }
    rank.barrier();
    std::vector<Member*> mine;
    for (Member& member : members) mine.push_back(&member);
    std::list<Trial> trials;
    for (int round = 0; round < 3; ++round)
      for (int k = 0; k < groups; ++k) {
        Member& me = *mine[(k + rank.rank) % groups];
        me.run(trials.emplace_back(me.group, me.rank, Spec{OpKind::all_reduce, large, Algorithm::two_shot}));
        std::this_thread::sleep_for(std::chrono::milliseconds(30));  // it takes what it can get
      }
    for (Member& member : members) member.own.synchronize();
    for (const Trial& trial : trials) trial.check();
    require(protocol_of(members.front()) == "resident", "the first group has its places");
    for (Member& member : members) member.finish();
    require(fake_most_blocks() <= multiprocessors, "no more blocks at a time than the device holds");
  };
  Setting setting{ranks, ranks, 1, false, "", multiprocessors};
  expect(std::to_string(groups) + " groups: " + setting.text(),
         run_ranks(run_options(setting, timeout), body));
}

// Every rank sends much to several others before it receives, and a collective beside that. With many ranks
// there are hardware queues for the sends alone.
void test_many_sends(const Setting& setting, int peers) {
  const auto body = [&](Rank& rank) {
    Member me(rank, setting.devices);
    const int n = rank.world_size;
    auto call = [](Buffer& data, bool sends, int peer) {
      return MessageCall{sends, peer, 0, DType::f32, reinterpret_cast<std::byte*>(data.data()), data.size()};
    };
    std::list<Buffer> sent, received;
    std::vector<CudaWorkPtr> works;
    for (int k = 1; k <= peers; ++k) {
      sent.emplace_back(large, static_cast<float>(rank.rank));
      works.push_back(me.group.issue(call(sent.back(), true, (rank.rank + k) % n), me.issue(true)));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // all of it is under way
    rank.barrier();
    Trial trial(me.group, rank, {OpKind::all_reduce, large, Algorithm::two_shot});
    const bool few = n < 8;
    me.run(trial, few);
    for (int k = 1; k <= peers; ++k) {
      received.emplace_back(large);
      works.push_back(me.group.issue(call(received.back(), false, (rank.rank + n - k) % n), me.issue(few)));
    }
    for (const auto& work : works) work->wait();
    me.own.synchronize();
    trial.check();
    int k = 0;
    for (const auto& each : received) {
      const auto from = static_cast<float>((rank.rank + n - ++k) % n);
      require(each.front() == from && each.back() == from, "what came");
    }
    me.finish();
  };
  expect(std::to_string(peers) + " sends before the receives: " + setting.text(),
         run_ranks(run_options(setting, timeout), body));
}

// Rank 0 exchanges messages with all at once, and the streams of its lines come to more than there are
// hardware queues: the last one is refused, and goes through the caller's stream.
void test_queues(const Setting& setting, size_t refused_at) {
  const auto body = [&](Rank& rank) {
    Member me(rank, setting.devices);
    const int n = rank.world_size;
    auto call = [](Buffer& data, bool sends, int peer) {
      return MessageCall{sends, peer, 0, DType::f32, reinterpret_cast<std::byte*>(data.data()), data.size()};
    };
    rank.barrier();
    std::list<Buffer> data;
    std::vector<CudaWorkPtr> works;
    if (rank.rank == 0) {
      for (bool sends : {true, false})
        for (int peer = 1; peer < n; ++peer) {
          const MessageCall message = call(data.emplace_back(1000, sends ? 7.0f : 0.0f), sends, peer);
          if (works.size() + 1 != refused_at) {
            works.push_back(me.group.issue(message, me.issue(true)));
            continue;
          }
          require_contains(error_of([&] { me.group.issue(message, me.issue(true)); }), "hardware queues");
          works.push_back(me.group.issue(message, me.issue()));
          require(works.back()->info().sequence == 1, "what is refused has no number");
        }
      rank.barrier();
    } else {
      rank.barrier();
      for (bool sends : {false, true})
        me.group.issue(call(data.emplace_back(1000, sends ? 7.0f : 0.0f), sends, 0), me.issue());
    }
    for (const auto& work : works) work->wait();
    me.own.synchronize();
    for (const auto& each : data) require(each.back() == 7.0f, "what came");
    me.exercise();
    me.finish();
  };
  expect("hardware queues: " + setting.text(), run_ranks(run_options(setting, timeout), body));
}

// A launch of the caller's in the group's places, as a fused product is: each block waits for those of all
// ranks.
class Product {
 public:
  explicit Product(const Member& me) : me_(me), blocks_(std::stoi(description(me.group, "blocks"))) {}

  void launch(Stream stream, uint64_t* come) {
    me_.group.enter_line(stream);
    fake_enqueue(stream, [this, come] {
      FakeSeats seats(me_.device, blocks_, 256, 255);  // a multiprocessor each
      fiber::run_launch(me_.rank.rank, blocks_, 1, [&](fiber::FiberCtx& c) {
        seats.enter(c);
        c.add(come, 1, Scope::system);
        const uint64_t late = c.now_ns() + static_cast<uint64_t>(timeout * 1e9);
        while (c.load_acquire(come, Scope::system) < uint64_t(blocks_ * me_.rank.world_size) && !gave_up_) {
          gave_up_ = c.now_ns() > late;
          c.relax(come);
        }
        seats.leave(c);
      });
    });
    me_.group.leave_line(stream);
  }
  bool gave_up() const { return gave_up_; }

 private:
  const Member& me_;
  const int blocks_;
  std::atomic<bool> gave_up_{false};
};

// Fused products beside asynchronous collectives of the same ranks, before and behind them, each in a stream
// of its own. One rank comes late to what its peers began with, so that they have taken what they could get.
void test_products(int ranks, int multiprocessors) {
  std::vector<uint64_t> come(2 * ranks);
  const auto body = [&](Rank& rank) {
    Member me(rank);
    OwnStream other(me.device);
    Product product(me);
    rank.barrier();
    std::list<Trial> trials;
    for (size_t round = 0; round < come.size(); ++round) {
      Trial& trial =
          trials.emplace_back(me.group, rank, Spec{OpKind::all_reduce, large, Algorithm::two_shot});
      trial.fill(me.stream);
      me.own.synchronize();
      const bool late = rank.rank == static_cast<int>(round) / 2;
      CudaWorkPtr work;
      const auto reduce = [&] { work = me.group.issue(trial.op(), me.issue(true)); };
      const auto multiply = [&] { product.launch(other.stream, &come[round]); };
      const auto hold = [&](Stream stream) {
        if (late) fake_enqueue(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(60)); });
      };
      if (round % 2) {
        hold(other.stream);
        multiply();
        reduce();
      } else {
        hold(me.stream);
        reduce();
        multiply();
      }
      work->wait();
      trial.look(me.stream);
    }
    other.synchronize();
    me.own.synchronize();
    for (const Trial& trial : trials) trial.check();
    require(!product.gave_up(), "all blocks of a product run together");
    me.finish();
    require(fake_most_blocks() <= multiprocessors, "no more blocks at a time than the device holds");
  };
  const Setting setting{ranks, ranks, 1, false, "", multiprocessors};
  expect("products beside collectives: " + setting.text(), run_ranks(run_options(setting, timeout), body));
}

// What a group gives back when it is closed, the next one gets: places, and queues, of which there is one for
// each caller and each line.
void test_given_back() {
  const MoreGroups more(4);
  const auto body = [&](Rank& rank) {
    std::vector<std::shared_ptr<Communicator>> closed;
    for (int round = 0; round < 3; ++round) {
      const std::string name = std::to_string(round);
      const auto comm = more.make(name, rank.rank, 2), beside = more.make(name + " beside", rank.rank, 2);
      Rank handle{*comm, rank.rank, 2}, other{*beside, rank.rank, 2};
      Member me(handle), late(other);
      require(protocol_of(me) == "resident", "the first group has its places");
      require(protocol_of(late) == "stream_ordered", "the second has none");
      require_contains(description(late.group, "protocol_reason"), "other groups of this process have taken");
      me.exercise(true);
      late.exercise();
      const auto third = more.make(name + " third", rank.rank, 2, "resident");
      require_contains(error_of([&] { CudaGroup::of(*third, 0); }),
                       "protocol resident cannot work: other groups of this process have taken");
      me.finish();
      late.finish();
      closed.insert(closed.end(), {comm, beside});
    }
  };
  expect("places are given back", run_ranks(run_options({2, 2}), body));
}

// By the counts themselves: what is given back twice is there once.
void test_given_back_once() {
  Place here{};
  std::snprintf(here.uuid.bytes, sizeof(here.uuid.bytes), "counted");
  here.connections = 4;
  here.multiprocessors = 8;
  const auto streams_left = [&here](int most) {
    LineStreams streams;
    int count = 0;
    while (count < most && streams.take(here, 1, true)) ++count;
    return count;
  };
  const auto places_left = [&here] { return Places(here, 2, 2, 100).count(); };
  const bool at_first = streams_left(9) == 3 && places_left() == 8;
  {
    LineStreams streams;
    Places places(here, 2, 2, 5);
    streams.take(here, 1, true);
    for (int i = 0; i < 2; ++i) {
      streams.give_back();
      places.keep(2);
      places.keep(0);
    }
  }
  expect("given back once", at_first && streams_left(9) == 3 && places_left() == 8);
}

// A kernel of rank 1 waits for rank 0, which closes another group first: nothing there may wait for kernels.
// What is left of that group the next one gets, and all is freed at the end.
void test_closed_beside_a_kernel(int registered) {
  const MoreGroups more;
  const auto body = [&](Rank& rank) {
    const auto first = more.make("first", rank.rank, 2), second = more.make("second", rank.rank, 2);
    Rank handle{*first, rank.rank, 2}, other{*second, rank.rank, 2};
    Member kept(handle), closed(other);
    require(protocol_of(kept) == "resident" && protocol_of(closed) == "resident", "room for both");
    std::list<Registered> buffers;
    for (int i = 0; i < registered; ++i) buffers.push_back(closed.group.allocate(100 << i));
    closed.exercise();
    closed.own.synchronize();
    Trial trial(kept.group, kept.rank, {.count = 1000});
    if (rank.rank == 1) kept.run(trial);
    rank.barrier();
    const double seconds = seconds_of([&] {
      for (const Registered& buffer : buffers) closed.group.release(buffer);
      buffers.clear();
      closed.group.close();
      PeerMemory::free_parked();
    });
    require(seconds < timeout / 2, "the end of a group took " + std::to_string(seconds) + " s");
    rank.barrier();
    if (rank.rank == 0) kept.run(trial);
    kept.own.synchronize();
    trial.check();
    rank.barrier();
    const int allocations = fake_calls("cuMemAlloc") + fake_calls("cuMemHostAlloc");
    rank.barrier();
    const auto third = more.make("third", rank.rank, 2);
    Rank last{*third, rank.rank, 2};
    Member again(last);
    again.exercise();
    rank.barrier();
    require(fake_calls("cuMemAlloc") + fake_calls("cuMemHostAlloc") == allocations,
            "a group of the same size takes what the closed one had");
    rank.barrier();
    again.finish();
    require(fake_counts().allocations > 0, "kept as long as a group is open");
    rank.barrier();
    kept.finish();
  };
  const Setting setting{2, 2, 1, false, "", 256};
  expect("closed beside a kernel, " + std::to_string(registered) + " registered buffers",
         run_ranks(run_options(setting, timeout), body));
}

// A group whose device had to be stopped leaves its memory to the next one, which knows nothing of that.
void test_after_a_broken_group() {
  const MoreGroups more;
  const auto body = [&](Rank& rank) {
    const auto first = more.make("first", rank.rank, 2), second = more.make("second", rank.rank, 2);
    Rank handle{*first, rank.rank, 2}, other{*second, rank.rank, 2};
    Member kept(handle), broken(other);
    Trial trial(broken.group, broken.rank, {.count = 1000});
    rank.barrier();
    if (rank.rank == 0) broken.group.issue(trial.op(), broken.issue());
    rank.barrier();
    if (rank.rank == 1) second->abort("enough");
    broken.own.synchronize();  // ends because the device is stopped
    rank.barrier();
    broken.group.close();
    rank.barrier();
    const auto third = more.make("third", rank.rank, 2);
    Rank last{*third, rank.rank, 2};
    Member again(last);
    again.exercise(true);
    Trial reads(again.group, again.rank, {OpKind::all_reduce, 1000, Algorithm::two_shot});
    again.run(reads);  // kernels that touch a peer's memory look first whether they are to stop
    again.own.synchronize();
    reads.check();
    kept.exercise();
    rank.barrier();
    again.finish();
    kept.finish();
  };
  expect("after a broken group", run_ranks(run_options({2, 2, 1, false, "", 256}, timeout), body));
}

// Memory that is kept is freed where a device has no other left, once its kernels have ended.
void test_kept_memory_is_found_when_needed() {
  const MoreGroups more;
  const auto body = [&](Rank& rank) {
    const auto first = more.make("first", rank.rank, 2), second = more.make("second", rank.rank, 2);
    Rank handle{*first, rank.rank, 2}, other{*second, rank.rank, 2};
    Member kept(handle), closed(other);
    rank.barrier();
    closed.finish();
    rank.barrier();
    for (int mebibytes = 3; mebibytes < 40; mebibytes += 4) {  // each of a size of its own
      const Registered buffer = kept.group.allocate(size_t{1 << 20} * mebibytes);
      kept.exercise();
      rank.barrier();
      kept.group.release(buffer);
    }
    kept.finish();
  };
  RunOptions options = run_options({2, 2, 1, false, "", 256}, timeout);
  const auto before = options.before_threads;
  options.before_threads = [before](int first) {
    before(first);
    fake_settings().memory_bytes = size_t{200} << 20;
  };
  expect("kept memory is found when needed", run_ranks(options, body));
}

}  // namespace

int main(int count, char** arguments) {
  const auto groups = [] {
    test_two_groups(2, 4, 2);
    test_two_groups(3, 4, 3);
  };
  const auto sends = [] {
    test_many_sends({3, 3, 1, false, "", 6}, 2);
    test_many_sends({8, 8, 1, false, "", 16}, 3);
    test_many_sends({3, 3, 3, false, "", 8}, 2);
  };
  const auto queues = [] {
    test_queues({3, 3, 1, false, "", 6, 6}, 4);  // three callers, three lines
    test_queues({3, 3, 1, false, "", 6, 7}, 0);
    test_queues({3, 1, 3, false, "", 8, 4}, 4);  // one caller, three lines
  };
  const auto products = [] {
    test_products(2, 4);
    test_products(3, 6);
  };
  const auto memory = [] {
    test_closed_beside_a_kernel(0);
    test_closed_beside_a_kernel(2);
    test_after_a_broken_group();
    test_kept_memory_is_found_when_needed();
  };
  return run_suites(count, arguments,
                    {{"groups", groups},
                     {"sends", sends},
                     {"queues", queues},
                     {"products", products},
                     {"given back", test_given_back},
                     {"given back once", test_given_back_once},
                     {"memory", memory}});
}
