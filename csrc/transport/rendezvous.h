// rendezvous.h -- how the ranks of a group find each other, up to the memory that they share.
//
// A creation of a group may fail on some ranks and be tried again under the same name, as often as it may. So
// every try has a name of its own, which rank 0, its leader, gives it. In the store, under pycomm/<group>/:
//
//     leader            the leader's try, socket and host; "-" once the group is complete
//     <try>/<rank>      record of the rank (record.h); goes when the group is complete
//     <try>/failed      why the try failed: whoever fails says it here, once
//
//     leader                                          every other rank
//     makes life file, memory file, socket            reads `leader`; passes over a try that has failed or
//     locks its byte of the life file                 whose socket is closed, and waits for another
//     record, then `leader`  ----------------------->
//     hands both files to all who connect  <--------> connects, takes them, locks its byte
//                                                     record
//     reads all records                    <--------> reads all records
//     gives the memory file its size       ---------> sees the size
//
// What can go wrong:
//   - A rank does not come: all others wait until their deadline. Whoever has the shortest tells the others.
//   - A rank fails by itself (no descriptor, no memory): it says so in `failed`, and only then lets go of its
//     lock. Everybody who waits looks there every 20 ms. Whoever comes to the try afterwards is told, too,
//     once: its call belongs to this try. But not of a timeout, for which it may have been missing itself,
//     and not a process that has been started since: they wait for the next try.
//   - A rank dies. Whoever has written its record holds its lock, so all who have read the record, and hold
//     the life file, see the death within a look; so do those who have seen the lock before there is a
//     record. Whoever dies before its lock has never been known to anybody, and a leader that died before
//     anybody had its files cannot be told from an earlier one that is about to come again: both count as not
//     come.
//   - A rank of another host, network namespace or user cannot connect. It reads the leader's host first, and
//     then only writes its record; all see from the records that they cannot form a group.
//   - The store goes with the process that has it, often rank 0's: then the locks say who died.
//   - Strangers connect to the socket: those of other users are dropped, those of this user get the files,
//     which they could have anyway; neither is counted, so they cost time only, up to the deadline.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "../memory/fd_channel.h"
#include "../memory/shared_memory.h"
#include "../store/store.h"
#include "health.h"
#include "record.h"
#include "wait.h"

namespace pycomm {

class Rendezvous {
 public:
  // `place`: for the keys of a part of a group.
  Rendezvous(Store& store, const Identity& identity, const WaitScope& scope, const std::string& place = "");

  // The records of all ranks, by rank. Throws CommError.
  std::vector<Record> meet(Record mine);
  // The memory that all share: of `nbytes` if rank 0 agrees. Only after meet(), for ranks of one host.
  std::unique_ptr<SharedMemory> share_memory(size_t nbytes);
  Lives lives() const;  // while the group is being made
  // In the complete group: a life file that all processes had before, else the new one.
  Lives lasting_lives(const std::vector<Record>& records);
  void complete();  // takes the record out of the store
  const std::string& attempt() const { return attempt_; }  // a word that is new for every try
  void look();  // at what ends this try: throws what another has told, or that one has died

  // Tells the others that this rank gives up, if nobody has told yet. Both are silent about a store that
  // fails.
  void tell(const CommError& error);
  std::optional<CommError> told();  // by another rank

 private:
  struct Offer {  // what the leader writes
    std::string attempt, socket, host;
    std::string pack() const { return attempt + "\n" + socket + "\n" + host; }
    static Offer unpack(const std::string& text);
  };

  std::string key(const std::string& last) const { return prefix_ + attempt_ + "/" + last; }
  std::string key(int rank) const { return key(std::to_string(rank)); }
  void lead(const Record& mine);
  void follow(const Record& mine);
  bool take_part(const Offer& offer);
  bool is_over(const std::string& attempt);
  void publish(const Record& mine);
  void serve(std::chrono::nanoseconds wait);
  [[noreturn]] void raise_dead(int peer);
  // Returns once ready() is true; raises what ends the try before. give_up() raises: the deadline has passed.
  void await(const std::function<bool()>& ready, const std::function<void()>& give_up);
  void look_at_lives();
  [[noreturn]] void raise_missing(int first);
  [[noreturn]] void raise_late(int first, const std::string& missing);
  struct Failure {
    CommError error;
    int64_t when;  // see now_ns() in rendezvous.cc
  };
  std::optional<Failure> read_failure(const std::string& attempt);

  Store& store_;
  const Identity& identity_;
  const WaitScope& scope_;
  const std::string prefix_;
  std::string host_;
  std::string attempt_;  // empty before this rank takes part in one
  bool offered_ = false;  // the leader's
  std::set<std::string> over_;  // tries that have failed, or whose leader is gone
  std::string last_failure_;  // of one of them
  std::optional<Listener> listener_;  // of the leader, while others may want the files
  OwnedFd memory_file_;
  std::shared_ptr<Life> life_;
  std::vector<std::unique_ptr<Life>> earlier_lives_;
  std::vector<std::optional<Record>> records_;  // that were read
  std::vector<bool> locked_;  // whose locks have been seen in this try
};

}  // namespace pycomm
