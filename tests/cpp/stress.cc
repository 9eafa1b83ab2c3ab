// stress.cc -- random collectives and messages among ranks that are threads of this process, for
// ThreadSanitizer and AddressSanitizer.
//
//   stress SEED RANKS ROUNDS REACH ENDING [HOSTS]     REACH: pointer none kernel
//                                                     ENDING: close abort leave timeout
//                                                     HOSTS: of each rank, such as 0101; none: all on one
//
// All ranks draw the same plan from the seed: two groups, synchronous and asynchronous collectives of every
// kind, size and algorithm, calls that do not match, messages with tags and from any source, several threads
// of a rank on one group, groups of a moment (stress_life.h), and an ending.
// Every result is compared with what it must be, and buffers are written again as soon as an operation is
// over, so that a peer that still reads them is seen.
//
// [Note: what ThreadSanitizer sees] It tracks virtual addresses, but each rank maps the group's segment at an
// address of its own: flags and staged data would be unrelated memory to it, and data that go from buffer to
// buffer would seem unordered. mmap and munmap are therefore wrapped (one_mapping.h): all mappings of one
// file are the same mapping here. Then it sees every access and every flag.
//
// Threads reach each other by pointer. Transport::reach_ is set to another value right after the group is
// made, to drive the staged routes and streamed messages as between processes.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "../../csrc/collectives/collectives.h"
#include "../../csrc/collectives/send_recv.h"
#include "join_group.h"
#include "one_mapping.h"
#include "stress_life.h"
#include "stress_values.h"

using namespace pycomm;

// --- a key to Transport::reach_: access is not checked in an explicit instantiation
// -------------------------------------------------------

Transport::Reach& reach_of(Transport& transport);
template <auto member>
struct ReachKey {
  friend Transport::Reach& reach_of(Transport& transport) { return transport.*member; }
};
template struct ReachKey<&Transport::reach_>;

namespace {

using Random = std::mt19937;

struct Settings {
  unsigned seed;
  int ranks, rounds;
  Transport::Reach reach;
  std::string ending, hosts;

  std::shared_ptr<Communicator> join(Store& store, int rank, const TransportOptions& options) const {
    return hosts.empty() ? join_group(store, rank, ranks, options)
                         : join_group_on(hosts, store, rank, options);
  }
};

std::atomic<long> operations{0}, num_messages{0}, wrong{0}, expected_errors{0};

void fail(const std::string& what) {
  if (wrong.fetch_add(1) < 20) std::printf("WRONG %s\n", what.c_str());
}

int pick(Random& random, int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }

size_t pick_count(Random& random) {
  constexpr size_t ugly[] = {0, 1, 7, 10, 11, 15, 16, 17, 63, 64, 65, 1023, 2047, 2048, 2049, 4097};
  switch (pick(random, 4)) {
    case 0: return ugly[pick(random, 16)];
    case 1: return random() % 300;
    case 2: return random() % 9000;
    default: return random() % 60000;
  }
}

// --- one collective
// ------------------------------------------------------------

constexpr OpKind kinds[] = {OpKind::all_reduce, OpKind::reduce,         OpKind::broadcast,
                            OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_to_all,
                            OpKind::gather,     OpKind::scatter,        OpKind::barrier};
constexpr DType dtypes[] = {DType::f64, DType::f32, DType::i32, DType::u8};

// The plan of a call, equal on all ranks. counts[r]: of the part that belongs to rank r; equal ones unless
// uneven.
struct Plan {
  OpKind kind;
  DType dtype;
  ReduceOp reduce_op;
  Algorithm algorithm;
  int root;
  bool uneven = false, in_place, async_op;
  unsigned salt;
  std::vector<size_t> counts;

