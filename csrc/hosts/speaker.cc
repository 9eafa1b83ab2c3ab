// speaker.cc -- see speaker.h.
#include "speaker.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <sstream>

namespace pycomm {

namespace {

constexpr uint32_t tag = 1;
constexpr auto look_every = std::chrono::milliseconds(50);
constexpr auto look_often = std::chrono::milliseconds(2);  // while a monitored barrier goes on
constexpr auto alive_every = std::chrono::seconds(1);
constexpr auto longest_pause = std::chrono::seconds(2);  // of this thread: it was stopped itself
constexpr auto short_silence = std::chrono::seconds(2);  // of another leader, which still listens
constexpr auto until_reason = std::chrono::milliseconds(500);  // for whoever knows better to say it
constexpr auto longest_farewell = std::chrono::seconds(1);
constexpr auto longest_telling = std::chrono::milliseconds(300);  // less than until_reason
constexpr auto longest_answer = std::chrono::milliseconds(300);  // less than the grace in across.cc
constexpr size_t most_said = 32;

}  // namespace

Speaker::Speaker(const Placement& placement, int host, Wire& wire, Transport& transport, Board& board,
                 Ticker& ticker)
    : placement_(placement),
      host_(host),
      wire_(wire),
      transport_(transport),
      board_(board),
      ticker_(ticker),
      closed_(placement.size_of(host)),
      told_barrier_(placement.world_size()) {
  for (int h = 0; h < placement.hosts(); ++h) {
    peers_.push_back(h == host ? nullptr : std::make_unique<Peer>());
    if (h != host) peers_[h]->heard.store(Clock::now().time_since_epoch().count());
  }
  try {
    for (int h = 0; h < placement.hosts(); ++h)
      if (h != host) peers_[h]->thread = std::thread([this, h] { hear(h); });
    thread_ = std::thread([this] { speak(); });
  } catch (...) {  // the system refuses a thread
    end();
    throw;
  }
  ::pthread_setname_np(thread_.native_handle(), "pycomm-speaker");
  transport_.set_before_raising([this] { tell_reason(); });
}

Speaker::~Speaker() { end(); }

void Speaker::end() {
  transport_.set_before_raising({});
  {
    std::lock_guard lock(mutex_);
    stop_.store(true);
    for (auto& peer : peers_)
      if (peer && peer->hears) peer->hears->nudge();
  }
  ended_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (auto& peer : peers_)
    if (peer && peer->thread.joinable()) peer->thread.join();
}

void Speaker::leave() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(left_, true)) return;
    look_at_host();
    relay_barriers();
    Word word;
    word.kind = Kind::closed;
    word.rank = placement_.ranks[host_][0];
    word.sequence = board_.finished(word.rank);
    say(word);
  }
  // Without the lock: the other leader may be here, too, and its word needs the thread that hears. Nothing is
  // said after this.
  const auto limit = Clock::now() + longest_farewell;
  for (int h = 0; h < placement_.hosts(); ++h)
    if (peers_[h] && !peers_[h]->said.empty()) await(h, *peers_[h]->said.back(), limit);
}

// Until it is on its way. One thread at a time.
void Speaker::await(int h, Said& said, Clock::time_point limit) {
  const Ticker::Watched watched(ticker_, *said.ticket);
  try {
    while (!peers_[h]->gone.load() && Clock::now() < limit && !said.ticket->wait()) continue;
  } catch (const WireError&) {
    peers_[h]->gone.store(true);  // it is not there to hear it
  }
}

// [Note: the reason goes first]
void Speaker::tell_reason() {
  std::vector<std::pair<int, SaidPtr>> told;
  {
    std::lock_guard lock(mutex_);
    if (!left_) look_at_host();
    told.swap(reasons_);
  }
  const auto limit = Clock::now() + longest_telling;
  for (auto& [h, said] : told) await(h, *said, limit);
}

void Speaker::speak() {
  auto last = Clock::now();
  std::unique_lock lock(mutex_);
  while (!stop_.load()) {
    const auto now = Clock::now();
    board_.note_pulse();
    if (!left_) look_at_host();
    look_at_others(now - last);
    if (!left_) ask_about_overdue();
    if (!left_ && now >= next_alive_) {
      next_alive_ = now + alive_every;
      say({});
    }
    const auto pause = !left_ && relay_barriers() ? look_often : look_every;
    last = now;
    if (!stop_.load()) ended_.wait_for(lock, pause);
  }
}

