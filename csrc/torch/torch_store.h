// torch_store.h -- torch's c10d store behind pycomm's rendezvous interface.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../store/store.h"

namespace pycomm {

class TorchStore final : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key) override {
    auto bytes = store_->get(key);
    return {bytes.begin(), bytes.end()};
  }
  bool has(const std::vector<std::string>& keys) override { return store_->check(keys); }
  void remove(const std::string& key) override {
    try {
      store_->deleteKey(key);
    } catch (const std::exception&) {
      // FileStore and others cannot delete; a left-over key is never read again, its try is unique
    }
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace pycomm
