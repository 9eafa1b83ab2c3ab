// process.cc -- see process.h.
#include "process.h"

#include <pthread.h>
#include <sys/uio.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "../memory/fd_channel.h"

namespace pycomm {

namespace {

struct Process {
  uint64_t token;
  std::atomic<int> primary_groups{0};

  Process() {
    renew();
    ::pthread_atfork(nullptr, nullptr, [] {
      num_forks.fetch_add(1);
      instance().renew();
      instance().primary_groups = 0;
    });
  }
  void renew() { token = std::stoull(random_token().substr(0, 16), nullptr, 16) | 1; }
  static Process& instance() {
    static Process process;
    return process;
  }
};

constexpr unsigned long pf_exiting = 0x4;  // in the flags of /proc/<pid>/stat

// A thread that has ended without its process leaves no memory to read either, if it is the first one.
bool all_threads_end(int pid) {
  std::error_code error;
  const std::filesystem::directory_iterator tasks("/proc/" + std::to_string(pid) + "/task", error);
  if (error) return error == std::errc::no_such_file_or_directory;
  for (auto task = begin(tasks); task != end(tasks); task.increment(error)) {
    std::string line;
    std::getline(std::ifstream(task->path() / "stat"), line);
    // "tid (name) state ppid pgrp session tty tpgid flags ..."
    const size_t name_end = line.rfind(')');
    if (name_end == std::string::npos) continue;  // gone meanwhile
    std::istringstream fields(line.substr(name_end + 1));
    std::string skipped;
    for (int i = 0; i < 6; ++i) fields >> skipped;
    unsigned long flags = 0;
    fields >> flags;
    if (!(flags & pf_exiting)) return false;
  }
  return true;
}

}  // namespace

bool process_ends(int pid, uint64_t address) {
  uint64_t word = 0;
  const iovec local{&word, sizeof(word)}, remote{reinterpret_cast<void*>(address), sizeof(word)};
  if (::process_vm_readv(pid, &local, 1, &remote, 1, 0) >= 0 || errno != ESRCH) return false;
  return all_threads_end(pid);
}

const uint64_t& process_token() { return Process::instance().token; }
uint64_t& probe_target() {
  static uint64_t word = 0;
  return word;
}
bool has_primary_group() { return Process::instance().primary_groups.load() > 0; }
void begin_primary_group() { Process::instance().primary_groups.fetch_add(1); }
void end_primary_group() { Process::instance().primary_groups.fetch_sub(1); }

}  // namespace pycomm
