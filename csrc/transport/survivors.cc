// survivors.cc -- see survivors.h.
#include "survivors.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "interrupt.h"

namespace pycomm {

namespace {

constexpr double tick = 0.005;  // seconds between looks at the peers' lives
constexpr auto patience = std::chrono::milliseconds(200);  // with a stopped process
constexpr auto grace = std::chrono::milliseconds(500);  // after the deadline, for a verdict that others write
constexpr OpInfo info{OpKind::none, 0};

std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::vector<int> unpack_ranks(const std::string& text) {
  std::istringstream in(text);
  std::vector<int> ranks;
  for (int rank; in >> rank;) ranks.push_back(rank);
  return ranks;
}

std::string pack_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += std::to_string(rank) + ' ';
  return text;
}

std::string seconds(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

// "pid (name) state ...": T for a process that a signal or a debugger has stopped.
bool is_stopped(int pid) {
  std::string line;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), line);
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return false;
  return line[name_end + 2] == 'T' || line[name_end + 2] == 't';
}

const std::string members_word = "members ";

}  // namespace

Survivors::Survivors(std::shared_ptr<Transport> transport, std::vector<int> exclude, bool exactly,
                     double timeout)
    : transport_(std::move(transport)),
      store_(transport_),
      exclude_([&] {
        std::sort(exclude.begin(), exclude.end());
        return std::move(exclude);
      }()),
      exactly_(exactly),
      timeout_(timeout),
      deadline_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                   std::chrono::duration<double>(std::min(timeout, longest_timeout)))),
      rank_(transport_->rank()),
      world_size_(transport_->world_size()),
      stopped_since_(world_size_) {
  for (size_t i = 0; i < exclude_.size(); ++i) {
    const std::string text =
        transport_->where(info) + "shrink: exclude names rank " + std::to_string(exclude_[i]);
    if (exclude_[i] < 0 || exclude_[i] >= world_size_)
      throw std::invalid_argument(text + ", which is not in [0, world_size)");
    if (exclude_[i] == rank_) throw std::invalid_argument(text + ", which is this one; it must not call");
    if (i && exclude_[i] == exclude_[i - 1]) throw std::invalid_argument(text + " twice");
  }
  if (transport_->forked())
    throw std::invalid_argument(transport_->where(info) +
                                "shrink: this communicator was created before a fork; only the parent "
                                "process may use it");
  if (transport_->closed()) raise(ErrorKind::aborted, -1, "the communicator is closed");
  if (exclude_.empty() && !transport_->broken())
    throw std::invalid_argument(transport_->where(info) +
                                "shrink: the group works and no rank is to be left out. Call it after a "
                                "PeerError or CommTimeoutError, or pass `exclude`");
}

double Survivors::seconds_left() const {
  return std::max(0.05, std::chrono::duration<double>(deadline_ - Clock::now()).count());
}

std::vector<int> Survivors::agree() {
  const Word now = look();
  arrive(round_ ? round_ + 1 : now.ended() ? now.round + 1 : now.round);
  for (;;) {
    const Word word = look();
    if (auto members = outcome(word)) return *members;
    if (interrupted()) {
      if (word.state != State::members) give_up(interrupted_text);  // else: without this rank
      raise(ErrorKind::aborted, -1, interrupted_text);
    }
    if (word.round < round_ || word.state == State::claimed) decide(word);
    if (Clock::now() > deadline_ + grace)
      raise(ErrorKind::timeout, -1,
            "the others came to no verdict within the timeout of " + seconds(timeout_) + " s");
    sleep();
  }
}

void Survivors::arrive(uint64_t round) {
  round_ = round;
  store_.set("survivors/exclude", std::to_string(round_) + " " + said_of_exclusion());
  transport_->control(rank_).survivors_arrived.store(round_, std::memory_order_release);
  transport_->ring_all();
}

