// recorder.h -- writes the trace of this process; see record.h.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "../types.h"
#include "times.h"

namespace pycomm::trace {

// What an operation is, for its record.
struct Subject {
  OpKind kind = OpKind::none;
  uint64_t nbytes = 0;
  uint64_t sequence = 0;
  uint8_t algorithm = 0;
  Type type = Type::operation;
};

// A group as this process knows it in its traces: a number in each of them.
struct GroupName {
  std::string name;
  int rank = 0, world_size = 1;
  std::string host;  // of the part of a group that spans hosts; empty: all of it
  // Of the processes of its ranks, equal on all of them: a group that was made anew by others after a death
  // may have the same name. 0: not known.
  uint64_t members = 0;
  std::atomic<uint64_t> number{0};  // generation << 32 | number + 1
};

struct Span {
  uint32_t name;
  uint64_t begin, end;
  int64_t arguments[3];  // -1: none
};

class Recorder {
 public:
  // The one of this process; in a forked child a new one, which records nothing.
  static Recorder& instance();

  // Begins to record into a new file in `folder`, or joins those who record there already: each begin() has
  // its end(). Throws std::system_error where there is no room or no right, std::invalid_argument while this
  // process records into another folder.
  void begin(const std::string& folder, size_t ring_bytes);
  void end();
  bool active() const { return state.load(std::memory_order_relaxed) & recording; }
  std::string folder();

  void issued(Times& times, const Subject& subject, GroupName& group);
  void ended(Times& times, const Subject& subject, GroupName& group, bool failed);
  void span(const Span& span);
  std::optional<uint32_t> name(const std::string& text);  // of spans, for the trace that goes on
  void axis(const std::string& group, const std::string& axis);
  uint32_t generation() const { return generation_.load(std::memory_order_relaxed); }

 private:
  struct File;
  class Use;

  void put(File& file, uint64_t ticket, uint64_t (&words)[record_words]);
  uint64_t number_of(File& file, GroupName& group);
  bool line(File& file, const std::string& text);  // false: there is no room

  std::mutex mutex_;
  std::atomic<File*> file_{nullptr};
  std::atomic<uint32_t> users_{0};  // threads that may be writing
  std::atomic<uint32_t> generation_{0};
  int begun_ = 0;
  std::string folder_;
};

}  // namespace pycomm::trace