void Speaker::look_at_host() {
  for (int l = 0; l < placement_.size_of(host_); ++l) {
    if (closed_[l]) continue;
    if (transport_.peer_closed(l)) {
      closed_[l] = true;
      Word word;
      word.kind = Kind::closed;
      word.rank = placement_.ranks[host_][l];
      word.sequence = board_.finished(word.rank);
      if (l != 0) say(word);
    } else if (l != 0 && !transport_.broken() && !transport_.peer_alive(l) && !transport_.peer_closed(l)) {
      transport_.mark_broken({ErrorKind::peer,
                              {},
                              placement_.ranks[host_][l],
                              transport_.name(l) + " died (its process ended)"});
    }
  }
  const std::optional<Reason> reason = transport_.reason();
  if (!reason || std::exchange(told_broken_, true) || heard_broken_.load()) return;
  Word word;
  word.kind = Kind::broken;
  word.error = static_cast<uint32_t>(reason->kind);
  word.rank = reason->number;
  word.op = static_cast<uint32_t>(reason->op.kind);
  word.sequence = reason->op.sequence;
  std::strncpy(word.text, reason->text.c_str(), sizeof(word.text) - 1);
  say(word);
  for (int h = 0; h < placement_.hosts(); ++h)
    if (peers_[h] && !peers_[h]->gone.load() && !peers_[h]->said.empty() && silence_of(h) < short_silence)
      reasons_.emplace_back(h, peers_[h]->said.back());
}

Speaker::Clock::duration Speaker::silence_of(int h) const {
  return Clock::now().time_since_epoch() - Clock::duration(peers_[h]->heard.load());
}

void Speaker::look_at_others(Clock::duration since_last_look) {
  const auto now = Clock::now();
  const auto patience = std::chrono::duration<double>(transport_.host_timeout());
  for (int h = 0; h < placement_.hosts(); ++h) {
    if (!peers_[h] || peers_[h]->gone.load()) continue;
    if (since_last_look > longest_pause) peers_[h]->heard.store(now.time_since_epoch().count());
    if (silence_of(h) < patience || transport_.broken()) continue;
    const int leader = placement_.ranks[h][0];
    std::ostringstream text;
    text << placement_.names[h] << " (" << ranks_of(h) << ") has not been heard for "
         << transport_.host_timeout() << " s: its link is lost, or rank " << leader
         << ", which speaks for it, is stopped";
    transport_.mark_broken({ErrorKind::peer, {}, leader, text.str()});
  }
}

std::string Speaker::ranks_of(int h) const {
  const auto& ranks = placement_.ranks[h];
  if (ranks.size() == 1) return "rank " + std::to_string(ranks[0]);
  if (ranks.back() - ranks[0] + 1 == static_cast<int>(ranks.size()))
    return "ranks " + std::to_string(ranks[0]) + " to " + std::to_string(ranks.back());
  std::string text = "ranks";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : " ") + std::to_string(ranks[i]);
  return text;
}

// What is said and not taken for long is dropped: nobody is there to take it.
void Speaker::say(const Word& word) {
  for (int h = 0; h < placement_.hosts(); ++h)
    if (peers_[h]) say(h, word);
}

void Speaker::say(int h, const Word& word) {
  if (peers_[h]->gone.load()) return;
  auto& said = peers_[h]->said;
  if (said.size() == most_said) said.pop_front();
  auto next = std::make_shared<Said>();
  next->word = word;
  try {
    next->ticket = wire_.send(h, tag, reinterpret_cast<std::byte*>(&next->word), sizeof(Word));
    said.push_back(std::move(next));
  } catch (const WireError&) {
    // its thread sees it
  }
}

Speaker::Behind Speaker::behind_here() const {
  Behind behind;
  for (int rank : placement_.ranks[host_]) {
    const uint64_t arrived = board_.arrived(rank);
    if (arrived < behind.sequence) behind = {arrived, {}};
    if (arrived == behind.sequence) behind.ranks.push_back(rank);
  }
  return behind;
}

