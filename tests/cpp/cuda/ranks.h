// ranks.h -- ranks of a group as forked processes with one or more threads each, every process with a fake
// driver of its own.
//
//   expect("two ranks", run_ranks({.ranks = 2}, [](Rank& rank) { ... }));
//
// A body fails by throwing. Each process also fails if a CUDA object is left over or a rule of the driver was
// broken, and a run that takes longer than its limit is killed.
#pragma once

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "../../../csrc/collectives/collectives.h"
#include "../../../csrc/communicator/agree.h"
#include "../join_group.h"
#include "fake_driver.h"

namespace pycomm::cuda {

// A rendezvous between processes: one file per key.
class FolderStore final : public Store {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) {}
  void set(const std::string& key, const std::string& value) override {
    const std::string mine = path(key) + "." + std::to_string(::gettid());
    std::ofstream(mine, std::ios::binary) << value;
    std::filesystem::rename(mine, path(key));
  }
  std::string get(const std::string& key) override {
    std::stringstream text;
    text << std::ifstream(path(key), std::ios::binary).rdbuf();
    return text.str();
  }
  bool has(const std::vector<std::string>& keys) override {
    for (const auto& key : keys)
      if (!std::filesystem::exists(path(key))) return false;
    return true;
  }
  void remove(const std::string& key) override { std::filesystem::remove(path(key)); }

 private:
  std::string path(std::string key) const {
    for (char& c : key)
      if (c == '/') c = '_';
    return folder_ + "/" + key;
  }
  std::string folder_;
};

struct Rank {
  Communicator& comm;
  int rank, world_size;
  void barrier() { all_gather_value(comm, rank); }
};

struct RunOptions {
  int ranks = 2;
  int threads = 1;  // ranks per process
  unsigned int limit = 20;  // seconds
  // In each process, with its first rank: settings of the fake driver.
  std::function<void(int)> before_threads = {};
  int may_die = -1;  // a rank whose process ends on purpose
  bool leaks_allowed = false;
  double timeout = 10;  // seconds, of the group
  DeviceOptions device = {};
};

inline int failures = 0, passes = 0;
inline bool first_ends = false;  // the first failure ends the program

inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("not so: " + what);
}

// The ranks [first, first + count) as threads of this process. Returns the exit status.
inline int run_process(const RunOptions& options, int first, int count, const std::string& folder,
                       const std::function<void(Rank&)>& body) {
  fake_reset();
  if (options.before_threads) options.before_threads(first);
  fake_reset();  // with those settings
  use_driver(fake_driver());
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int r = first; r < first + count; ++r)
    threads.emplace_back([&, r] {
      try {
        FolderStore store(folder);
        TransportOptions transport;
        transport.timeout = options.timeout;
        transport.device = options.device;
        const auto comm = join_group(store, r, options.ranks, transport);
        Rank rank{*comm, r, options.ranks};
        body(rank);
      } catch (const std::exception& error) {
        std::printf("    rank %d: %s\n", r, error.what());
        failed = 1;
      }
    });
  for (auto& thread : threads) thread.join();
  if (!options.leaks_allowed && fake_counts().total()) {
    std::printf("    rank %d leaves: %s\n", first, fake_counts().describe().c_str());
    failed = 1;
  }
  if (!fake_violations().empty()) failed = 1;
  std::fflush(stdout);
  return failed;
}

inline bool run_ranks(const RunOptions& options, const std::function<void(Rank&)>& body) {
  char folder[] = "/tmp/pycomm-ranks-XXXXXX";
  if (!::mkdtemp(folder)) return false;
  std::fflush(stdout);
  std::map<pid_t, int> processes;  // and their first rank
  for (int first = 0; first < options.ranks; first += options.threads) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::alarm(options.limit);
      ::_exit(run_process(options, first, std::min(options.threads, options.ranks - first), folder, body));
    }
    processes[pid] = first;
  }
  bool well = true;
  while (!processes.empty()) {
    int status = 0;
    const pid_t pid = ::wait(&status);
    const auto found = processes.find(pid);
    if (found == processes.end()) break;
    if (status != 0 && found->second != options.may_die) {
      well = false;
      if (WIFSIGNALED(status))
        std::printf("    the process of rank %d ended by signal %d\n", found->second, WTERMSIG(status));
    }
    processes.erase(found);
  }
  std::filesystem::remove_all(folder);
  return well && processes.empty();
}

inline void expect(const std::string& name, bool well) {
  ++(well ? passes : failures);
  if (!well) std::printf("FAILED %s\n", name.c_str());
  std::fflush(stdout);
  if (!well && first_ends) ::_exit(1);
}

struct Suite {
  const char* name;
  std::function<void()> run;
};

// Those that the arguments name, until the first failure; without arguments all of them. Returns the exit
// status.
inline int run_suites(int count, char** arguments, const std::vector<Suite>& suites) {
  const std::vector<std::string> asked(arguments + 1, arguments + count);
  first_ends = !asked.empty();
  size_t found = 0;
  for (const Suite& suite : suites) {
    if (first_ends && std::find(asked.begin(), asked.end(), suite.name) == asked.end()) continue;
    ++found;
    suite.run();
  }
  if (first_ends) expect("a suite of each name", found == asked.size());
  std::printf("%d passed, %d failed\n", passes, failures);
  return failures != 0;
}

// The message of what body throws; fails if it throws nothing.
template <class Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  throw std::runtime_error("no error came");
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline void require_contains(const std::string& text, const std::string& part) {
  require(contains(text, part), "'" + text + "' contains '" + part + "'");
}

}  // namespace pycomm::cuda
