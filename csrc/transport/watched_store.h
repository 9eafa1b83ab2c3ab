// watched_store.h -- a store for ranks that have a group already and make another of some of its ranks.
//
// Who dies before it has written its record is known to nobody in the new group (rendezvous.h); but those who
// wait can ask the group that they have: watch() looks at the lives of the members; of those on other hosts,
// at what has broken that group.
//
// Who sees a death raises, and may end by that, too. So it first breaks the group that they have: whoever
// looks later finds two dead, and names the one that the reason names.
#pragma once

#include <algorithm>
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
  WatchedStore(Store& store, Transport& known, std::vector<int> members, std::vector<int> numbers,
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
    raise_if_dead();
    for (size_t p = 0; p < members_.size(); ++p) {
      const int member = members_[p];
      if (member < 0 || member == known_.rank() || known_.peer_alive(member)) continue;
      known_.mark_broken(
          {ErrorKind::peer, {}, known_.number(member), known_.name(member) + " died (its process ended)"});
      raise_if_dead();
      raise_dead(static_cast<int>(p));  // it was broken before, for another reason
    }
  }

 private:
  // By what the group that they have knows.
  void raise_if_dead() const {
    const std::optional<Reason> reason = known_.reason();
    if (!reason || reason->kind != ErrorKind::peer) return;
    const auto found = std::find(numbers_.begin(), numbers_.end(), reason->number);
    if (found == numbers_.end()) return;
    const auto p = static_cast<int>(found - numbers_.begin());
    if (members_[p] < 0 || !known_.peer_alive(members_[p])) raise_dead(p);
  }
  [[noreturn]] void raise_dead(int p) const {
    identity_.raise(ErrorKind::peer, {}, p,
                    "creating the group: rank " + std::to_string(p) + " died (its process ended)");
  }

  Store& store_;
  Transport& known_;
  const std::vector<int> members_, numbers_;
  const Identity identity_;
};

}  // namespace pycomm
