// rendezvous.cc -- see rendezvous.h.
#include "rendezvous.h"

#include <pthread.h>

#include <algorithm>
#include <ctime>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "interrupt.h"

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto look_every = std::chrono::milliseconds(20);
constexpr auto shortest_pause = std::chrono::microseconds(100),
               longest_pause = std::chrono::microseconds(5000);
// For the locks of a process whose store has just gone with it: the kernel closes descriptors one by one.
constexpr auto until_locks_fall = std::chrono::milliseconds(200);
constexpr size_t most_earlier_lives = 16;
constexpr int most_served_at_once = 64;
const char* const no_attempt = "-";

// The same for all processes of a host.
int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

// What this process knows of tries beyond a single creation.
struct Memory {
  int64_t started = now_ns();
  std::mutex mutex;
  std::set<std::pair<std::string, int>> told;  // of which failed tries its ranks have been told

  static Memory*& instance() {
    static Memory* memory = [] {
      ::pthread_atfork(nullptr, nullptr, [] { instance() = new Memory; });
      return new Memory;
    }();
    return memory;
  }
};
[[maybe_unused]] Memory* const from_the_start = Memory::instance();

bool first_told(const std::string& attempt, int rank) {
  Memory& memory = *Memory::instance();
  std::lock_guard guard(memory.mutex);
  return memory.told.emplace(attempt, rank).second;
}

}  // namespace

Rendezvous::Offer Rendezvous::Offer::unpack(const std::string& text) {
  const size_t first = text.find('\n'), second = text.find('\n', first + 1);
  return {text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)};
}

Rendezvous::Rendezvous(Store& store, const Identity& identity, const WaitScope& scope,
                       const std::string& place)
    : store_(store),
      identity_(identity),
      scope_(scope),
      prefix_("pycomm/" + identity.group + "/" + place),
      attempt_(identity.rank == 0 ? random_token() : ""),
      records_(identity.world_size),
      locked_(identity.world_size) {}

std::vector<Record> Rendezvous::meet(Record mine) {
  earlier_lives_ = Life::hold_again(most_earlier_lives);
  for (const auto& life : earlier_lives_) mine.lives.push_back(life->ref());
  host_ = mine.host;
  identity_.rank == 0 ? lead(mine) : follow(mine);
  std::vector<Record> records;
  for (int p = 0; p < identity_.world_size; ++p) {
    if (!records_[p]) {
      await([&] { return store_.has({key(p)}); }, [&] { raise_missing(p); });
      records_[p] = Record::unpack(store_.get(key(p)));
    }
    records.push_back(*records_[p]);
  }
  listener_.reset();
  return records;
}

void Rendezvous::lead(const Record& mine) {
  listener_.emplace();
  life_ = std::make_shared<Life>(attempt_, Life::create_file(), 0);
  memory_file_ = create_memory_file();
  publish(mine);
  store_.set(prefix_ + "leader", Offer{attempt_, listener_->name(), mine.host}.pack());
  offered_ = true;
}

void Rendezvous::follow(const Record& mine) {
  const auto found = [&] {
    if (!store_.has({prefix_ + "leader"})) return false;
    const std::string text = store_.get(prefix_ + "leader");
    if (text == no_attempt) return false;
    const Offer offer = Offer::unpack(text);
    return !is_over(offer.attempt) && take_part(offer);
  };
  await(found, [this] { raise_late(0, std::to_string(identity_.number(0))); });
  publish(mine);
}

// A try that has failed, or whose leader has gone. Raises the failure if this rank must be told.
bool Rendezvous::is_over(const std::string& attempt) {
  if (over_.count(attempt)) return true;
  const auto failure = read_failure(attempt);
  if (!failure) return false;
  over_.insert(attempt);
  last_failure_ = failure->error.what();
  const bool earlier_call = !first_told(attempt, identity_.rank);
  const bool earlier_process = failure->when < Memory::instance()->started;
  if (failure->error.kind != ErrorKind::timeout && !earlier_call && !earlier_process) throw failure->error;
  return true;
}