  Plan(Random& random, int ranks, unsigned salt) : salt(salt) {
    kind = kinds[pick(random, 9)];
    dtype = dtypes[pick(random, 4)];
    reduce_op = pick(random, 2) ? ReduceOp::sum : ReduceOp::max;
    do algorithm = static_cast<Algorithm>(pick(random, 6));
    while (!has_algorithm(kind, algorithm));
    root = pick(random, ranks);
    in_place = pick(random, 2);
    async_op = pick(random, 2);
    counts.assign(ranks, pick_count(random));
    if ((kind == OpKind::all_gather || kind == OpKind::reduce_scatter) && pick(random, 3) == 0) {
      uneven = true;
      for (size_t& count : counts) count = pick_count(random);
    }
  }
  bool splits_input() const {
    return kind == OpKind::reduce_scatter || kind == OpKind::all_to_all || kind == OpKind::scatter;
  }
  bool joins_output() const {
    return kind == OpKind::all_gather || kind == OpKind::all_to_all || kind == OpKind::gather;
  }
};

class Run {
 public:
  // Buffers that live as long as the rank: what one operation leaves is overwritten by the next.
  struct Buffers {
    std::vector<std::byte> in, out;
  };

  Run(Communicator& comm, const Plan& plan, Buffers& buffers)
      : comm_(comm), plan_(plan), buffers_(buffers), rank_(comm.rank()), ranks_(comm.world_size()) {
    const size_t item = size_of(plan.dtype);
    size_t total = 0;
    for (size_t count : plan.counts) total += count;
    const size_t own = plan.counts[rank_];
    in_count_ = plan.splits_input() ? total : own;
    out_count_ = plan.joins_output() ? total : own;
    grow(buffers.in, in_count_ * item);
    grow(buffers.out, out_count_ * item);
    for (size_t i = 0; i < in_count_; ++i) put(in(), plan.dtype, i, value(plan.salt, rank_, i));
    for (size_t i = 0; i < out_count_; ++i) put(buffers.out.data(), plan.dtype, i, 99);
    const bool can_be_in_place =
        plan.kind == OpKind::all_reduce || plan.kind == OpKind::reduce || plan.kind == OpKind::broadcast;
    in_place_ = can_be_in_place && (plan.in_place || plan.kind == OpKind::broadcast);
    task_ = std::make_shared<CollectiveTask>(comm, make(total));
    operations.fetch_add(1, std::memory_order_relaxed);
  }

  void start() { plan_.async_op ? comm_.issue(task_) : comm_.run(*task_); }

  // Waits for what start() has issued, and compares.
  void finish(Random& random) {
    if (plan_.async_op) {
      if (pick(random, 4) == 0) task_->help();
      for (int i = pick(random, 3) * 50; i > 0 && !task_->poll(); --i) std::this_thread::yield();
      task_->wait();
    }
    if (plan_.kind == OpKind::barrier || !has_result()) return;
    size_t part = 0, base = 0;
    for (size_t i = 0; i < out_count_; ++i) {
      while (plan_.joins_output() && i - base >= plan_.counts[part]) base += plan_.counts[part++];
      const double expected = oracle(i, static_cast<int>(part), i - base), found = get(out(), plan_.dtype, i);
      if (expected == found) continue;
      return fail(std::string(to_string(plan_.kind)) + " " + to_string(plan_.algorithm) + " rank " +
                  std::to_string(rank_) + " element " + std::to_string(i) + " of " +
                  std::to_string(out_count_) + ": " + std::to_string(found) + ", expected " +
                  std::to_string(expected));
    }
  }

 private:
  static void grow(std::vector<std::byte>& buffer, size_t nbytes) {
    if (buffer.size() < nbytes) buffer.resize(nbytes);
  }
  std::byte* in() { return buffers_.in.data(); }
  std::byte* out() { return in_place_ ? in() : buffers_.out.data(); }
  bool has_result() const {
    return rank_ == plan_.root || (plan_.kind != OpKind::reduce && plan_.kind != OpKind::gather);
  }

  std::vector<Part> cut(std::byte* data) const {
    std::vector<Part> parts;
    for (size_t count : plan_.counts) {
      parts.push_back({data, count});
      data += count * size_of(plan_.dtype);
    }
    return parts;
  }

