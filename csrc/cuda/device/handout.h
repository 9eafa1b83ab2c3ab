// handout.h -- a file descriptor for the ranks of other processes.
#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "../../memory/fd_channel.h"

namespace pycomm::cuda {

// Serves fd to `receivers` peers in a thread, until all came or this object ends. It must live until the
// ranks have exchanged whether they received it.
class Handout {
 public:
  Handout(int fd, int receivers) : fd_(fd) {
    if (receivers > 0) thread_ = std::thread([this, receivers] { serve(receivers); });
  }
  ~Handout() {
    stop_.store(true);
    if (thread_.joinable()) thread_.join();
  }
  Handout(const Handout&) = delete;
  const std::string& name() const { return listener_.name(); }

 private:
  void serve(int receivers) {
    constexpr auto tick = std::chrono::milliseconds(20);
    try {
      while (receivers > 0 && !stop_.load())
        if (const OwnedFd peer = listener_.accept(tick)) receivers -= send_fds(peer.get(), {fd_.get()});
    } catch (const std::exception&) {  // no free descriptor: those who are connected learn of it
      listener_.close();
    }
  }

  OwnedFd fd_;
  Listener listener_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace pycomm::cuda
