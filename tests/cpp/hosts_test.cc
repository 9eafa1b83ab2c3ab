// hosts_test.cc -- csrc/hosts/placement against a count of every element, and what loop_wire promises: order,
// late messages, messages that are lost, connections that end.
#include <cstdio>
#include <cstring>

#include "../../csrc/hosts/loop_wire.h"
#include "../../csrc/hosts/placement.h"

using namespace pycomm;

namespace {

int passed = 0, failed = 0;

void check(bool right, const char* what, long detail = 0) {
  if (right) {
    ++passed;
    return;
  }
  if (++failed <= 20) std::printf("FAILED %s (%ld)\n", what, detail);
}

// --- placement --------------------

int slice_of(size_t element, size_t count, int ranks, size_t item) {
  int found = -1;
  for (int l = 0; l < ranks; ++l) {
    const Range range = chunk_of(count, l, ranks, item);
    if (range.begin <= element && element < range.end) found = found == -1 ? l : -2;
  }
  return found;
}

// Every element of every slice goes to the one rank of the other host that has it, in order.
void check_crossings(int here, int there, size_t count, size_t item) {
  size_t messages = 0;
  for (int l = 0; l < here; ++l) {
    const Range own = chunk_of(count, l, here, item);
    size_t next = own.begin;
    for (const Crossing& each : crossings(own, count, there, item)) {
      ++messages;
      check(each.range.begin == next && each.range.begin < each.range.end, "pieces follow each other", count);
      for (size_t i = each.range.begin; i < each.range.end; ++i)
        check(slice_of(i, count, there, item) == each.peer, "the piece is in the peer's slice", i);
      next = each.range.end;
    }
    check(next == own.end, "pieces cover the slice", count);
  }
  check(messages <= static_cast<size_t>(here + there - 1), "no more messages than needed", messages);
  if (here == there) check(messages <= static_cast<size_t>(here), "equal hosts: one message each", messages);
}

// All ways to put `world` ranks on `hosts` hosts by words.
void check_placements(int world, int hosts) {
  long ways = 1;
  for (int r = 0; r < world; ++r) ways *= hosts;
  for (long way = 0; way < ways; ++way) {
    std::vector<std::string> words;
    long rest = way;
    for (int r = 0; r < world; ++r, rest /= hosts) words.push_back(std::string(1, 'd' - rest % hosts));
    const Placement placement = Placement::of(words, words);
    int seen = 0;
    for (int h = 0; h < placement.hosts(); ++h) {
      if (h) check(placement.ranks[h - 1][0] < placement.ranks[h][0], "hosts by their lowest rank", way);
      for (int l = 0; l < placement.size_of(h); ++l, ++seen) {
        const int rank = placement.ranks[h][l];
        check(placement.host_of[rank] == h && placement.local_of[rank] == l, "both directions agree", way);
        check(words[rank] == words[placement.ranks[h][0]] && placement.names[h] == words[rank],
              "one word per host", way);
        if (l) check(placement.ranks[h][l - 1] < rank, "ranks of a host ascend", way);
      }
      for (int g = 0; g < h; ++g) check(placement.names[g] != placement.names[h], "words differ", way);
    }
    check(seen == world && placement.world_size() == world, "every rank is somewhere", way);
  }
}

void check_names() {
  const Placement same = Placement::of({"a", "b", "b", "c"}, {"node", "node", "node", "other"});
  check(same.names[0] == "node#0" && same.names[1] == "node#1" && same.names[2] == "other",
        "hosts that call themselves alike get numbers");
  check(same.name(2) == "rank 2 (node#1)" && same.describe() == "hosts of 1 + 2 + 1", "names");
  check(Placement::of({"a", "b", "a", "b"}, {"a", "b", "a", "b"}).describe() == "2 hosts x 2", "equal hosts");
}

// --- loop_wire --------------------

struct Ends {
  std::shared_ptr<LoopNetwork> network;
  std::shared_ptr<Wire> a, b;
  explicit Ends(int delay)
      : network(std::make_shared<LoopNetwork>(2, delay)), a(network->wire(0)), b(network->wire(1)) {}
};

const std::byte* bytes(const int& number) { return reinterpret_cast<const std::byte*>(&number); }
std::byte* bytes(int& number) { return reinterpret_cast<std::byte*>(&number); }

bool there(Ticket& ticket) {
  ticket.nudge();
  return ticket.wait();
}

void check_order(int delay) {
  Ends ends(delay);
  constexpr int messages = 60;
  std::vector<int> sent(messages), received(messages, -1);
  std::vector<TicketPtr> tickets;
  for (int i = 0; i < messages; ++i) {
    sent[i] = i;
    tickets.push_back(ends.a->send(1, i % 3, bytes(sent[i]), sizeof(int)));
  }
  for (int i = 0; i < messages; ++i)
    tickets.push_back(ends.b->recv(0, (i + 1) % 3, bytes(received[i]), sizeof(int)));
  for (auto& ticket : tickets)
    while (!ticket->wait()) continue;
  int next[3] = {0, 1, 2};
  for (int i = 0; i < messages; ++i) {
    int& expected = next[(i + 1) % 3];
    check(received[i] == expected, "messages of one tag arrive in order", i);
    expected += 3;
  }
}

// Nothing comes while a rank is lost, and what was sent comes when it is found again.
void check_found(int delay) {
  Ends ends(delay);
  std::vector<int> sent{1, 2, 3}, got{0, 0, 0};
  std::vector<TicketPtr> tickets;
  for (int i = 0; i < 3; ++i) {
    if (i == 1) ends.network->lose(0, true);
    tickets.push_back(ends.a->send(1, 7, bytes(sent[i]), sizeof(int)));
    tickets.push_back(ends.b->recv(0, 7, bytes(got[i]), sizeof(int)));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  check(!there(*tickets[4]) && !there(*tickets[5]), "nothing comes from a lost rank", delay);
  ends.network->lose(0, false);
  for (auto& ticket : tickets)
    while (!ticket->wait()) continue;
  check(got == sent, "all of it arrives in the end", delay);
}

// What was withdrawn never comes; what is sent afterwards does.
void check_loss(int delay) {
  Ends ends(delay);
  int first = 1, second = 2, got = 0;
  ends.network->lose(1, true);
  auto send = ends.a->send(1, 7, bytes(first), sizeof(int));
  auto recv = ends.b->recv(0, 7, bytes(got), sizeof(int));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  check(!there(*send) && !there(*recv) && got == 0, "nothing arrives at a lost rank", delay);
  send.reset();
  recv.reset();
  ends.network->lose(1, false);
  auto again = ends.b->recv(0, 7, bytes(got), sizeof(int));
  auto other = ends.a->send(1, 7, bytes(second), sizeof(int));
  while (!again->wait() || !other->wait()) continue;
  check(got == 2, "a withdrawn message is gone", got);
}

void check_end(int delay) {
  Ends ends(delay);
  int got = 0;
  auto recv = ends.b->recv(0, 1, bytes(got), sizeof(int));
  ends.a.reset();
  int errors = 0;
  try {
    while (!recv->wait()) continue;
  } catch (const WireError&) {
    ++errors;
  }
  try {
    (void)ends.b->send(0, 1, bytes(got), sizeof(int));
  } catch (const WireError&) {
    ++errors;
  }
  check(errors == 2, "a wire that has ended is an error for those that wait and those that post", errors);
}

void check_sizes() {
  Ends ends(0);
  int64_t wide = 5;
  int narrow = 0, errors = 0;
  auto send = ends.a->send(1, 1, reinterpret_cast<std::byte*>(&wide), sizeof(wide));
  auto recv = ends.b->recv(0, 1, bytes(narrow), sizeof(narrow));
  for (Ticket* ticket : {send.get(), recv.get()}) try {
      while (!ticket->wait()) continue;
    } catch (const WireError&) {
      ++errors;
    }
  check(errors == 2 && narrow == 0, "another size is an error on both sides", errors);
}

}  // namespace

int main() {
  for (int here = 1; here <= 5; ++here)
    for (int there = 1; there <= 5; ++there)
      for (size_t item : {1, 2, 4, 8, 16})
        for (size_t count : {0, 1, 2, 15, 16, 17, 63, 64, 65, 130, 257, 1000})
          check_crossings(here, there, count, item);
  for (int hosts = 1; hosts <= 4; ++hosts)
    for (int world = 1; world <= 6; ++world) check_placements(world, hosts);
  check_names();
  for (int delay : {0, 300}) {
    check_order(delay);
    check_found(delay);
    check_loss(delay);
    check_end(delay);
  }
  check_sizes();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