// What the word says to this rank: the members of a group with it. Nothing: not decided. Raises.
std::optional<std::vector<int>> Survivors::outcome(const Word& word) {
  if (word.round < round_ || word.state == State::claimed) return std::nullopt;
  if (word.state == State::over || word.round > round_) {  // the others are in another round
    arrive(word.ended() ? word.round + 1 : word.round);
    return std::nullopt;
  }
  const auto verdict = verdict_of(word);
  if (!verdict) return std::nullopt;  // the word has turned meanwhile
  if (word.state == State::failed) raise_failure(*verdict);
  members_ = unpack_ranks(verdict->substr(members_word.size()));
  const bool member = in(members_, rank_);
  if (word.state == State::formed)
    raise(ErrorKind::aborted, -1,
          member ? "this group has been shrunk already"
                 : "this rank was left out of the group that " + listed(members_) + " have made without it");
  return member ? std::optional(members_) : std::nullopt;  // who is none waits for formed or over
}

std::optional<std::string> Survivors::verdict_of(const Word& word) const {
  const std::string text = store_.find(word.rank, "survivors/verdict").value_or("");
  const std::string round = std::to_string(word.round) + " ";
  return text.starts_with(round) ? std::optional(text.substr(round.size())) : std::nullopt;
}

// Writes the verdict if nothing keeps it from being written.
void Survivors::decide(const Word& word) {
  const std::vector<Presence> seen = presences();
  const bool late = Clock::now() >= deadline_;
  if (!late && std::count(seen.begin(), seen.end(), Presence::absent)) return;
  if (claim(word)) say(verdict(seen));
}

bool Survivors::claim(const Word& word) {
  const bool others = word.state == State::claimed && word.rank != rank_;
  if (others && !gone(word.rank)) return false;
  return turn(word, {round_, State::claimed, rank_});
}

// After a claim of this rank, which another may have taken over meanwhile.
void Survivors::say(const std::string& verdict) {
  store_.set("survivors/verdict", std::to_string(round_) + " " + verdict);
  const State state = verdict.starts_with(members_word) ? State::members : State::failed;
  turn({round_, State::claimed, rank_}, {round_, state, rank_});
}

bool Survivors::turn(const Word& from, const Word& to) {
  uint64_t expected = from.pack();
  const bool turned = transport_->survivors().compare_exchange_strong(expected, to.pack());
  if (turned) transport_->ring_all();
  return turned;
}

std::string Survivors::verdict(const std::vector<Presence>& seen) const {
  std::vector<int> members, absent, lost;
  for (int p = 0; p < world_size_; ++p) {
    if (seen[p] == Presence::arrived) members.push_back(p);
    else if (seen[p] == Presence::absent) absent.push_back(p);
    else if (seen[p] != Presence::excluded) lost.push_back(p);
  }
  std::ostringstream text;
  if (!absent.empty()) {
    text << static_cast<uint32_t>(ErrorKind::timeout) << ' ' << absent[0] << ' ' << listed(absent)
         << (absent.size() == 1 ? " lives and" : " live and") << " did not come within the timeout of "
         << seconds(timeout_) << " s. Call shrink() again, with `exclude` to go on without";
    return text.str();
  }
  for (int p : members) {
    const std::string theirs = store_.find(p, "survivors/exclude").value_or("");
    const std::string mine = std::to_string(round_) + " " + said_of_exclusion();
    if (theirs == mine) continue;
    text << static_cast<uint32_t>(ErrorKind::mismatch) << ' ' << p << " rank " << rank_ << " leaves out "
         << said_of_exclusion() << ", rank " << p << " " << theirs.substr(theirs.find(' ') + 1)
         << ". All survivors must pass equal ranks";
    return text.str();
  }
  if (exactly_ && !lost.empty()) {
    text << static_cast<uint32_t>(ErrorKind::peer) << ' ' << lost[0] << ' ' << listed(lost)
         << (lost.size() == 1 ? " is" : " are") << " lost, too. Pass all ranks that are to be left out";
    return text.str();
  }
  return members_word + pack_ranks(members);
}

std::vector<Survivors::Presence> Survivors::presences() {
  std::vector<Presence> seen;
  for (int p = 0; p < world_size_; ++p) seen.push_back(presence(p));
  return seen;
}

