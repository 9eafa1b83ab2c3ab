// deadlines.cc -- see deadlines.h.
#include "deadlines.h"

#include <algorithm>
#include <bit>
#include <sstream>

#include "sync_words.h"

namespace pycomm::cuda {

double Deadlines::note(double timeout) {
  if (timeout <= 0) timeout = setup_.comm.transport().timeout();
  longest_ = std::max(longest_, timeout);
  return timeout;
}

void Deadlines::expect(Line& line, uint32_t busy, double timeout) {
  line.timeouts.emplace_back(busy, note(timeout));
}

void Deadlines::look() {
  if (!setup_.uses_sync_words() || faults_.broken()) return;
  const auto now = std::chrono::steady_clock::now();
  for (Line* line : lines_.all()) look_at(*line, now);
}

// Which ranks this line waits for, and which of them have written their word.
Deadlines::Arrivals Deadlines::arrivals_of(const Line& line) const {
  const int n = setup_.world_size(), me = setup_.rank(), message = line.number - 1;
  Arrivals arrivals{};
  auto look_at = [&](int set, int p) {
    arrivals.come |= static_cast<uint32_t>(words_.word(sync_word(n, set, p, me)).load() != 0) << p;
  };
  for (int p = 0; p < n; ++p) {
    if (line.number == 0 ? p == me : p != message % n) continue;
    arrivals.wanted |= 1u << p;
    if (line.number == 0) look_at(0, p), look_at(1, p);
    else look_at(message < n ? set_of_receivers : set_of_senders, p);
  }
  return arrivals;
}

void Deadlines::look_at(Line& line, Time now) {
  const uint32_t busy = words_.word(words_.busy_word(line.number)).load();
  const auto [wanted, come] = arrivals_of(line);
  if (!busy && line.eager.event && faults_.reached(line.eager.event)) line.timeouts.clear();
  if (!busy || busy != line.busy || come != line.arrived) {
    line.busy = busy;
    line.arrived = come;
    line.since = now;
    return;
  }
  const double timeout = timeout_of(line, busy);
  if (std::chrono::duration<double>(now - line.since).count() < timeout) return;
  const int me = setup_.rank();
  const uint32_t missing = wanted & ~come;
  std::ostringstream text;
  if (missing) text << names_of(missing) << " did not arrive within the timeout of " << timeout << " s";
  else text << "the device of rank " << me << " did not finish within the timeout of " << timeout << " s";
  const OpInfo info{static_cast<OpKind>(busy & ((1u << busy_kind_bits) - 1)), busy >> busy_kind_bits};
  faults_.note(ErrorKind::timeout, info, missing ? std::countr_zero(missing) : me, text.str());
}

// Of the operation that the busy word names; of a replayed one it is not known.
double Deadlines::timeout_of(Line& line, uint32_t busy) const {
  const auto found = std::find_if(line.timeouts.begin(), line.timeouts.end(),
                                  [busy](const auto& each) { return each.first == busy; });
  if (found == line.timeouts.end()) return longest_;
  line.timeouts.erase(line.timeouts.begin(), found);
  return line.timeouts.front().second;
}

}  // namespace pycomm::cuda