  Op make(size_t total) {
    Op op;
    op.kind = plan_.kind;
    op.dtype = plan_.dtype;
    op.reduce_op = plan_.kind == OpKind::reduce_scatter || plan_.kind == OpKind::reduce ||
                           plan_.kind == OpKind::all_reduce
                       ? plan_.reduce_op
                       : ReduceOp::sum;
    op.algorithm = plan_.algorithm;
    op.uneven = plan_.uneven;
    op.count = plan_.uneven ? total : plan_.counts[0];
    const bool is_root = rank_ == plan_.root;
    switch (plan_.kind) {
      case OpKind::barrier: op.count = 0; return op;
      case OpKind::reduce:
        op.root = plan_.root;
        op.in = in();
        if (is_root) op.out = out();
        return op;
      case OpKind::broadcast:
        op.root = plan_.root;
        if (is_root) op.in = in();
        if (!is_root) op.out = in();
        return op;
      case OpKind::gather:
        op.root = plan_.root;
        op.in = in();
        if (is_root) op.out_parts = cut(out());
        return op;
      case OpKind::scatter:
        op.root = plan_.root;
        op.out = out();
        if (is_root) op.in_parts = cut(in());
        return op;
      case OpKind::all_gather:
        op.in = in();
        op.out_parts = cut(out());
        return op;
      case OpKind::reduce_scatter:
        op.in_parts = cut(in());
        op.out = out();
        return op;
      case OpKind::all_to_all:
        op.in_parts = cut(in());
        op.out_parts = cut(out());
        return op;
      default:
        op.in = in();
        op.out = out();
        return op;
    }
  }

  // What element i of the output must be; it is element `within` of part `part` where the output is joined
  // from parts.
  double oracle(size_t i, int part, size_t within) const {
    size_t offset = 0;  // of this rank's part in every input that is split
    for (int p = 0; p < rank_; ++p) offset += plan_.counts[p];
    auto reduced = [&](size_t at) {
      unsigned sum = 0, most = 0;
      for (int p = 0; p < ranks_; ++p) {
        sum += value(plan_.salt, p, at);
        most = std::max(most, value(plan_.salt, p, at));
      }
      return plan_.reduce_op == ReduceOp::sum ? sum : most;
    };
    switch (plan_.kind) {
      case OpKind::broadcast: return value(plan_.salt, plan_.root, i);
      case OpKind::scatter: return value(plan_.salt, plan_.root, offset + i);
      case OpKind::reduce_scatter: return reduced(offset + i);
      case OpKind::all_to_all: return value(plan_.salt, part, offset + within);
      case OpKind::all_gather:
      case OpKind::gather: return value(plan_.salt, part, within);
      default: return reduced(i);
    }
  }