// False: its leader has gone.
bool Rendezvous::take_part(const Offer& offer) {
  attempt_ = offer.attempt;
  if (offer.host != host_) return true;
  try {
    if (const OwnedFd socket = connect_to(offer.socket, scope_.deadline)) {
      std::vector<OwnedFd> files = receive_fds(socket.get(), scope_.deadline);
      if (files.size() != 2) raise_dead(0);
      life_ = std::make_shared<Life>(attempt_, std::move(files[0]), identity_.rank);
      memory_file_ = std::move(files[1]);
      return true;
    }
    over_.insert(attempt_);
    attempt_.clear();
    return false;
  } catch (const TooLate&) {
    raise_late(0, std::to_string(identity_.number(0)));
  }
}

// After the lock: who reads the record relies on it.
void Rendezvous::publish(const Record& mine) {
  records_[identity_.rank] = mine;
  store_.set(key(identity_.rank), mine.pack());
}

void Rendezvous::serve(std::chrono::nanoseconds wait) {
  for (int i = 0; i < most_served_at_once; ++i) {
    const OwnedFd peer = listener_->accept(i == 0 ? wait : std::chrono::nanoseconds(0));
    if (!peer) return;
    send_fds(peer.get(), {life_->fd(), memory_file_.get()});
  }
}

std::unique_ptr<SharedMemory> Rendezvous::share_memory(size_t nbytes) {
  if (identity_.rank == 0) resize_memory_file(memory_file_.get(), nbytes);
  else
    await([this] { return memory_file_bytes(memory_file_.get()) > 0; },
          [this] { raise_late(0, std::to_string(identity_.number(0))); });
  auto memory = std::make_unique<SharedMemory>(memory_file_.get());
  memory_file_.reset();
  return memory;
}

Lives Rendezvous::lives() const {
  Lives lives{life_, {}};
  for (int p = 0; p < identity_.world_size; ++p) lives.bytes.push_back(p);
  return lives;
}

Lives Rendezvous::lasting_lives(const std::vector<Record>& records) {
  const auto same_process = [&](const Record& r) { return r.token == records[0].token; };
  if (std::all_of(records.begin(), records.end(), same_process)) return {};
  for (const LifeRef& wanted : records[0].lives) {  // all go through the same list, and find the same
    Lives lives;
    for (const Record& record : records)
      for (const LifeRef& ref : record.lives)
        if (ref.name == wanted.name) lives.bytes.push_back(ref.byte);
    if (lives.bytes.size() != records.size()) continue;
    for (auto& own : earlier_lives_)
      if (own->ref().name == wanted.name) lives.life = std::move(own);
    return lives;
  }
  return lives();
}

// The leader's word stays, for the next group of this name: a key that may go could not be read safely.
void Rendezvous::complete() {
  store_.remove(key(identity_.rank));
  if (identity_.rank == 0) store_.set(prefix_ + "leader", no_attempt);
}

// --- waiting, and what ends it

void Rendezvous::await(const std::function<bool()>& ready, const std::function<void()>& give_up) {
  std::chrono::microseconds pause = shortest_pause;
  auto next_look = Clock::now();
  for (;;) {
    const auto now = Clock::now();
    try {
      if (ready()) return;
      if (now > scope_.deadline) give_up();
      if (interrupted())
        identity_.raise(ErrorKind::aborted, scope_.op, -1,
                        std::string("creating the group: ") + interrupted_text);
      if (now >= next_look) {
        look();
        next_look = now + look_every;
      }
    } catch (const CommError&) {
      throw;
    } catch (const std::exception&) {  // of the store
      while (Clock::now() < now + until_locks_fall) {
        store_.watch();
        look_at_lives();
        std::this_thread::sleep_for(shortest_pause);
      }
      throw;
    }
    if (listener_) serve(pause);
    else std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, longest_pause);
  }
}

