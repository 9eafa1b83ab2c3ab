// page_store.h -- a store in the memory that the ranks of a group share: one page per rank.
//
// The store by which a group was made may be gone when ranks of it are lost: torch's lives in the process of
// rank 0. What the survivors have to tell each other, to agree on who they are and to make a group of their
// own (survivors.h), lies in the pages of the group that they have.
//
//     page of rank r | version | nbytes | entries: key, value, key, value ...
//
// Only rank r writes its page: all of its entries anew, with `version` odd meanwhile. Whoever reads copies
// the page and takes the copy if `version` was even and the same before and after. A writer that dies in the
// middle leaves the version odd for ever: its page then counts as empty, and its death is seen elsewhere.
//
// A key may be in several pages (everybody may say why a group cannot be made); that of the lowest rank is
// found. remove() takes a key out of this rank's own page.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "../store/store.h"
#include "transport.h"

namespace pycomm {

class PageStore final : public Store {
 public:
  // `transport`: whether or not the group still works.
  explicit PageStore(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}

  // Throws std::length_error where this rank's page is full.
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key) override;
  bool has(const std::vector<std::string>& keys) override;
  void remove(const std::string& key) override;
  // What `rank` has said of the key.
  std::optional<std::string> find(int rank, const std::string& key) const;

 private:
  using Entries = std::map<std::string, std::string>;
  Entries read(int rank) const;
  void write(const Entries& entries);
  std::optional<std::string> find(const std::string& key) const;

  const std::shared_ptr<Transport> transport_;
  std::mutex mutex_;  // threads of this rank
};

}  // namespace pycomm