  Communicator& comm_;
  Plan plan_;
  Buffers& buffers_;
  int rank_, ranks_;
  size_t in_count_ = 0, out_count_ = 0;
  bool in_place_ = false;
  std::shared_ptr<CollectiveTask> task_;
};

// --- messages
// ------------------------------------------------------------

// Posts this rank's share of a random set of messages in an order of its own, runs something else meanwhile,
// then waits and compares.
void exchange(Communicator& comm, Random& plan, Random& own, unsigned salt,
              const std::function<void()>& meanwhile) {
  Messages& messages = messages_of(comm);
  struct Post {
    bool sending;
    int src, dst, tag;
    size_t count;
    bool any;
    std::vector<std::byte> data;
    MessageWorkPtr message;
  };
  std::vector<Post> posts;
  for (int m = 0, num = 1 + pick(plan, 24); m < num; ++m) {
    const int src = pick(plan, comm.world_size()), dst = pick(plan, comm.world_size());
    const size_t count =
        pick(plan, 3) ? pick_count(plan) : pick_count(plan) % 240;  // i32: a third fits a slot
    const bool any = pick(plan, 3) == 0;
    if (src == dst || (src != comm.rank() && dst != comm.rank())) continue;
    const int tag = static_cast<int>(salt) + m;  // unique: a rank may be ahead by one exchange, and a recv
                                                 // from any source must not take its messages
    posts.push_back(
        {src == comm.rank(), src, dst, tag, count, any, std::vector<std::byte>(count * 4 + 1), nullptr});
  }
  std::shuffle(posts.begin(), posts.end(), own);
  for (Post& post : posts) {
    for (size_t i = 0; i < post.count; ++i)
      put(post.data.data(), DType::i32, i, post.sending ? value(post.tag, post.src, i) : 99);
    const int peer = post.sending ? post.dst : post.any ? any_source : post.src;
    const MessageSpec spec{DType::i32, post.count, peer, post.tag, 0};
    post.message =
        post.sending ? messages.send(post.data.data(), spec, {}) : messages.recv(post.data.data(), spec, {});
    post.message->help();  // as the front ends do: this rank may turn to something else
  }
  meanwhile();
  std::shuffle(posts.begin(), posts.end(), own);
  for (Post& post : posts) {
    for (int i = pick(own, 2) * 50; i > 0 && !post.message->poll(); --i) std::this_thread::yield();
    post.message->wait();
    num_messages.fetch_add(1, std::memory_order_relaxed);
    if (post.sending) continue;
    if (post.message->source() != post.src) fail("source of message " + std::to_string(post.tag));
    for (size_t i = 0; i < post.count; ++i)
      if (get(post.data.data(), DType::i32, i) != value(post.tag, post.src, i))
        return fail("message " + std::to_string(post.tag));
  }
}

// --- one rank
// ------------------------------------------------------------

// Runs `body`, which must throw one of these kinds.
template <class Body>
void expect(std::initializer_list<ErrorKind> kinds, const char* what, const Body& body) {
  try {
    body();
    fail(std::string(what) + ": no error");
  } catch (const CommError& error) {
    if (std::find(kinds.begin(), kinds.end(), error.kind) == kinds.end())
      return fail(std::string(what) + ": " + error.what());
    expected_errors.fetch_add(1, std::memory_order_relaxed);
  }
}

// A call to which one rank brings another size, operation or dtype.
void mismatch(Communicator& comm, Random& plan, unsigned salt, Run::Buffers& buffers) {
  Plan call(plan, comm.world_size(), salt);
  const int odd = pick(plan, comm.world_size());
  const bool other_kind = pick(plan, 2);
  if (call.kind == OpKind::barrier) return;
  call.uneven = false;
  call.counts.assign(comm.world_size(), call.counts[0]);
  if (comm.rank() == odd) {
    if (other_kind) call.kind = call.kind == OpKind::all_gather ? OpKind::gather : OpKind::all_gather;
    else
      for (size_t& count : call.counts) count += 1 + salt % 5000;
    call.algorithm = Algorithm::automatic;
  }
  expect({ErrorKind::mismatch}, "mismatch", [&] {
    Random none(1);
    Run run(comm, call, buffers);
    run.start();
    run.finish(none);
  });
}

void end(const Settings& settings, Communicator& comm, Communicator& other) {
  float x = 1;
  auto all_reduce = [&] {
    Op op;
    op.kind = OpKind::all_reduce;
    op.dtype = DType::f32;
    op.in = op.out = reinterpret_cast<std::byte*>(&x);
    op.count = 1;
    run(comm, std::move(op));
  };
  Op barrier;
  barrier.kind = OpKind::barrier;
  run(other, std::move(barrier));  // everybody is done with the plan: what follows may interrupt nothing else
  const bool last = comm.rank() == comm.world_size() - 1;
  if (settings.ending == "abort") {
    std::thread aborter([&] {
      if (last) comm.abort("stress");
    });
    if (!last) expect({ErrorKind::aborted}, "abort", all_reduce);
    aborter.join();
    expect({ErrorKind::aborted}, "after abort", all_reduce);
  } else if (settings.ending == "leave") {
    std::thread leaver([&] { comm.close(); });
    if (last) leaver.join();
    if (!last) expect({ErrorKind::aborted, ErrorKind::peer}, "leave", all_reduce);
    if (!last) leaver.join();
  } else if (settings.ending == "timeout") {
    comm.transport().set_timeout(0.3);
    if (last) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    expect({ErrorKind::timeout}, "timeout", all_reduce);
  }
  other.close();
}

// What a thread may ask of a group that others use: torch sets a timeout, a callback lets go of a reference.
std::jthread look_on(std::shared_ptr<Communicator> (&comms)[2]) {
  return std::jthread([&comms](std::stop_token over) {
    for (; !over.stop_requested(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      for (auto& comm : comms) {
        comm->transport().set_timeout(20);
        if (comm->on_own_thread()) fail("an onlooker is taken for the worker");
      }
  });
}

void rank_body(const Settings& settings, Store& store, int rank) {
  Random plan(settings.seed), own(settings.seed * 1000 + rank);
  TransportOptions options;
  options.timeout = 20;
  options.staging_bytes = size_t{64 << 10} << pick(plan, 5);
  options.threads = 1 + pick(plan, 2);
  std::shared_ptr<Communicator> comms[2];
  Run::Buffers buffers[2][5];
  for (int g = 0; g < 2; ++g) {
    options.name = "group" + std::to_string(g);
    comms[g] = settings.join(store, rank, options);
    reach_of(comms[g]->transport()) = settings.reach;
  }
  std::jthread onlooker = look_on(comms);
  for (int round = 0; round < settings.rounds; ++round) {
    const int g = pick(plan, 2);
    const unsigned salt = settings.seed + round * 100;
    if (pick(own, 20) == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // others go to sleep in their waits
    auto collectives = [&] {
      std::vector<std::pair<int, std::unique_ptr<Run>>> runs;
      for (int i = 0, num = 1 + pick(plan, 5); i < num; ++i) {
        Plan call(plan, settings.ranks, salt + i);
        const int group = pick(plan, 4) ? g : 1 - g;
        runs.emplace_back(group, std::make_unique<Run>(*comms[group], call, buffers[group][i]));
        runs.back().second->start();
      }
      std::shuffle(runs.begin(), runs.end(), own);
      for (auto& [group, run] : runs) run->finish(own);
    };
    options.name = "moment" + std::to_string(round);
    switch (pick(plan, 10)) {
      case 0: mismatch(*comms[g], plan, salt, buffers[g][0]); break;
      case 1:
      case 2: exchange(*comms[g], plan, own, salt, collectives); break;
      case 3: exchange(*comms[g], plan, own, salt, [] {}); break;
      case 4: life::several_threads(*comms[g], static_cast<int>(salt), fail); break;
      case 5: life::short_life(settings.join(store, rank, options), fail); break;
      default: collectives();
    }
  }
  onlooker = {};  // ends it
  end(settings, *comms[0], *comms[1]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6 || argc > 7)
    return std::puts("usage: stress SEED RANKS ROUNDS pointer|none|kernel close|abort|leave|timeout [HOSTS]"),
           2;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string reach = argv[4];
  const Settings settings{static_cast<unsigned>(std::atoi(argv[1])),
                          std::atoi(argv[2]),
                          std::atoi(argv[3]),
                          reach == "pointer"  ? Transport::Reach::pointer
                          : reach == "kernel" ? Transport::Reach::kernel
                                              : Transport::Reach::none,
                          argv[5],
                          argc > 6 ? argv[6] : ""};
  LocalStore store;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < settings.ranks; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        rank_body(settings, store, rank);
      } catch (const std::exception& error) {
        fail(std::string("rank ") + std::to_string(rank) + " threw " + error.what());
      }
    });
  for (auto& rank : ranks) rank.join();
  std::printf("%ld collectives, %ld messages, %ld expected errors, %ld wrong\n", operations.load(),
              num_messages.load(), expected_errors.load(), wrong.load());
  return wrong.load() != 0;
}
