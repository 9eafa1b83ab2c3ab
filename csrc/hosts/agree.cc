// agree.cc -- see agree.h.
#include "agree.h"

#include <cstring>

#include "../arithmetic/reduce.h"

namespace pycomm {

namespace {

constexpr int cards_phase = 3;

// A function of what all ranks with the same call have alike.
bool fits_card(const Op& op, const Placement& placement) {
  if (op.on_device) return false;
  const size_t nbytes = op.count * size_of(op.dtype);
  switch (op.kind) {
    case OpKind::barrier: return true;
    case OpKind::all_reduce:
    case OpKind::reduce:
    case OpKind::broadcast: return nbytes <= card_payload;
    case OpKind::all_gather: return !op.uneven && nbytes * placement.largest() <= card_payload;
    default: return false;
  }
}

}  // namespace

Agreement::Agreement(Operation& operation)
    : operation_(operation),
      small_(fits_card(operation.op, operation.placement)),
      sizes_by_pairs_(operation.op.kind == OpKind::all_to_all && operation.op.uneven),
      cards_(operation.locals),
      pages_(operation.group.pages(operation.scope().op.sequence)),
      flight_(operation.group, operation.scope()) {
  size_t end = 0;
  for (int h = 0; h < operation.placement.hosts(); ++h) {
    page_begin_.push_back(end);
    end += operation.placement.size_of(h) * sizeof(Header) + card_payload;
  }
  page_begin_.push_back(end);
  expect(pages_, false);
}

void Agreement::expect(Pages& pages, bool of_the_next) {
  pages.bytes.resize(page_begin_.back());
  if (!operation_.group.leads() || !pages.coming.empty()) return;
  std::vector<std::pair<int, TicketPtr>> coming;
  for (int h = 0; h < operation_.placement.hosts(); ++h) {
    if (h == operation_.host) continue;
    const int leader = operation_.placement.ranks[h][0];
    std::byte* to = pages.bytes.data() + page_begin_[h];
    auto post = [&] { return operation_.group.wire().recv(leader, cards_phase, to, page_bytes(h)); };
    coming.emplace_back(leader,
                        of_the_next ? post() : operation_.group.posted(leader, operation_.scope(), post));
  }
  pages.coming = std::move(coming);
}

const std::byte* Agreement::of_host(int host) const {
  return pages_.bytes.data() + page_begin_[host + 1] - card_payload;
}

void Agreement::fill_card() {
  const Op& op = operation_.op;
  Card& mine = cards_[operation_.local];
  mine.header = header_of(op, operation_.scope().op.sequence);
  if (small_ && op.in && op.count) std::memcpy(mine.payload.data(), op.in, op.nbytes());
}

void Agreement::begin() {
  fill_card();
  Op step;
  step.kind = OpKind::all_gather;
  step.count = sizeof(Card);
  step.in = reinterpret_cast<const std::byte*>(&cards_[operation_.local]);
  for (Card& card : cards_) step.out_parts.push_back({reinterpret_cast<std::byte*>(&card), sizeof(Card)});
  operation_.inside(std::move(step));
  for (const Card& card : cards_) host_agrees_ &= card.header == cards_[0].header;
  fill_page();
  for (int h = 0; h < operation_.placement.hosts() && operation_.group.leads(); ++h) {
    if (h == operation_.host) continue;
    const int leader = operation_.placement.ranks[h][0];
    flight_.add(leader, operation_.group.posted(leader, operation_.scope(), [&] {
      return operation_.group.wire().send(leader, cards_phase, page(operation_.host),
                                          page_bytes(operation_.host));
    }));
  }
}

void Agreement::fill_page() {
  std::byte* to = page(operation_.host);
  for (const Card& card : cards_) {
    std::memcpy(to, &card.header, sizeof(Header));
    to += sizeof(Header);
  }
  const Op& op = operation_.op;
  if (!small_ || !host_agrees_ || op.count == 0 || op.kind == OpKind::barrier) return;
  if (op.reduces()) {
    const Op step = operation_.reduction_inside(op.kind);
    std::vector<const void*> sources;
    for (const Card& card : cards_) sources.push_back(card.payload.data());
    const double factor = step.reduce_op == ReduceOp::avg ? step.divisor : step.factor;
    reduce({op.dtype, step.reduce_op, factor}, sources.data(), operation_.locals, to, op.count);
  } else if (op.kind == OpKind::all_gather) {
    for (const Card& card : cards_) {
      std::memcpy(to, card.payload.data(), op.nbytes());
      to += op.nbytes();
    }
  } else if (operation_.placement.host_of[op.root] == operation_.host) {
    std::memcpy(to, cards_[operation_.placement.local_of[op.root]].payload.data(), op.nbytes());
  }
}

void Agreement::conclude() {
  operation_.patient_inside();
  for (auto& [rank, ticket] : pages_.coming) operation_.group.await(*ticket, rank, operation_.scope());
  pages_.coming.clear();
  flight_.land();
  Op step;
  step.kind = OpKind::broadcast;
  step.count = pages_.bytes.size();
  step.in = step.out = pages_.bytes.data();
  if (operation_.local != 0) step.in = nullptr;
  operation_.inside(std::move(step));
  try {
    expect(operation_.group.pages(operation_.scope().op.sequence + 1), true);
  } catch (const WireError&) {
    // the next operation, if there is one, finds it again
  }
  compare();
}

// Who raises and who goes on depends on all headers alike. Where one rank has passed sizes to an all_to_all,
// the counts of those that passed none are compared pair by pair, too (all_to_all.cc).
void Agreement::compare() {
  const Header& mine = cards_[operation_.local].header;
  const Placement& placement = operation_.placement;
  std::vector<std::pair<int, const Header*>> different;  // with their ranks
  for (int h = 0; h < placement.hosts(); ++h)
    for (int l = 0; l < placement.size_of(h); ++l)
      if (headers(h)[l] != mine) different.emplace_back(placement.ranks[h][l], &headers(h)[l]);
  auto same_but_for_sizes = [&](const Header& theirs) {
    return operation_.op.kind == OpKind::all_to_all && theirs.key == mine.key &&
           (theirs.extra | 1) == (mine.extra | 1);
  };
  for (const auto& [rank, theirs] : different)
    sizes_by_pairs_ |= same_but_for_sizes(*theirs) && sizes_in_extra(theirs->extra);
  for (const auto& [rank, theirs] : different)
    if (!sizes_by_pairs_ || !same_but_for_sizes(*theirs))
      operation_.raise_mismatch(rank, describe_call(operation_.op, *theirs, placement.name(rank)));
}

}  // namespace pycomm
