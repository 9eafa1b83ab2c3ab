// store.h -- the rendezvous interface. It is used while a communicator is created and never on the data path.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace pycomm {

// A key-value store that all ranks of the group can reach. Implementations: torch's Store
// (csrc/torch/torch_store.h) and LocalStore below. May throw what the underlying store throws.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::string get(const std::string& key) = 0;  // only after has(key)
  virtual bool has(const std::vector<std::string>& keys) = 0;
  virtual void remove(const std::string& key) = 0;
  virtual void watch() {}  // throws what ends the wait for other ranks, where it knows: watched_store.h
};

// Ranks as threads of one process: tests and pycomm.testing.run_ranks.
class LocalStore final : public Store {
 public:
  // wire_delay_us: of messages between simulated hosts, at most (hosts/loop_wire.h); for tests.
  explicit LocalStore(int wire_delay_us = 0) : wire_delay_us(wire_delay_us) {}
  const int wire_delay_us;

  void set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  std::string get(const std::string& key) override {
    std::lock_guard lock(mutex_);
    return values_.at(key);
  }
  bool has(const std::vector<std::string>& keys) override {
    std::lock_guard lock(mutex_);
    for (const auto& key : keys)
      if (!values_.count(key)) return false;
    return true;
  }
  void remove(const std::string& key) override {
    std::lock_guard lock(mutex_);
    values_.erase(key);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

}  // namespace pycomm
