// recorder.cc -- see recorder.h.
#include "recorder.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../memory/owned_fd.h"
#include "late.h"

namespace pycomm::trace {

namespace {

constexpr size_t least_ring = 64 << 10;

uint64_t clock_ns(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

std::string in_quotes(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return out + '"';
}

// With a part of the boot id: hosts of one name are told apart.
std::string host_name() {
  char name[48] = {};
  ::gethostname(name, sizeof(name) - 1);
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return name + ("#" + boot.substr(0, 8));
}

struct LateOnes {
  mutable std::mutex mutex;
  std::vector<Late*> all;
};
std::atomic<LateOnes*> late_ones{new LateOnes};  // a forked child leaves its parent's alone, too

}  // namespace

void add(Late& late) {
  Recorder::instance();  // prepares forks
  LateOnes& ones = *late_ones.load();
  std::lock_guard lock(ones.mutex);
  ones.all.push_back(&late);
}

void remove(Late& late) {
  LateOnes& ones = *late_ones.load();
  std::lock_guard lock(ones.mutex);
  std::erase(ones.all, &late);
}

struct Recorder::File {
  std::byte* data;
  size_t nbytes;
  uint64_t mask;  // capacity - 1, a power of two
  uint32_t generation;
  std::mutex text;  // of what follows, and of the text
  uint32_t groups = 0;
  std::map<std::string, uint32_t> names;

  FileHeader& header() const { return *reinterpret_cast<FileHeader*>(data); }
  Record& record(uint64_t ticket) const {
    auto* ring = reinterpret_cast<Record*>(data + header_bytes + text_capacity);
    return ring[ticket & mask];
  }
  ~File() { ::munmap(data, nbytes); }
};

// A thread that may write: end() waits for it before the memory goes.
class Recorder::Use {
 public:
  explicit Use(Recorder& recorder) : recorder_(recorder) {
    recorder_.users_.fetch_add(1);  // sequentially consistent, as end()'s exchange: one of the two sees it
    file_ = recorder_.file_.load();
  }
  ~Use() { recorder_.users_.fetch_sub(1, std::memory_order_release); }
  File* operator->() const { return file_; }
  File& operator*() const { return *file_; }
  explicit operator bool() const { return file_ != nullptr; }

 private:
  Recorder& recorder_;
  File* file_;
};

// A forked child leaves all of its parent's alone, locked or not: its records would go to the parent's file.
Recorder& Recorder::instance() {
  static std::atomic<Recorder*> current = [] {
    ::pthread_atfork(nullptr, nullptr, [] {
      state.store(state.load() & ~recording);
      current.store(new Recorder);
      late_ones.store(new LateOnes);
      current.load()->generation_ = 1u << 31 | static_cast<uint32_t>(::getpid());
    });
    return new Recorder;
  }();
  return *current.load(std::memory_order_relaxed);
}

void Recorder::begin(const std::string& folder, size_t ring_bytes) {
  std::lock_guard lock(mutex_);
  if (begun_ > 0) {
    if (folder != folder_)
      throw std::invalid_argument("pycomm: this process writes its trace into " + folder_ +
                                  " already; end that before one into " + folder + " begins");
    ++begun_;
    return;
  }
  const uint64_t capacity = std::bit_floor(std::max(ring_bytes, least_ring) / sizeof(Record));
  const uint32_t generation = generation_.load() + 1;
  const std::string host = host_name();
  const size_t nbytes = header_bytes + text_capacity + capacity * sizeof(Record);
  const std::string path = folder + "/" + host + "-" + std::to_string(::getpid()) + "-" +
                           std::to_string(clock_ns(CLOCK_REALTIME)) + ".pytrace";
  const OwnedFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) throw_errno(path.c_str());
  const int full = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(nbytes));
  void* data = full ? MAP_FAILED : ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) {
    const int error = full ? full : errno;
    ::unlink(path.c_str());
    throw_errno(path.c_str(), error);
  }
  auto file = std::make_unique<File>();
  file->data = static_cast<std::byte*>(data);
  file->nbytes = nbytes;
  file->mask = capacity - 1;
  file->generation = generation;
  FileHeader& header = file->header();
  header.capacity = capacity;
  header.pid = static_cast<uint64_t>(::getpid());
  header.monotonic_ns = clock_ns(CLOCK_MONOTONIC);
  header.realtime_ns = clock_ns(CLOCK_REALTIME);
  std::memcpy(header.host, host.c_str(), std::min(host.size(), sizeof(header.host) - 1));
  header.magic = file_magic;
  folder_ = folder;
  begun_ = 1;
  generation_.store(generation);
  file_.store(file.release());
  state.fetch_or(recording);
}

void Recorder::end() {
  std::lock_guard lock(mutex_);
  if (begun_ == 0 || --begun_ > 0) return;
  {
    const LateOnes& ones = *late_ones.load();
    std::lock_guard late(ones.mutex);
    for (Late* each : ones.all) each->late();
  }
  state.fetch_and(~recording);
  const std::unique_ptr<File> file(file_.exchange(nullptr));
  while (users_.load() != 0) std::this_thread::yield();
  file->header().closed_ns.store(clock_ns(CLOCK_MONOTONIC));
}

std::string Recorder::folder() {
  std::lock_guard lock(mutex_);
  return begun_ > 0 ? folder_ : "";
}

