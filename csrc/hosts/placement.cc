// placement.cc -- see placement.h.
#include "placement.h"

#include <algorithm>
#include <map>

namespace pycomm {

Placement Placement::of(const std::vector<std::string>& hosts, const std::vector<std::string>& labels) {
  Placement placement;
  std::map<std::string, int> index;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto [found, fresh] = index.emplace(hosts[rank], placement.hosts());
    if (fresh) {
      placement.ranks.emplace_back();
      placement.names.push_back(labels[rank]);
    }
    placement.host_of.push_back(found->second);
    placement.local_of.push_back(placement.size_of(found->second));
    placement.ranks[found->second].push_back(static_cast<int>(rank));
  }
  const std::vector<std::string> names = placement.names;
  for (int h = 0; h < placement.hosts(); ++h)
    if (std::count(names.begin(), names.end(), names[h]) > 1) placement.names[h] += "#" + std::to_string(h);
  return placement;
}

int Placement::largest() const {
  int most = 0;
  for (int h = 0; h < hosts(); ++h) most = std::max(most, size_of(h));
  return most;
}

std::string Placement::name(int rank) const {
  return "rank " + std::to_string(rank) + " (" + names[host_of[rank]] + ")";
}

std::string Placement::describe() const {
  bool equal = true;
  std::string sizes;
  for (int h = 0; h < hosts(); ++h) {
    equal &= size_of(h) == size_of(0);
    sizes += (h ? " + " : "") + std::to_string(size_of(h));
  }
  return equal ? std::to_string(hosts()) + " hosts x " + std::to_string(size_of(0)) : "hosts of " + sizes;
}

std::vector<Crossing> crossings(Range own, size_t count, int ranks, size_t item) {
  std::vector<Crossing> all;
  for (int peer = 0; peer < ranks; ++peer) {
    const Range theirs = chunk_of(count, peer, ranks, item);
    const Range both{std::max(own.begin, theirs.begin), std::min(own.end, theirs.end)};
    if (both.begin < both.end) all.push_back({peer, both});
  }
  return all;
}

}  // namespace pycomm
