// stress_life.h -- for stress.cc: what begins and ends while a group works.
//
//   several_threads   one group, three threads of each rank: one sends and receives, one runs synchronous
//                     collectives whose tasks lie on its stack, one waits for what the second has issued
//   short_life        a group of one moment: registered memory that is used and dropped, works and messages
//                     that nobody waits for, close() as soon as this rank has done its part
//
// A task on a stack, and a message whose last handle goes at once, are gone the moment they are done: a
// thread that still touches them is seen.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "../../csrc/collectives/collectives.h"
#include "../../csrc/collectives/send_recv.h"
#include "../../csrc/communicator/registered.h"

namespace pycomm::life {

inline std::byte* bytes(std::vector<int32_t>& values) { return reinterpret_cast<std::byte*>(values.data()); }

inline Op all_reduce_of(std::byte* data, size_t count) {
  Op op;
  op.kind = OpKind::all_reduce;
  op.dtype = DType::i32;
  op.in = op.out = data;
  op.count = count;
  return op;
}

template <class Fail>
void expect_all(const int32_t* values, size_t count, int32_t expected, const char* what, const Fail& fail) {
  for (size_t i = 0; i < count; ++i)
    if (values[i] != expected) return fail(std::string(what) + ": " + std::to_string(values[i]));
}

// Around the ring of ranks; nothing is kept longer than it must be.
template <class Fail>
void ring_of_messages(Communicator& comm, int first_tag, const Fail& fail) {
  Messages& messages = messages_of(comm);
  const int n = comm.world_size(), next = (comm.rank() + 1) % n, before = (comm.rank() + n - 1) % n;
  constexpr size_t counts[] = {1, 239, 241, 3000, 20000};
  for (int i = 0; i < 5; ++i) {
    std::vector<int32_t> sent(counts[i], comm.rank() + i), received(counts[i], -1);
    const MessageSpec to{DType::i32, counts[i], next, first_tag + i, 0};
    const MessageSpec from{DType::i32, counts[i], before, first_tag + i, 0};
    MessageWorkPtr recv = messages.recv(bytes(received), from, {});
    MessageWorkPtr send = messages.send(bytes(sent), to, {});
    recv->wait();
    recv.reset();
    send->wait();
    send.reset();
    expect_all(received.data(), counts[i], before + i, "ring of messages", fail);
  }
}

template <class Fail>
void several_threads(Communicator& comm, int first_tag, const Fail& fail) {
  constexpr int number = 12;
  const int n = comm.world_size(), total = n * (n - 1) / 2;
  std::vector<std::vector<int32_t>> data(number);
  std::vector<std::shared_ptr<CollectiveTask>> issued(number);
  std::atomic<int> there{0};
  auto guarded = [&](const char* what, auto body) {
    try {
      body();
    } catch (const std::exception& error) {
      there.store(number);
      fail(std::string(what) + " threw " + error.what());
    }
  };
  std::thread messenger([&] { guarded("messenger", [&] { ring_of_messages(comm, first_tag, fail); }); });
  std::thread waiter([&] {
    guarded("waiter", [&] {
      for (int i = 0; i < number; ++i) {
        while (there.load() <= i) std::this_thread::yield();
        if (!issued[i]) return;
        std::shared_ptr<CollectiveTask> task = std::move(issued[i]);
        task->wait();
        task.reset();
        expect_all(data[i].data(), data[i].size(), total + i * n, "waiter", fail);
      }
    });
  });
  guarded("caller", [&] {
    for (int i = 0; i < number; ++i) {
      data[i].assign(i % 3 ? 7 : 30000, comm.rank() + i);
      auto task = std::make_shared<CollectiveTask>(comm, all_reduce_of(bytes(data[i]), data[i].size()));
      issued[i] = task;
      comm.issue(std::move(task));
      there.store(i + 1);
      std::vector<int32_t> own(i % 2 ? 5 : 20000, comm.rank());
      run(comm, all_reduce_of(bytes(own), own.size()));
      expect_all(own.data(), own.size(), total, "caller", fail);
    }
  });
  messenger.join();
  waiter.join();
}

template <class Fail>
void short_life(const std::shared_ptr<Communicator>& comm, const Fail& fail) {
  const int rank = comm->rank(), ranks = comm->world_size();
  const int total = ranks * (ranks - 1) / 2;
  for (size_t count : {size_t{700}, size_t{50000}}) {
    const RegisteredBuffer buffer = allocate_registered(*comm, count * sizeof(int32_t));
    auto* values = reinterpret_cast<int32_t*>(buffer.data);
    for (int again = 0; again < 2; ++again) {
      std::fill(values, values + count, rank);
      run(*comm, all_reduce_of(buffer.data, count));
      expect_all(values, count, total, "registered", fail);
    }
    if (rank % 2) comm->transport().drop_region(buffer.region);  // else with the group
  }
  std::vector<int32_t> forgotten(20000, rank), small(3, rank), last(1, rank);
  comm->issue(std::make_shared<CollectiveTask>(*comm, all_reduce_of(bytes(forgotten), forgotten.size())));
  comm->issue(std::make_shared<CollectiveTask>(*comm, all_reduce_of(bytes(small), small.size())));
  if (ranks > 1) ring_of_messages(*comm, 0, fail);
  run(*comm, all_reduce_of(bytes(last), 1));  // comes behind both
  expect_all(forgotten.data(), forgotten.size(), total, "forgotten", fail);
  expect_all(small.data(), small.size(), total, "forgotten", fail);
  comm->close();
}

}  // namespace pycomm::life
