// survivors_test.cc -- csrc/transport/survivors where a member ends before it has the new group, with a word
// begun or without: the others begin the next round at once. Ranks are threads of this process.
#include <barrier>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/store/store.h"
#include "../../csrc/transport/join.h"
#include "../../csrc/transport/survivors.h"

using namespace pycomm;

namespace {

using Clock = std::chrono::steady_clock;

int passed = 0, failed = 0;

void check(bool right, const std::string& what) {
  ++(right ? passed : failed);
  if (!right) std::printf("FAILED %s\n", what.c_str());
}

// Where survivors.h has it: round, rank and state in one word.
constexpr uint64_t state_of(uint64_t word) { return word & 0xff; }
constexpr uint64_t claimed = 1, members = 2;

// After the verdict a rank ends: at once, or when it has claimed, as give_up() does.
void end(Transport& transport, bool claims) {
  if (!claims) return transport.close();
  std::atomic<uint64_t>& word = transport.survivors();
  uint64_t seen = word.load();
  do check(state_of(seen) == members, "nothing but the verdict so far");
  while (!word.compare_exchange_weak(
      seen, (seen >> 24) << 24 | static_cast<uint64_t>(transport.rank()) << 8 | claimed));
  transport.close();
}

void go_on_without(int who, int world_size, bool claims) {
  constexpr double limit = 10, soon = 1;  // seconds
  LocalStore store;
  std::barrier<> all_have_the_verdict(world_size);
  std::vector<std::thread> ranks;
  std::vector<std::string> wrong(world_size);
  for (int rank = 0; rank < world_size; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        TransportOptions options;
        options.name = "survivors" + std::to_string(who) + (claims ? "claims" : "");
        std::shared_ptr<Transport> transport = Joining(store, rank, world_size, options).transport();
        if (rank == 0) transport->abort("to shrink it");
        while (!transport->broken()) std::this_thread::yield();
        Survivors survivors(transport, {}, false, limit);
        if (survivors.agree().size() != static_cast<size_t>(world_size)) wrong[rank] = "a rank is missing";
        all_have_the_verdict.arrive_and_wait();
        if (rank == who) return end(*transport, claims);
        const auto begun = Clock::now();
        if (survivors.form(true)) wrong[rank] = "formed with a rank that has ended";
        const std::chrono::duration<double> seconds = Clock::now() - begun;
        if (seconds.count() > soon) wrong[rank] = "after " + std::to_string(seconds.count()) + " s";
        const std::vector<int> left = survivors.agree();
        if (left.size() != static_cast<size_t>(world_size - 1)) wrong[rank] = "who has ended is a member";
        if (!survivors.form(true)) wrong[rank] = "the next round was over, too";
      } catch (const std::exception& error) {
        wrong[rank] = error.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 0; rank < world_size; ++rank)
    check(wrong[rank].empty(), "rank " + std::to_string(rank) + ": " + wrong[rank]);
}

}  // namespace

int main() {
  for (int who = 0; who < 3; ++who)
    for (bool claims : {true, false}) go_on_without(who, 3, claims);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