void Rendezvous::look() {
  if (const auto failure = told()) throw *failure;
  store_.watch();
  if (!attempt_.empty()) look_at_lives();
}

// Rank 0 holds its lock since before it handed out the file, the others since before their records; a lock
// that was seen tells as much as a record.
void Rendezvous::look_at_lives() {
  const auto& own = records_[identity_.rank];
  for (int p = 0; life_ && p < identity_.world_size; ++p) {
    if (p == identity_.rank) continue;
    const bool joined = p == 0 || locked_[p] || (records_[p] && own && records_[p]->host == own->host);
    const bool held = life_->held(p);
    if (joined && !held) raise_dead(p);
    locked_[p] = held;
  }
}

void Rendezvous::raise_dead(int peer) {
  if (const auto failure = told()) throw *failure;  // it lives, and has given up
  identity_.raise(ErrorKind::peer, scope_.op, peer,
                  "creating the group: " + identity_.name(peer) + " died (its process ended)");
}

void Rendezvous::raise_missing(int first) {
  std::string missing;
  for (int p = first; p < identity_.world_size; ++p)
    if (p != identity_.rank && !store_.has({key(p)}))
      missing += (missing.empty() ? "" : ", ") + std::to_string(identity_.number(p));
  raise_late(first, missing);
}

void Rendezvous::raise_late(int first, const std::string& missing) {
  std::ostringstream text;
  text << "creating the group: rank(s) " << missing << " did not arrive within the timeout of "
       << scope_.timeout << " s";
  if (!last_failure_.empty()) text << "; an earlier try failed: " << last_failure_;
  identity_.raise(ErrorKind::timeout, scope_.op, first, text.str());
}

// --- telling

// "kind peer reporter when\ntext". A failure of the rank's own is to the others that of a peer.
void Rendezvous::tell(const CommError& error) {
  if (attempt_.empty()) return;
  first_told(attempt_, identity_.rank);
  const bool own = error.kind == ErrorKind::none;
  const std::string where = identity_.where(error.op),
                    rank = std::to_string(identity_.number(identity_.rank));
  std::string text = error.what();
  if (text.starts_with(where)) text.erase(0, where.size());
  std::ostringstream out;
  out << static_cast<uint32_t>(own ? ErrorKind::peer : error.kind) << ' '
      << (own ? identity_.number(identity_.rank) : error.peer) << ' ' << rank << ' ' << now_ns() << '\n'
      << (own ? "rank " + rank + " failed: " : "") << text;
  try {
    if (store_.has({key("failed")})) return;
    store_.set(key("failed"), out.str());
    if (identity_.rank == 0 && !offered_) store_.set(prefix_ + "leader", Offer{attempt_, "", host_}.pack());
    store_.has({key("failed")});  // a store may only queue what it is given: once it answers, all is there
  } catch (const std::exception&) {
    // the others see that the lock falls
  }
}

std::optional<CommError> Rendezvous::told() {
  try {
    if (attempt_.empty()) return std::nullopt;
    const auto failure = read_failure(attempt_);
    if (!failure) return std::nullopt;
    first_told(attempt_, identity_.rank);
    return failure->error;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::optional<Rendezvous::Failure> Rendezvous::read_failure(const std::string& attempt) {
  const std::string failed = prefix_ + attempt + "/failed";
  if (!store_.has({failed})) return std::nullopt;
  std::istringstream in(store_.get(failed));
  uint32_t kind = 0;
  int peer = -1, reporter = -1;
  int64_t when = 0;
  std::string text;
  in >> kind >> peer >> reporter >> when;
  in.get();
  std::getline(in, text, '\0');
  if (reporter != peer) text += " (seen by rank " + std::to_string(reporter) + ")";
  return Failure{identity_.error_about(static_cast<ErrorKind>(kind), scope_.op, peer, text), when};
}

}  // namespace pycomm