Survivors::Presence Survivors::presence(int peer) {
  if (in(exclude_, peer)) return Presence::excluded;
  if (peer == rank_) return Presence::arrived;
  if (transport_->peer_closed(peer)) return Presence::left;
  if (!transport_->peer_alive(peer)) return Presence::dead;
  if (stopped_for_long(peer)) return Presence::stopped;
  const bool arrived = transport_->control(peer).survivors_arrived.load(std::memory_order_acquire) >= round_;
  return arrived ? Presence::arrived : Presence::absent;
}

// It will do nothing more for this group, or not soon.
bool Survivors::gone(int peer) {
  return !transport_->peer_alive(peer) || transport_->peer_closed(peer) || stopped_for_long(peer);
}

// The number of a process means something only where its memory could be read by that number (join.cc).
bool Survivors::stopped_for_long(int peer) {
  const RankControl &mine = transport_->control(rank_), &other = transport_->control(peer);
  const bool known = mine.cma_ok.load(std::memory_order_relaxed) && other.process_token != mine.process_token;
  if (!known || !is_stopped(other.pid)) {
    stopped_since_[peer].reset();
    return false;
  }
  if (!stopped_since_[peer]) stopped_since_[peer] = Clock::now();
  return Clock::now() - *stopped_since_[peer] >= patience;
}

bool Survivors::form(bool made) {
  if (made) {
    transport_->control(rank_).survivors_formed.store(round_, std::memory_order_release);
    transport_->ring_all();
  }
  for (;;) {
    const Word word = look();
    if (word.round > round_ || word.state == State::over) return false;
    if (word.state == State::formed) return true;
    if (word.state == State::failed)
      if (const auto verdict = verdict_of(word)) raise_failure(*verdict);
    // By give_up(), and not followed by a verdict.
    const bool abandoned = word.state == State::claimed && word.rank != rank_ && gone(word.rank);
    bool all = true, lost = !made;
    for (int p : members_) {
      if (transport_->control(p).survivors_formed.load(std::memory_order_acquire) >= round_) continue;
      all = false;
      lost |= p != rank_ && gone(p);
    }
    if (word.state == State::members && all) turn(word, {round_, State::formed, word.rank});
    else if (abandoned || (word.state == State::members && lost))
      turn(word, {round_, State::over, word.rank});
    else if (interrupted()) give_up(interrupted_text);
    else if (Clock::now() > deadline_ + grace)
      give_up("not all others had the new group within the timeout of " + seconds(timeout_) + " s");
    else sleep();
  }
}

void Survivors::give_up(const std::string& why) {
  for (;;) {
    const Word word = look();
    if (word.state == State::formed || (word.state == State::failed && word.round >= round_)) return;
    if (word.ended()) round_ = std::max(round_, word.round + 1);  // all come to the next one
    if (claim(word)) {
      const std::string text = " rank " + std::to_string(rank_) + " gave up: " + why;
      return say(std::to_string(static_cast<uint32_t>(ErrorKind::peer)) + " " + std::to_string(rank_) + text);
    }
    if (Clock::now() > deadline_ + grace) return;
    sleep();
  }
}

std::string Survivors::said_of_exclusion() const { return exclude_.empty() ? "nobody" : listed(exclude_); }

bool Survivors::in(const std::vector<int>& ranks, int rank) const {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

void Survivors::sleep() {
  const uint64_t seen = transport_->survivors().load(std::memory_order_acquire);
  transport_->sleep_unless([&] { return transport_->survivors().load(std::memory_order_acquire) != seen; },
                           tick);
}

void Survivors::raise(ErrorKind kind, int peer, const std::string& text) const {
  transport_->raise(kind, info, peer, "shrink: " + text);
}

void Survivors::raise_failure(const std::string& verdict) const {
  std::istringstream in(verdict);
  uint32_t kind = 0;
  int peer = -1;
  std::string text;
  in >> kind >> peer;
  in.get();
  std::getline(in, text, '\0');
  raise(static_cast<ErrorKind>(kind), peer, text);
}

}  // namespace pycomm