void Speaker::ask_about_overdue() {
  double timeout = 0;
  const OpInfo op = board_.overdue(timeout);
  if (op.sequence == 0 || transport_.broken()) return;
  if (std::exchange(asked_, op.sequence) != op.sequence) {
    answers_until_ = Clock::now() + longest_answer;
    Word word;
    word.kind = Kind::asks;
    word.sequence = op.sequence;
    say(word);
  }
  Behind behind = behind_here();
  bool all = true;
  for (const auto& peer : peers_) {
    if (!peer || peer->gone.load()) continue;
    all &= peer->answered == asked_;
    if (peer->answered != asked_ || peer->behind.sequence > behind.sequence) continue;
    if (peer->behind.sequence < behind.sequence) behind = {peer->behind.sequence, {}};
    behind.ranks.insert(behind.ranks.end(), peer->behind.ranks.begin(), peer->behind.ranks.end());
  }
  if (behind.sequence >= op.sequence || (!all && Clock::now() < answers_until_)) return;
  std::sort(behind.ranks.begin(), behind.ranks.end());
  std::ostringstream text;
  for (size_t i = 0; i < behind.ranks.size(); ++i)
    text << (i ? ", " : "") << placement_.name(behind.ranks[i]);
  text << " did not arrive within the timeout of " << timeout << " s";
  transport_.mark_broken({ErrorKind::timeout, op, behind.ranks[0], text.str()});
}

void Speaker::answer(int h, uint64_t sequence) {
  const Behind behind = behind_here();
  std::ostringstream text;
  text << behind.sequence;
  for (int rank : behind.ranks) {  // as many as a word has room for
    const std::string next = ' ' + std::to_string(rank);
    if (text.str().size() + next.size() >= sizeof(Word::text)) break;
    text << next;
  }
  Word word;
  word.kind = Kind::answers;
  word.sequence = sequence;
  std::strncpy(word.text, text.str().c_str(), sizeof(word.text) - 1);
  std::lock_guard lock(mutex_);
  if (!left_) say(h, word);
}

void Speaker::take_answer(int h, const Word& word) {
  std::istringstream text(word.text);
  Behind behind;
  text >> behind.sequence;
  for (int rank; text >> rank;) behind.ranks.push_back(rank);
  std::lock_guard lock(mutex_);
  peers_[h]->answered = word.sequence;
  peers_[h]->behind = std::move(behind);
}

void Speaker::hear(int h) {
  ::pthread_setname_np(::pthread_self(), "pycomm-hears");
  Peer& peer = *peers_[h];
  Word word;
  try {
    for (;;) {
      Ticket* ticket = nullptr;
      {
        std::lock_guard lock(mutex_);
        if (stop_.load()) return;
        peer.hears = wire_.recv(h, tag, reinterpret_cast<std::byte*>(&word), sizeof(Word));
        ticket = peer.hears.get();
      }
      while (!ticket->wait())
        if (stop_.load()) break;
      if (stop_.load()) break;
      peer.heard.store(Clock::now().time_since_epoch().count());
      take(h, word);
    }
  } catch (const WireError& error) {
    miss(h, error.what());
  }
  std::lock_guard lock(mutex_);
  peer.hears.reset();
}

void Speaker::take(int h, const Word& word) {
  if (word.kind == Kind::broken) {
    heard_broken_.store(true);
    transport_.mark_broken({static_cast<ErrorKind>(word.error),
                            {static_cast<OpKind>(word.op), word.sequence},
                            word.rank,
                            word.text});
  }
  if (word.kind == Kind::asks) answer(h, word.sequence);
  if (word.kind == Kind::answers) take_answer(h, word);
  if (take_of_barrier(word) || word.kind != Kind::closed) return;
  board_.note_closed(word.rank, word.sequence);
  if (word.rank == placement_.ranks[h][0]) peers_[h]->gone.store(true);
}

// --- monitored barriers: communicator/monitored_barrier.h

