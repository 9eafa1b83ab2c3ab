// hand_off_test.cc -- csrc/transport/hand_off: all ranks have the same answer for an operation, whatever the
// measurement and however late a rank is. Ranks are threads. An operation publishes a header in a slot of
// layout.h and waits for all headers. kernel_copies_fast() is replaced here, so the answers change at random.
#include "../../csrc/transport/hand_off.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/transport/kernel_copy.h"

using namespace pycomm;

namespace {

int passed = 0, failed = 0;

void check(bool right, const std::string& what) {
  ++(right ? passed : failed);
  if (!right) std::printf("WRONG %s\n", what.c_str());
}

enum class Kernel { at_random, slow, fast };
std::atomic<Kernel> kernel{Kernel::at_random};

// A rank's part of a group whose memory is the file.
struct Rank {
  Rank(int file, int rank, int world_size, const HandOff::Pace& pace)
      : identity{"hands", rank, world_size, {}},
        memory(std::make_unique<SharedMemory>(file), Layout::make(world_size, 1 << 20, 1)),
        health(identity, memory, {}),
        waiting(identity, memory, health, world_size),
        hand_off(identity, memory, waiting, pace) {}

  bool published(int peer, uint64_t s) const {
    return memory.slot(peer, s).key.load(std::memory_order_acquire) == s;
  }
  void publish(uint64_t s) {
    memory.slot(identity.rank, s).key.store(s, std::memory_order_release);
    waiting.notify_if_last([&](int p) { return published(p, s); });
  }
  void match(uint64_t s) {
    waiting.wait_all([&](int p) { return published(p, s); }, scope());
  }

  const Identity identity;
  GroupMemory memory;
  Health health;
  Waiting waiting;
  HandOff hand_off;
  WaitScope scope() const { return scope_of({}, 60); }  // of one wait
};

template <class Body>
void on_ranks(int world_size, const HandOff::Pace& pace, const Body& body) {
  const OwnedFd file = create_memory_file();
  resize_memory_file(file.get(), Layout::make(world_size, 1 << 20, 1).total());
  std::vector<std::thread> threads;
  std::atomic<int> there{0};
  for (int r = 0; r < world_size; ++r)
    threads.emplace_back([&, r] {
      Rank rank(file.get(), r, world_size, pace);
      if (r == 0) rank.hand_off.guess(false);
      ++there;
      while (there < world_size) std::this_thread::yield();
      body(rank);
    });
  for (std::thread& thread : threads) thread.join();
}

void be_late(std::minstd_rand& random) {
  const unsigned how = random() % 400;
  if (how == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // longer than rank 0's patience
  else if (how < 40) std::this_thread::yield();
  else
    for (unsigned i = 0; i < how % 64; ++i) cpu_relax();
}

void one_answer(int world_size, int operations) {
  std::vector<std::vector<char>> answers(world_size, std::vector<char>(operations));
  std::atomic<int> changed_inside{0}, measures{0};
  const double never_far = 1;  // wherever the cores are: only the kernel's copies change the answer
  on_ranks(world_size, {HandOff::Duration(0), std::chrono::seconds(1), never_far}, [&](Rank& rank) {
    std::minstd_rand random(1 + rank.identity.rank);
    rank.hand_off.begin(rank.scope());
    for (int s = 1; s < operations; ++s) {
      const bool large = s * 2654435761u >> 28 != 0;  // the same on all ranks
      if (large) rank.hand_off.before(s);
      const bool planned = rank.hand_off.kernel_ahead(s);
      rank.publish(s);
      be_late(random);
      if (large && rank.hand_off.is_due(s)) {
        rank.match(s);
        be_late(random);
        rank.hand_off.measure(s, rank.scope());
        measures += rank.identity.rank == 0;
      }
      be_late(random);
      answers[rank.identity.rank][s] = rank.hand_off.kernel_ahead(s);
      changed_inside += planned != rank.hand_off.kernel_ahead(s);
      rank.match(s);
    }
  });
  int differ = 0, changes = 0;
  for (int s = 1; s < operations; ++s) {
    for (int r = 1; r < world_size; ++r) differ += answers[r][s] != answers[0][s];
    changes += answers[0][s] != answers[0][s - 1];
  }
  const std::string ranks = std::to_string(world_size) + " ranks: ";
  check(differ == 0, ranks + std::to_string(differ) + " answers differ between ranks");
  check(changed_inside == 0, ranks + std::to_string(changed_inside) + " changed inside of an operation");
  check(measures > operations / 10, ranks + std::to_string(measures) + " measures");
  // Three ranks may have two cores, and then hardly any measure ends in time.
  check(world_size > 2 || changes > 10, ranks + std::to_string(changes) + " changes");
}

// What was measured, and what stays where a rank does not answer in time.
void what_is_told() {
  kernel = Kernel::slow;
  on_ranks(2, {std::chrono::hours(1), std::chrono::microseconds(20)}, [&](Rank& rank) {
    HandOff& hand_off = rank.hand_off;
    check(hand_off.seconds() < 0, "nothing yet");
    hand_off.begin(rank.scope());
    rank.publish(1);
    rank.match(1);
    const double seconds = hand_off.seconds();
    check(seconds < 0 || (1e-9 < seconds && seconds < 20e-6), "a time");
    check(seconds < 0 || hand_off.kernel_ahead(2) == is_far(seconds, false), "and what follows");
    hand_off.before(1);
    check(!hand_off.is_due(2), "not again within the hour");
    rank.publish(2);
    rank.match(2);
    const bool before = hand_off.kernel_ahead(2);
    if (rank.identity.rank == 0) {
      hand_off.measure(2, rank.scope());  // the other rank comes after it
      rank.publish(3);
    } else {
      while (!rank.published(0, 3)) std::this_thread::yield();
      hand_off.measure(2, rank.scope());
      rank.publish(3);
    }
    rank.match(3);
    check(hand_off.seconds() == seconds, "unchanged, because no rank answered");
    check(hand_off.kernel_ahead(3) == before, "and the same answer");
  });
}

// What is measured as the group is made, where a rank answers in time.
void first_operation() {
  std::atomic<int> guessed{0};
  for (int group = 0; group < 20; ++group) {
    kernel = Kernel::slow;
    on_ranks(2, {std::chrono::hours(1), std::chrono::seconds(1)}, [&](Rank& rank) {
      kernel = Kernel::fast;  // not as it was guessed
      rank.hand_off.begin(rank.scope());
      guessed += rank.hand_off.seconds() >= 0 && !rank.hand_off.kernel_ahead(1);
    });
  }
  check(guessed == 0, std::to_string(guessed) + " ranks take the guess in the first operation");
}

void words() {
  check(is_far(-1, true) && !is_far(-1, false), "unknown: the other answer");
  check(!is_far(30e-9, true) && is_far(200e-9, false), "one cache, two caches");
  const double seconds = hand_off_between_threads();
  check(seconds < 0 || (1e-9 < seconds && seconds < 20e-6), "between threads");
}

}  // namespace

namespace pycomm {

bool kernel_copies_fast() {
  static std::minstd_rand random(7);
  return kernel == Kernel::at_random ? (random() & 4) != 0 : kernel == Kernel::fast;
}
bool kernel_admits_peers() { return true; }
bool kernel_reaches(const void*, size_t) { return true; }

}  // namespace pycomm

int main() {
  words();
  one_answer(2, 10000);
  one_answer(3, 1000);
  what_is_told();
  first_operation();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
