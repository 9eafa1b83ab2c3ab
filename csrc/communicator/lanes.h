// lanes.h -- the threads that run the lanes of an operation beside the one that runs the operation.
//
// They start with the first operation that is cut into lanes and stay for the next: to start a thread takes
// longer than to copy a megabyte. The lanes of an operation are agreed among the ranks, their number is not
// this rank's to change; but a lane waits for the same lane of its peers only. So a lane that has no thread
// of its own (the system refuses one more) runs in the caller, after lane 0.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pycomm {

class Lanes {
 public:
  ~Lanes();

  // Runs body(0) ... body(count-1); rethrows the first error. One call at a time.
  void run(int count, const std::function<void(int)>& body);

 private:
  int threads_for(int count);
  void loop(int lane);
  void run_lane(int lane);

  std::mutex mutex_;
  std::condition_variable begin_, end_;
  std::vector<std::thread> threads_;  // of lanes 1, 2, ...
  const std::function<void(int)>* body_ = nullptr;
  std::vector<std::exception_ptr> errors_;
  uint64_t round_ = 0;
  int count_ = 0;    // lanes of this round
  int running_ = 0;  // threads still at this round
  bool stop_ = false;
};

}  // namespace pycomm
