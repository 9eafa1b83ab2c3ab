// lanes_test.cc -- csrc/communicator/lanes: each lane runs once in a call, however many lanes the call before
// had, and what any of them throws is thrown to the caller.
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "../../csrc/communicator/lanes.h"

using namespace pycomm;

namespace {

constexpr int most = 5;
int passed = 0, failed = 0;

void check(bool right, const char* what, int detail) {
  ++(right ? passed : failed);
  if (!right) std::printf("FAILED %s (%d)\n", what, detail);
}

// The number of the lane that throws; -1: none.
void run(Lanes& lanes, int count, int throws) {
  std::atomic<int> runs[most + 1] = {};
  std::string caught;
  try {
    lanes.run(count, [&](int lane) {
      ++runs[lane];
      if (lane == throws) throw std::runtime_error("lane " + std::to_string(lane));
    });
  } catch (const std::runtime_error& error) {
    caught = error.what();
  }
  for (int lane = 0; lane <= most; ++lane) check(runs[lane] == (lane < count), "a lane runs once", lane);
  check(caught == (throws < 0 ? "" : "lane " + std::to_string(throws)), "what a lane throws", throws);
}

}  // namespace

int main() {
  Lanes lanes;
  for (int round = 0; round < 50; ++round)
    for (int count : {most, 2, 1, 3, most, 4}) {
      run(lanes, count, -1);
      run(lanes, count, 0);
      run(lanes, count, count - 1);
    }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
