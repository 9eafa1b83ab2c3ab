// join.h -- how the ranks of a group come together.
//
// In order:
//   1  the ranks find each other and exchange their records (rendezvous.h): all know the same and decide
//      alike. Those of several hosts go on in hosts/join.h, those of one with
//   2  every rank maps the shared memory, says `joined` and waits for all
//   3  every rank tries to reach the memory of every peer, says `ready` with the result and waits for all
//   4  the records leave the store; from here on only shared memory is used
//
// Whoever fails, for whatever reason and wherever, says so in the store and, from step 2 on, in the shared
// memory: nobody waits for it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "rendezvous.h"
#include "transport.h"

namespace pycomm {

class Joining {
 public:
  // Step 1. Blocks until all ranks have come. Collective, as all of it.
  Joining(Store& store, int rank, int world_size, const TransportOptions& options);
  Joining(const Joining&) = delete;

  bool one_host() const;
  const std::vector<Record>& records() const { return records_; }
  std::unique_ptr<Transport> transport();  // of ranks on one host: the other steps

  const Identity& identity() const { return identity_; }
  const WaitScope& scope() const { return scope_; }
  Rendezvous& rendezvous() { return *rendezvous_; }
  // Runs a step; if it throws, all ranks are told why, and it throws a CommError.
  template <class Step>
  auto telling(const Step& step) {
    try {
      return step();
    } catch (const CommError& error) {
      tell(error);
    } catch (const std::exception& error) {
      tell_own(error);
    }
  }

 private:
  [[noreturn]] void tell(const CommError& error);
  [[noreturn]] void tell_own(const std::exception& error);

  const TransportOptions options_;
  const Identity identity_;
  WaitScope scope_;
  std::optional<Rendezvous> rendezvous_;
  std::vector<Record> records_;
  std::unique_ptr<Transport> transport_;  // while it is made
};

}  // namespace pycomm