// A leader that has its verdict may close the group, and then its host hears nothing. So its verdict is the
// last that its host is told, and is read first: rank 0 answers a leader behind the others of its host.
bool Speaker::relay_barriers() {
  bool going_on = false;
  BarrierLine* lines = board_.barrier().lines;
  for (int h = 0; h < placement_.hosts(); ++h) {
    const auto& ranks = placement_.ranks[h];
    const int leader = ranks[0];
    const uint64_t verdict = lines[leader].verdict.load(std::memory_order_acquire);
    for (int rank : ranks) {
      going_on |= lines[rank].arrival.load(std::memory_order_acquire) != 0;
      if (rank != leader && (h == host_ || host_ == 0)) relay_of_rank(rank, lines[rank]);
    }
    const bool leader_is_new = host_ != 0 || verdict != told_barrier_[leader].verdict;
    if (leader_is_new && (h == host_ || host_ == 0)) relay_of_rank(leader, lines[leader]);
    for (int rank : ranks)  // told at the next look, which is soon
      if (host_ == 0 && h != 0) answer_withdrawal(rank, lines[rank]);
  }
  return going_on;
}

// Says what is new: of a rank here to host 0, there of a rank elsewhere to its host.
void Speaker::relay_of_rank(int rank, BarrierLine& line) {
  const int to = host_ == 0 ? placement_.host_of[rank] : 0;
  if (to == host_) return;
  auto tell = [&](const std::atomic<uint64_t>& word, uint64_t& told, Kind kind) {
    const uint64_t value = word.load(std::memory_order_acquire);
    if (value == 0 || value == std::exchange(told, value)) return;
    Word said;
    said.kind = kind;
    said.rank = rank;
    said.sequence = value;
    const std::atomic<uint64_t>* missing = board_.barrier().missing;
    static_assert(max_world_size / 8 <= sizeof(said.text));
    for (int i = 0; kind == Kind::verdict && i < max_world_size / 64; ++i) {
      const uint64_t bits = missing[i].load(std::memory_order_relaxed);
      std::memcpy(said.text + i * sizeof(bits), &bits, sizeof(bits));
    }
    say(to, said);
  };
  ToldBarrier& told = told_barrier_[rank];
  if (host_ == 0) return tell(line.verdict, told.verdict, Kind::verdict);
  tell(line.arrival, told.arrival, Kind::arrives);
  tell(line.withdrawn, told.withdrawn, Kind::withdraws);
}

// Unless rank 0 has taken the arrival: then its verdict follows, or it gives the arrival back.
void Speaker::answer_withdrawal(int rank, BarrierLine& line) {
  const uint64_t call = line.withdrawn.load(std::memory_order_acquire);
  uint64_t arrival = call * 2;
  if (call == 0 || line.arrival.load(std::memory_order_acquire) != arrival) return;
  for (int i = 0; i < max_world_size / 64; ++i) {
    uint64_t bits = 0;
    for (int p = i * 64; p < std::min(placement_.world_size(), (i + 1) * 64); ++p)
      if (board_.barrier().lines[p].arrival.load(std::memory_order_acquire) == 0)
        bits |= uint64_t{1} << p % 64;
    board_.barrier().missing[i].store(bits, std::memory_order_relaxed);
  }
  if (line.arrival.compare_exchange_strong(arrival, 0))
    line.verdict.store(call * 2, std::memory_order_release);
}

bool Speaker::take_of_barrier(const Word& word) {
  if (word.kind != Kind::arrives && word.kind != Kind::withdraws && word.kind != Kind::verdict) return false;
  const BarrierBoard board = board_.barrier();
  BarrierLine& line = board.lines[word.rank];
  if (word.kind == Kind::arrives) {
    line.calls.store(word.sequence / 2, std::memory_order_release);
    line.arrival.store(word.sequence, std::memory_order_release);
  } else if (word.kind == Kind::withdraws) {
    line.withdrawn.store(word.sequence, std::memory_order_release);
  } else {
    for (int i = 0; i < max_world_size / 64; ++i) {
      uint64_t bits = 0;
      std::memcpy(&bits, word.text + i * sizeof(bits), sizeof(bits));
      board.missing[i].store(bits, std::memory_order_relaxed);
    }
    line.verdict.store(word.sequence, std::memory_order_release);
  }
  ended_.notify_all();
  return true;
}

void Speaker::miss(int h, const std::string& what) {
  if (peers_[h]->gone.exchange(true)) return;
  const auto limit = Clock::now() + until_reason;
  while (!transport_.broken() && !stop_.load() && Clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  if (transport_.broken() || stop_.load()) return;
  const int leader = placement_.ranks[h][0];
  transport_.mark_broken(
      {ErrorKind::peer, {}, leader, placement_.name(leader) + " died (its connection ended: " + what + ")"});
}

}  // namespace pycomm
