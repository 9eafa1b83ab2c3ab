// agree.cc -- see agree.h.
#include "agree.h"

#include <cstring>

#include "../arithmetic/reduce.h"

namespace pycomm {

namespace {

constexpr int cards_phase = 3;

// A function of what all ranks with the same call have alike.
bool fits_card(const Op& op, const Placement& placement) {
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
      cards_(operation.locals),
      flight_(operation.group, operation.scope()) {
  size_t end = 0;
  for (int h = 0; h <= operation.placement.hosts(); ++h) {
    page_begin_.push_back(end);
    if (h < operation.placement.hosts()) end += operation.placement.size_of(h) * sizeof(Header) + card_payload;
  }
  pages_.resize(end);
}

const std::byte* Agreement::of_host(int host) const {
  return pages_.data() + page_begin_[host + 1] - card_payload;
}

void Agreement::fill_card() {
  const Op& op = operation_.op;
  Card& mine = cards_[operation_.local];
  mine.header = header_of(op, operation_.scope().op.sequence);
  if (small_ && op.in && op.count) std::memcpy(mine.payload.data(), op.in, op.nbytes());
}

void Agreement::begin() {
  fill_card();
  Across& group = operation_.group;
  auto message = [&](int h, bool sends) {
    const int leader = group.placement().ranks[h][0];
    const size_t elements = page_bytes(sends ? operation_.host : h);
    if (sends) flight_.add(leader, group.wire().send(leader, cards_phase, page(operation_.host), elements));
    else flight_.add(leader, group.wire().recv(leader, cards_phase, page(h), elements));
  };
  auto to_others = [&](bool sends) {
    for (int h = 0; h < operation_.placement.hosts() && group.leads(); ++h)
      if (h != operation_.host) message(h, sends);
  };
  to_others(false);
  Op step;
  step.kind = OpKind::all_gather;
  step.count = sizeof(Card);
  step.in = reinterpret_cast<const std::byte*>(&cards_[operation_.local]);
  for (Card& card : cards_) step.out_parts.push_back({reinterpret_cast<std::byte*>(&card), sizeof(Card)});
  operation_.inside(std::move(step));
  for (const Card& card : cards_) host_agrees_ &= card.header == cards_[0].header;
  fill_page();
  to_others(true);
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
  flight_.land();
  Op step;
  step.kind = OpKind::broadcast;
  step.count = pages_.size();
  step.in = step.out = pages_.data();
  if (operation_.local != 0) step.in = nullptr;
  operation_.inside(std::move(step));
  const Header& mine = cards_[operation_.local].header;
  for (int h = 0; h < operation_.placement.hosts(); ++h)
    for (int l = 0; l < operation_.placement.size_of(h); ++l) {
      if (headers(h)[l] == mine) continue;
      const int rank = operation_.placement.ranks[h][l];
      throw CommError(ErrorKind::mismatch,
                      operation_.group.transport().where(operation_.scope().op) +
                          describe_call(operation_.op, headers(h)[l], operation_.placement.name(rank)),
                      operation_.group.rank(), operation_.placement.world_size(), operation_.scope().op,
                      rank);
    }
}

}  // namespace pycomm
