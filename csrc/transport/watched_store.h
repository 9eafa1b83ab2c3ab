// watched_store.h -- a store for ranks that have a group already and make another of some of its ranks.
//
// Who dies before it has written its record is known to nobody in the new group (rendezvous.h); but those who
// wait can ask the group that they have: watch() looks at the lives of the members; of those on other hosts,
// at what has broken that group.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../store/store.h"
#include "transport.h"

namespace pycomm {

class WatchedStore final : public Store {
 public:
  // `members`: the ranks in `known`, a group that lives as long as this, of the ranks of the new group; -1:
  // on another host. `numbers`: their ranks in the whole group of which `known` is a host's part.
  WatchedStore(Store& store, const Transport& known, std::vector<int> members, std::vector<int> numbers,
               Identity identity)
      : store_(store),
        known_(known),
        members_(std::move(members)),
        numbers_(std::move(numbers)),
        identity_(std::move(identity)) {}

  void set(const std::string& key, const std::string& value) override { store_.set(key, value); }
  std::string get(const std::string& key) override { return store_.get(key); }
  void remove(const std::string& key) override { store_.remove(key); }
  bool has(const std::vector<std::string>& keys) override { return store_.has(keys); }
  void watch() override {
    const std::optional<Reason> reason = known_.reason();
    const int dead = reason && reason->kind == ErrorKind::peer ? reason->number : -1;
    for (size_t p = 0; p < members_.size(); ++p) {
      const bool here = members_[p] >= 0;
      if (here ? members_[p] == known_.rank() || known_.peer_alive(members_[p]) : numbers_[p] != dead)
        continue;
      identity_.raise(ErrorKind::peer, {}, static_cast<int>(p),
                      "creating the group: rank " + std::to_string(p) + " died (its process ended)");
    }
  }

 private:
  Store& store_;
  const Transport& known_;
  const std::vector<int> members_, numbers_;
  const Identity identity_;
};

}  // namespace pycomm
