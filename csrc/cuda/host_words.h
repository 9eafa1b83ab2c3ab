// host_words.h -- what the host and the device both address, in host memory.
//
//   ErrorWord      of this rank alone: kernels write what went wrong, the host writes `stop`
//   sync words     of all ranks: how they order themselves by stream memory operations (sync_words.h)
//   busy words     of all ranks, by rank and line: which operation is under way, in stream order.
//                  Its sequence number and kind, 0 for none
//   streams        of all ranks: the stream that each used last, where ranks are threads of one process
//
// What is of all ranks lies in rank 0's part of memory that all have mapped; groups that need none of it
// (resident, several processes, a device each) do not allocate it. All words are atomic, so no lock is needed
// here.
#pragma once

#include <atomic>

#include "../communicator/registered.h"
#include "kernels/layout.h"
#include "setup.h"

namespace pycomm::cuda {

class HostWords {
 public:
  explicit HostWords(const Setup& setup) : setup_(setup) {}

  // Collective: allocates what all ranks share, if this group needs it.
  void share();
  // Makes the error word, and both addressable by the device. Throws.
  void make();
  bool made() const { return error_ != nullptr; }
  void give_back();  // of what was made; nothing may run on the device any more

  ErrorWord& error() const { return *error_; }
  ErrorWord* error_on_device() const;  // throws

  std::atomic<uint32_t>& word(size_t index) const;
  DevicePtr word_on_device(size_t index) const { return on_device_ + index * sizeof(uint32_t); }
  size_t busy_word(int line) const;  // its index
  std::atomic<uint64_t>& stream_in_use(int rank) const;

  // Every wait of a kernel ends at `stop`, every wait of a stream at a 1 in its word.
  void stop_device() const;

 private:
  size_t num_words() const;
  size_t nbytes() const;

  const Setup& setup_;
  ErrorWord* error_ = nullptr;
  RegisteredBuffer shared_{};
  DevicePtr on_device_ = 0;  // of shared_; 0: the device does not address it
};

}  // namespace pycomm::cuda
