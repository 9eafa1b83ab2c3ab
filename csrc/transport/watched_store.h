// watched_store.h -- a store for ranks that have a group already and make another of some of its ranks.
//
// Who dies before it has written its record is known to nobody in the new group (rendezvous.h); but those who
// wait can ask the group that they have. So every question to this store, which waiters ask again and again,
// looks at the lives of the members now and then.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "../store/store.h"
#include "transport.h"

namespace pycomm {

class WatchedStore final : public Store {
 public:
  // `members`: the ranks in `known`, a group that lives as long as this, of the ranks of the new group; -1:
  // not known there.
  WatchedStore(Store& store, const Transport& known, std::vector<int> members, Identity identity)
      : store_(store), known_(known), members_(std::move(members)), identity_(std::move(identity)) {}

  void set(const std::string& key, const std::string& value) override { store_.set(key, value); }
  std::string get(const std::string& key) override { return store_.get(key); }
  void remove(const std::string& key) override { store_.remove(key); }
  bool has(const std::vector<std::string>& keys) override {
    look();
    return store_.has(keys);
  }

 private:
  static constexpr auto look_every = std::chrono::milliseconds(20);

  // Raises once: the others are told of it through the store.
  void look() {
    const auto now = std::chrono::steady_clock::now();
    if (raised_ || now < next_look_) return;
    next_look_ = now + look_every;
    for (size_t p = 0; p < members_.size(); ++p) {
      if (members_[p] < 0 || members_[p] == known_.rank() || known_.peer_alive(members_[p])) continue;
      raised_ = true;
      identity_.raise(ErrorKind::peer, {}, static_cast<int>(p),
                      "creating the group: rank " + std::to_string(p) + " died (its process ended)");
    }
  }

  Store& store_;
  const Transport& known_;
  const std::vector<int> members_;
  const Identity identity_;
  std::chrono::steady_clock::time_point next_look_{};
  bool raised_ = false;
};

}  // namespace pycomm
