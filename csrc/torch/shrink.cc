// shrink.cc -- see shrink.h.
#include "shrink.h"

#include <algorithm>
#include <stdexcept>

#include "../transport/watched_store.h"

namespace pycomm {

namespace {

TransportOptions options_of(const Transport& old, const Survivors& survivors) {
  TransportOptions options = old.options();
  options.name += "/shrunk" + std::to_string(survivors.round());
  options.timeout = survivors.seconds_left();
  options.staging_bytes = old.budget_bytes();  // a process's first group had more, and stays its first
  return options;
}

// Nothing: another has died, or has failed and said so.
std::shared_ptr<Communicator> join(Survivors& survivors, Transport& old, const std::vector<int>& members) {
  const auto rank = static_cast<int>(std::find(members.begin(), members.end(), old.rank()) - members.begin());
  const auto size = static_cast<int>(members.size());
  const TransportOptions options = options_of(old, survivors);
  WatchedStore store(survivors.store(), old, members, members, {options.name, rank, size, {}});
  try {
    auto comm = connect(store, rank, size, options, {});
    comm->transport().set_timeout(old.timeout());
    return comm;
  } catch (const CommError& error) {
    if (error.kind == ErrorKind::peer && error.peer != rank) return nullptr;
    survivors.give_up(error.what());
    throw;
  } catch (const std::exception& error) {
    survivors.give_up(error.what());
    throw;
  }
}

}  // namespace

Shrunk shrink(const std::shared_ptr<Communicator>& comm, const std::vector<int>& exclude, bool exactly,
              double timeout) {
  Transport& old = comm->transport();
  if (HostsSide* hosts = comm->hosts_side()) {
    if (const auto after = hosts->after()) return after->shrink(comm, exclude, exactly, timeout);
    throw std::invalid_argument(old.where({}) + "shrink is not there for threads of one process that play " +
                                hosts->describe() + "; processes have it");
  }
  Survivors survivors(comm->shared_transport(), exclude, exactly, timeout);
  for (;;) {
    const std::vector<int> members = survivors.agree();
    std::shared_ptr<Communicator> made = join(survivors, old, members);
    if (!survivors.form(made != nullptr)) continue;
    comm->close();
    return {std::move(made), members};
  }
}

}  // namespace pycomm
