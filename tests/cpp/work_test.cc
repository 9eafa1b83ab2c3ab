// work_test.cc -- the end of a work under ThreadSanitizer: whoever sees it done may free it at once, whatever
// the thread that settles it has left to do; and what threads of a group read of each other.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/communicator/work.h"

using namespace pycomm;

namespace {

int passed = 0, failed = 0;

void check(bool right, const char* what) {
  ++(right ? passed : failed);
  if (!right) std::printf("WRONG %s\n", what);
}

class Finished final : public Work {
 public:
  explicit Finished(std::function<void()> finalizer = {}) { finalizer_ = std::move(finalizer); }
  void wait(double) override {
    while (!done()) std::this_thread::yield();
    if (error()) std::rethrow_exception(error());
  }
  bool poll() override { return done(); }
  void help(bool) override {}
  void end(std::exception_ptr error = nullptr) { settle(std::move(error)); }
};

// The waiter frees the work as soon as it is done, as a synchronous call does whose work is on its stack.
void freed_at_once() {
  for (int round = 0; round < 2000; ++round) {
    auto* work = new Finished;
    std::thread settler([work] { work->end(); });
    while (!work->done()) {
    }
    delete work;
    settler.join();
  }
  check(true, "freed at once");
}

// Callbacks that are added while the work is settled run once, and find it done.
void callbacks_run_once() {
  for (int round = 0; round < 2000; ++round) {
    Finished work;
    std::atomic<int> runs{0}, early{0};
    auto callback = [&] {
      runs.fetch_add(1);
      if (!work.done()) early.fetch_add(1);
    };
    work.on_completion(callback);
    std::thread settler([&work] { work.end(); });
    work.on_completion(callback);
    settler.join();
    if (runs != 2 || early != 0) return check(false, "callbacks run once, when the work is done");
  }
  check(true, "callbacks");
}

std::string error_of(Work& work) {
  try {
    work.wait();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// What the user's own tensor refuses is an error of the work, not the end of the thread that settles it.
void finalizer_raises() {
  Finished work([] { throw std::runtime_error("no copy"); });
  std::thread settler([&work] { work.end(); });
  check(error_of(work) == "no copy", "the error of a finalizer is that of the work");
  settler.join();
  bool copied = false;
  Finished failed_work([&copied] { copied = true; });
  failed_work.end(std::make_exception_ptr(std::runtime_error("first")));
  check(error_of(failed_work) == "first" && !copied, "a work that failed has no result to copy");
}

}  // namespace

int main() {
  freed_at_once();
  callbacks_run_once();
  finalizer_raises();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
