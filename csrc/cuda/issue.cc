// issue.cc -- see issue.h.
#include "issue.h"

#include <stdexcept>

namespace pycomm::cuda {

namespace {
constexpr int high_priority = -1;  // communication first: somebody waits for it on another rank
}  // namespace

Mark Issuer::enqueue(Line& line, const LaunchPlan& plan, const OpInfo& info, const Issue& issue,
                     TracedCall& call) {
  ContextGuard guard(state_.setup.device);
  refuse_shared_stream(info, issue.stream);
  if (issue.async_op && !line.own) count_own_stream(info, line);
  ++line.issued;
  Mark end{nullptr, issue.stream, {}};
  try {
    end.capture = capture_of(issue.stream);
    end.stream = enter(line, issue, end.capture);
    call.begins(end.stream, end.capture);
    const auto busy =
        static_cast<uint32_t>(info.sequence << busy_kind_bits | static_cast<uint32_t>(info.kind));
    const bool in_order = plan.in_order;
    if (in_order && !end.capture.active) state_.deadlines.expect(line, busy, issue.timeout);
    const size_t busy_word = state_.words.busy_word(line.number);
    Words words;
    if (in_order) words.push_back({false, busy_word, busy});
    run_steps(plan, words, end.stream);
    if (in_order) words.push_back({false, busy_word, 0});
    flush(words, end.stream);
    if (issue.after) issue.after(end.stream);
    call.ends(end.stream);
    end.event = state_.events->record(end.stream);
  } catch (const std::exception& error) {
    // Some steps are in the stream, others are not: this rank is out of step with its peers.
    state_.setup.comm.abort(std::string(to_string(info.kind)) + " could not be enqueued: " + error.what());
    end.event = state_.events->record_if_possible(end.stream);
    if (end.event) (end.capture.active ? line.captured : line.eager) = end;
    throw;
  }
  (end.capture.active ? line.captured : line.eager) = end;
  return end;
}

// Ranks that are threads of one process must not share a stream: the second rank's kernel would be behind the
// first's, which waits for it.
void Issuer::refuse_shared_stream(const OpInfo& info, Stream stream) const {
  const Setup& setup = state_.setup;
  if (!setup.topology.one_process() || setup.world_size() == 1) return;
  const uint64_t mine = reinterpret_cast<uint64_t>(stream) + 1;  // the default stream is 0
  state_.words.stream_in_use(setup.rank()).store(mine);
  for (int p = 0; p < setup.world_size(); ++p)
    if (p != setup.rank() && setup.topology.places[p].device == setup.device &&
        state_.words.stream_in_use(p).load() == mine)
      throw std::invalid_argument(
          setup.comm.transport().where(info) + "ranks " + std::to_string(setup.rank()) + " and " +
          std::to_string(p) +
          " are threads of one process and use the same CUDA stream, where one would wait behind the other "
          "for ever. Give "
          "each thread a stream of its own: with torch.cuda.stream(torch.cuda.Stream()).");
}

// Before the line gets a stream of its own: [Note: hardware queues] in budget.h.
void Issuer::count_own_stream(const OpInfo& info, const Line& line) {
  const Setup& setup = state_.setup;
  const Place& here = setup.topology.here();
  const int ranks_here = count_on_device(setup.topology.places, here, true), queues = queues_of(here);
  if (state_.line_streams.take(here, ranks_here, line.number != 0)) return;
  std::string text = setup.comm.transport().where(info) +
                     "one more asynchronous operation at the same time needs a stream more than the " +
                     std::to_string(queues) +
                     " hardware queues of this process: a launch could wait for ever behind one that waits "
                     "for it. ";
  if (queues < max_connections)
    text += "Set CUDA_DEVICE_MAX_CONNECTIONS=32 before the first CUDA call of the process, or issue";
  else text += "Use fewer ranks per device and process, or issue";
  throw std::invalid_argument(text + " messages to and from fewer peers with async_op.");
}

// The stream that the operation goes to, in order behind what must come before it.
Stream Issuer::enter(Line& line, const Issue& issue, const Capture& capture) {
  const Driver& driver = state_.setup.driver;
  Stream stream = issue.stream;
  if (issue.async_op) {
    if (!line.own)
      PYCOMM_CUDA_CHECK(driver, cuStreamCreateWithPriority, &line.own, flag::stream_non_blocking,
                        high_priority);
    stream = line.own;
    const EventPtr here = state_.events->record(issue.stream);
    PYCOMM_CUDA_CHECK(driver, cuStreamWaitEvent, stream, here.get(), 0);
  }
  order_behind_last(line, stream, capture);
  return stream;
}

void Issuer::order_behind_last(const Line& line, Stream stream, const Capture& capture) const {
  const Mark& last = capture.active ? line.captured : line.eager;
  if (last.event && last.stream != stream) order_behind(stream, last, capture);
}

void Issuer::enter_line(const Line& line, const OpInfo& info, Stream stream) {
  ContextGuard guard(state_.setup.device);
  refuse_shared_stream(info, stream);
  order_behind_last(line, stream, capture_of(stream));
}

void Issuer::leave_line(Line& line, Stream stream) {
  ContextGuard guard(state_.setup.device);
  try {
    const Capture capture = capture_of(stream);
    const Mark end{state_.events->record(stream), stream, capture};
    (capture.active ? line.captured : line.eager) = end;
  } catch (const std::exception& error) {
    // What comes next in the line could run beside it.
    state_.setup.comm.abort("the end of a launch could not be marked: " + std::string(error.what()));
    throw;
  }
}

// What is done with words is put off until something else must come behind it.
void Issuer::run_steps(const LaunchPlan& plan, Words& words, Stream stream) {
  const int rank = state_.setup.rank(), n = state_.setup.world_size();
  auto add = [&words](const std::vector<WordOperation>& operations) {
    words.insert(words.end(), operations.begin(), operations.end());
  };
  for (const Step& step : plan.steps) switch (step.what) {
      case Step::What::launch:
        flush(words, stream);
        launch(step.key, step.args, step.blocks, step.threads, stream);
        break;
      case Step::What::copy:
        flush(words, stream);
        PYCOMM_CUDA_CHECK(state_.setup.driver, cuMemcpyAsync, reinterpret_cast<DevicePtr>(step.to),
                          reinterpret_cast<DevicePtr>(step.from), step.nbytes, stream);
        break;
      case Step::What::sync: add(exchange_of(rank, n, exchanges_++)); break;
      case Step::What::post: add({half_turn(rank, step.peer, n, plan.sends)}); break;
      case Step::What::await: add(half_turn_awaited(rank, step.peer, n, plan.sends)); break;
    }
}

void Issuer::flush(Words& words, Stream stream) const {
  if (words.empty()) return;
  std::vector<BatchMemOp> batch;
  batch.reserve(words.size());
  for (const WordOperation& word : words)
    batch.push_back({word.waits ? flag::batch_wait : flag::batch_write,
                     state_.words.word_on_device(word.word), word.value,
                     word.waits ? flag::wait_eq : flag::write_default, 0, 0});
  // Two exchanges, and a busy word before and behind them.
  static_assert(2 * 3 * (max_ranks - 1) + 2 <= flag::batch_most);
  PYCOMM_CUDA_CHECK(state_.setup.driver, cuStreamBatchMemOp, stream, static_cast<unsigned>(batch.size()),
                    batch.data(), 0);
  words.clear();
}

}  // namespace pycomm::cuda
