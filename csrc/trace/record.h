// record.h -- the trace of one process: a file of fixed size that the process has mapped.
//
//   | FileHeader 4096 | text: a line per group, name of a span, axis | ring of Records, 64 bytes each |
//
// What is recorded: every operation when it is issued and again, in the same place, when it has ended, also
// on a device (late.h); spans of the layers above (par.step, fused products). The kernel writes the pages of
// a mapped file out whatever becomes of the process, so what was recorded outlives SIGKILL; an operation in
// which the process died stands there as issued and not ended. The space is allocated when the file is made:
// a store to a page for which a full disk has no room would be SIGBUS.
//
// [Note: records without a lock] Any thread of the process records. It takes a ticket (one fetch_add), whose
// place in the ring is ticket % capacity, sets the stamp to 0, writes the other words, and stores the stamp:
// ticket and a checksum of the words. A reader, in this process or long after it, takes a record if its
// stamp names a ticket of that place and the checksum is right. That tells a record in whose middle a
// process died, and one in which two writers met because the ring came round while one of them slept. A ring
// per thread would save the fetch_add (5 ns) and cost memory for each of the threads that a trainer has.
//
// [Note: clocks] Times are CLOCK_MONOTONIC in nanoseconds, equal for all processes of a host, and Python's
// time.monotonic_ns(). The header pairs it with the time of day once. Clocks of several hosts are aligned by
// the reader from the operations themselves (pycomm/trace/clocks.py).
//
// Cost: a load and a branch where tracing is off; docs/trace.md has the figures where it is on. Lost: a
// record per event (issue, arrival, end) is simpler to write and costs three claims and three lines instead
// of one; text formats cost microseconds; perf's and LTTng's rings need a daemon or rights.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pycomm::trace {

inline constexpr uint64_t file_magic = 0x31656361'72746370;  // "pctrace1"
inline constexpr size_t header_bytes = 4096;
inline constexpr size_t text_capacity = 256 << 10;
inline constexpr size_t record_words = 8;
inline constexpr int stamp_bits = 24;  // of the checksum, below the ticket

struct FileHeader {
  uint64_t magic;
  uint64_t capacity;  // records
  uint64_t pid;
  uint64_t monotonic_ns, realtime_ns;  // read at one moment
  char host[64];
  std::atomic<uint64_t> text_bytes;  // complete lines
  std::atomic<uint64_t> text_lost;  // lines that had no room
  std::atomic<uint64_t> closed_ns;  // when the trace was ended; 0: it goes on, or its process died
  alignas(64) std::atomic<uint64_t> tickets;  // records ever begun
};
static_assert(sizeof(FileHeader) <= header_bytes);

// Words of a record, by type:
//
//     operation, message            on a device (late.h)        span
// 0   stamp                         stamp                       stamp
// 1   issued                        issued                      begin
// 2   begun: shown to the peers     its end there was seen      end
// 3   arrived: all peers are here   begin by a device's clock   thread
// 4   ended; 0: not yet             all is in the stream        first argument + 1 (stage)
// 5   waited: since when a caller   end by that clock           second argument + 1 (microbatch)
//     is blocked by it; 0: not
// 6   bytes (48), last (16)         bytes, that clock           third argument + 1 (bucket)
// 7   sequence (32), group (16), kind (4), algorithm (4), type (4), outcome (4)
//                                                               name (32), 24 bits of nothing, type
//
// `last`: the rank that came last; of a message its peer. A time that is not known is 0.
struct Record {
  std::atomic<uint64_t> words[record_words];
};
static_assert(sizeof(Record) == 64);

enum class Type : uint8_t { none, operation, message, span, device };
enum class Outcome : uint8_t { open, done, failed };
inline constexpr uint16_t nobody = 0xffff;
inline constexpr uint32_t no_name = 0xffffffff;  // of a span for whose name there was no room

inline uint64_t checksum(const uint64_t* words) {
  uint64_t sum = 0;
  for (size_t i = 1; i < record_words; ++i) sum = (sum ^ words[i]) * 0x9e3779b97f4a7c15;
  return sum >> (64 - stamp_bits);
}

}  // namespace pycomm::trace
