// agree.h -- how the ranks of a group that spans hosts find out that they all made the same call.
//
//   1  every rank gives its card (the header of its call, and its payload if that is small) to all ranks of
//      its host, in shared memory
//   2  the leaders send each other the cards of their hosts, and what a small operation needs of them, in
//      one message whose size is the same for every call
//   3  each leader hands on what it got to its host; every rank compares its call with all others
//
// So a message whose size depends on the call goes out only when all agree on it: engines end the process
// over a difference. Between 1 and 3 steps inside the host may run that write no result, as long as the cards
// of the host agree. A difference raises on every rank, and the group goes on.
//
// The receives of 2 are posted at the end of the operation before: a message that finds its receive goes at
// once, where one that does not asks first.
//
// A small operation is done after 3: its data were in the messages. Cost: one message for each other host,
// and three operations in shared memory.
#pragma once

#include <array>
#include <vector>

#include "../op/fingerprint.h"
#include "operation.h"

namespace pycomm {

inline constexpr size_t card_payload = 1024;  // bytes: of a rank, and of a host

class Agreement {
 public:
  explicit Agreement(Operation& operation);

  void begin();  // 1, and the messages of 2 are under way
  bool host_agrees() const { return host_agrees_; }
  void conclude();  // the rest; throws CommError
  // Once concluded, the same on all ranks: an all_to_all to which one of them has passed sizes of its own.
  bool sizes_by_pairs() const { return sizes_by_pairs_; }

  // Whether the payload travelled with the cards, the same on all ranks that made the same call.
  bool small() const { return small_; }
  const std::byte* of_host(int host) const;  // what the small payloads of a host came to, once concluded

 private:
  struct Card {
    Header header;
    std::array<std::byte, card_payload> payload;
  };
  void fill_card();
  void fill_page();
  void compare();
  // Receives for the pages of an operation, if they are not there yet.
  void expect(Pages& pages, bool of_the_next);  // of_the_next: throws WireError
  std::byte* page(int host) { return pages_.bytes.data() + page_begin_[host]; }
  const Header* headers(int host) const {
    return reinterpret_cast<const Header*>(pages_.bytes.data() + page_begin_[host]);
  }
  size_t page_bytes(int host) const { return page_begin_[host + 1] - page_begin_[host]; }

  Operation& operation_;
  const bool small_;
  bool sizes_by_pairs_;
  std::vector<Card> cards_;  // of this host
  // By host: the headers of its ranks, then what a small operation needs of it.
  std::vector<size_t> page_begin_;
  Pages& pages_;
  Flight flight_;
  bool host_agrees_ = true;
};

}  // namespace pycomm
