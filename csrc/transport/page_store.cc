// page_store.cc -- see page_store.h.
#include "page_store.h"

#include <sched.h>

#include <cstring>
#include <stdexcept>

namespace pycomm {

namespace {

constexpr int reads_of_a_changing_page = 1000;  // yields; to write one takes microseconds

// Lengths before bytes.
void append(std::string& to, const std::string& text) {
  const auto nbytes = static_cast<uint32_t>(text.size());
  to.append(reinterpret_cast<const char*>(&nbytes), sizeof(nbytes));
  to += text;
}

std::string take(const std::string& from, size_t& at) {
  uint32_t nbytes = 0;
  std::memcpy(&nbytes, from.data() + at, sizeof(nbytes));
  at += sizeof(nbytes) + nbytes;
  return from.substr(at - nbytes, nbytes);
}

// Word by word, since a reader may look meanwhile; it throws away what it has seen then. Who sees one of the
// words sees the odd version that was stored before.
void store_words(std::atomic<uint64_t>* to, const std::string& text) {
  for (size_t i = 0; i * sizeof(uint64_t) < text.size(); ++i) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + i * sizeof(word),
                std::min(sizeof(word), text.size() - i * sizeof(word)));
    to[i].store(word, std::memory_order_release);
  }
}

std::string load_words(const std::atomic<uint64_t>* from, size_t nbytes) {
  std::string text(round_up(nbytes, sizeof(uint64_t)), '\0');
  for (size_t i = 0; i * sizeof(uint64_t) < nbytes; ++i) {
    const uint64_t word = from[i].load(std::memory_order_acquire);
    std::memcpy(text.data() + i * sizeof(word), &word, sizeof(word));
  }
  text.resize(nbytes);
  return text;
}

}  // namespace

PageStore::Entries PageStore::read(int rank) const {
  const StorePage& page = transport_->page(rank);
  for (int i = 0; i < reads_of_a_changing_page; ++i) {
    const uint64_t before = page.version.load(std::memory_order_acquire);
    if (before % 2 == 0) {
      const uint64_t nbytes = page.nbytes.load(std::memory_order_acquire);
      const std::string text = load_words(page.words, std::min<uint64_t>(nbytes, sizeof(page.words)));
      if (page.version.load(std::memory_order_acquire) == before) {
        Entries entries;
        for (size_t at = 0; at < text.size();) {
          const std::string key = take(text, at);
          entries[key] = take(text, at);
        }
        return entries;
      }
    }
    ::sched_yield();
  }
  return {};
}

void PageStore::write(const Entries& entries) {
  StorePage& page = transport_->page(transport_->rank());
  std::string text;
  for (const auto& [key, value] : entries) {
    append(text, key);
    append(text, value);
  }
  if (text.size() > sizeof(page.words))
    throw std::length_error(transport_->where({}) + "the page of this rank in the group's memory is full: " +
                            std::to_string(text.size()) + " bytes for " + std::to_string(sizeof(page.words)));
  page.version.fetch_add(1, std::memory_order_relaxed);
  page.nbytes.store(text.size(), std::memory_order_release);
  store_words(page.words, text);
  page.version.fetch_add(1, std::memory_order_release);
  transport_->ring_all();
}

void PageStore::set(const std::string& key, const std::string& value) {
  std::lock_guard guard(mutex_);
  Entries entries = read(transport_->rank());
  entries[key] = value;
  write(entries);
}

void PageStore::remove(const std::string& key) {
  std::lock_guard guard(mutex_);
  Entries entries = read(transport_->rank());
  if (entries.erase(key)) write(entries);
}

std::optional<std::string> PageStore::find(int rank, const std::string& key) const {
  const Entries entries = read(rank);
  const auto entry = entries.find(key);
  return entry == entries.end() ? std::nullopt : std::optional(entry->second);
}

std::optional<std::string> PageStore::find(const std::string& key) const {
  for (int p = 0; p < transport_->world_size(); ++p)
    if (auto value = find(p, key)) return value;
  return std::nullopt;
}

std::string PageStore::get(const std::string& key) {
  if (auto value = find(key)) return *value;
  throw std::out_of_range("no such key: " + key);
}

bool PageStore::has(const std::vector<std::string>& keys) {
  for (const std::string& key : keys)
    if (!find(key)) return false;
  return true;
}

}  // namespace pycomm