// [Note: records without a lock]
void Recorder::put(File& file, uint64_t ticket, uint64_t (&words)[record_words]) {
  Record& record = file.record(ticket);
  record.words[0].store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 1; i < record_words; ++i) record.words[i].store(words[i], std::memory_order_relaxed);
  record.words[0].store((ticket + 1) << stamp_bits | checksum(words), std::memory_order_release);
}

namespace {

void fill(uint64_t (&words)[record_words], const Times& times, const Subject& subject, uint64_t group,
          Outcome outcome) {
  words[1] = times.issued;
  words[2] = times.begun;
  words[3] = times.arrived;
  words[4] = times.ended;
  words[5] = times.waited;
  words[6] = (subject.nbytes & ((uint64_t{1} << 48) - 1)) | uint64_t{times.last} << 48;
  words[7] = (subject.sequence & 0xffffffff) | group << 32 | static_cast<uint64_t>(subject.kind) << 48 |
             uint64_t{subject.algorithm} << 52 | static_cast<uint64_t>(subject.type) << 56 |
             static_cast<uint64_t>(outcome) << 60;
}

}  // namespace

void Recorder::issued(Times& times, const Subject& subject, GroupName& group) {
  const Use file(*this);
  if (!file) return;
  const uint64_t ticket = file->header().tickets.fetch_add(1, std::memory_order_relaxed);
  uint64_t words[record_words];
  fill(words, times, subject, number_of(*file, group), Outcome::open);
  put(*file, ticket, words);
  times.ticket = ticket + 1;
  times.generation = file->generation;
}

void Recorder::ended(Times& times, const Subject& subject, GroupName& group, bool failed) {
  const Use file(*this);
  if (!file || times.ticket == 0 || times.generation != file->generation) return;
  uint64_t ticket = times.ticket - 1;
  // The ring has come round since the issue: the record is another's now.
  if (file->record(ticket).words[0].load(std::memory_order_relaxed) >> stamp_bits != times.ticket)
    times.ticket = (ticket = file->header().tickets.fetch_add(1, std::memory_order_relaxed)) + 1;
  uint64_t words[record_words];
  fill(words, times, subject, number_of(*file, group), failed ? Outcome::failed : Outcome::done);
  put(*file, ticket, words);
}

void Recorder::span(const Span& span) {
  const Use file(*this);
  if (!file) return;
  thread_local const auto thread = static_cast<uint64_t>(::syscall(SYS_gettid));
  const uint64_t ticket = file->header().tickets.fetch_add(1, std::memory_order_relaxed);
  uint64_t words[record_words] = {0, span.begin, span.end, thread};
  for (int i = 0; i < 3; ++i) words[4 + i] = static_cast<uint64_t>(span.arguments[i] + 1);
  words[7] = span.name | static_cast<uint64_t>(Type::span) << 56;
  put(*file, ticket, words);
}

std::optional<uint32_t> Recorder::name(const std::string& text) {
  const Use file(*this);
  if (!file) return std::nullopt;
  std::lock_guard lock(file->text);
  const auto [found, is_new] = file->names.try_emplace(text, static_cast<uint32_t>(file->names.size()));
  const uint32_t number = found->second;
  if (is_new &&
      !line(*file, "{\"span\": " + std::to_string(number) + ", \"name\": " + in_quotes(text) + "}")) {
    file->names.erase(found);  // names without end, as of a span with a number in its name
    return no_name;
  }
  return number;
}

void Recorder::axis(const std::string& group, const std::string& axis) {
  const Use file(*this);
  if (!file) return;
  std::lock_guard lock(file->text);
  line(*file, "{\"axis\": " + in_quotes(axis) + ", \"of\": " + in_quotes(group) + "}");
}

uint64_t Recorder::number_of(File& file, GroupName& group) {
  uint64_t known = group.number.load(std::memory_order_acquire);
  if (known >> 32 == file.generation) return (known & 0xffffffff) - 1;
  std::lock_guard lock(file.text);
  known = group.number.load(std::memory_order_relaxed);
  if (known >> 32 == file.generation) return (known & 0xffffffff) - 1;
  const uint32_t number = std::min<uint32_t>(file.groups++, nobody);  // all beyond share one
  line(file, "{\"group\": " + std::to_string(number) + ", \"name\": " + in_quotes(group.name) +
                 ", \"rank\": " + std::to_string(group.rank) + ", \"world_size\": " +
                 std::to_string(group.world_size) + ", \"host\": " + in_quotes(group.host) +
                 ", \"members\": " + std::to_string(group.members) + "}");
  group.number.store(uint64_t{file.generation} << 32 | (number + 1), std::memory_order_release);
  return number;
}

// With the lock of the text. A line is there once `text_bytes` says so.
bool Recorder::line(File& file, const std::string& text) {
  FileHeader& header = file.header();
  const uint64_t at = header.text_bytes.load(std::memory_order_relaxed);
  if (at + text.size() + 1 > text_capacity) {
    header.text_lost.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  std::byte* to = file.data + header_bytes + at;
  std::memcpy(to, text.data(), text.size());
  to[text.size()] = std::byte{'\n'};
  header.text_bytes.store(at + text.size() + 1, std::memory_order_release);
  return true;
}

}  // namespace pycomm::trace
