"""The faults that tests/test_cuda_host_mutants.py plants into the host code of csrc/cuda, each an exact text
and what takes its place, and the suites of a program of tests/test_cuda_group.py that must find it.

Not planted, because nothing can tell: who else stops the device of a broken group (the watching thread and
wait() both do), the grace before a death is told, how few places are still worth having, whether poll() or
the wait() behind it forgets an error.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    program: str
    suites: str
    file: str
    old: str
    new: str = ""
    times: int = 1


BUDGET, DEADLINES, ENDS, FAULTY, GROUP, STREAMS = (
    "group_budget_test",
    "group_deadlines_test",
    "group_ends_test",
    "group_faults_test",
    "group_test",
    "group_streams_test",
)

FAULTS = {
    # Captures of graphs.
    "the watching thread's capture mode": Fault(STREAMS, "capture", "watch.cc",
        "void Watcher::run() {\n  RelaxedCapture relaxed;\n", "void Watcher::run() {\n"),
    "the capture mode of poll()": Fault(STREAMS, "capture", "works.cc",
        "  {\n    RelaxedCapture relaxed;\n", "  {\n"),
    "what is captured hides what is not": Fault(STREAMS, "capture, capture hides nothing", "issue.cc",
        "  (end.capture.active ? line.captured : line.eager) = end;\n  return end;",
        "  line.eager = end;\n  return end;"),
    "an event of another capture is waited for": Fault(STREAMS, "capture", "events.cc",
        "if (mark.capture.active != capture.active || (capture.active && mark.capture.id != capture.id)) "
        "return;"),
    "a work of another capture is waited for": Fault(STREAMS, "capture", "works.cc",
        "capture.active != issued.active || capture.id != issued.id", "capture.active && false"),
    # Order of streams.
    "an asynchronous operation does not wait for its caller": Fault(STREAMS, "two streams, order", "issue.cc",
        "PYCOMM_CUDA_CHECK(driver, cuStreamWaitEvent, stream, here.get(), 0);"),
    "the last in the line is not waited for": Fault(STREAMS, "two streams", "issue.cc",
        "if (last.event && last.stream != stream) order_behind(stream, last, capture);"),
    "a work's end is not waited for": Fault(STREAMS, "two streams, order", "works.cc",
        "  order(current_ ? current_() : nullptr);\n"),
    "a launch in the line does not wait": Fault(BUDGET, "products", "issue.cc",
        "order_behind_last(line, stream, capture_of(stream));"),
    "a launch in the line is not waited for": Fault(BUDGET, "products", "issue.cc",
        "    (capture.active ? line.captured : line.eager) = end;\n", "    (void)line;\n"),
    "two ranks may use one stream": Fault(GROUP, "shared stream", "issue.cc",
        "  refuse_shared_stream(info, issue.stream);\n"),
    "a barrier is on the device before all have come": Fault(STREAMS, "device idle in a barrier", "group.cc",
        "  meet_on_host(timeout);\n"),
    # What must live until the device is done with it.
    "release without drain": Fault(ENDS, "release under way", "group.cc",
        "watcher_.drain(held, for_ever);"),
    "close without drain": Fault(ENDS, "close under way", "group.cc",
        "drained = watcher_.drain(held, longest_farewell);", "drained = true;"),
    "release does not wait for messages": Fault(ENDS, "release beside a message", "watch.cc",
        "  for (const Mark& mark : state_.lines.last_marks())\n    while",
        "  for (const Mark& mark : {state_.lines.collectives().eager})\n    while"),
    "buffers are let go when an operation is issued": Fault(STREAMS, "host is free", "group.cc",
        "issue.keep", "std::function<void()>{}"),
    "buffers are never let go": Fault(STREAMS, "host is free", "works.cc", "  keep_ = nullptr;\n"),
    "works are not watched": Fault(STREAMS, "host is free", "group.cc",
        "if ((issue.async_op || issue.watched) && !end.capture.active) state_.works.watch(work);"),
    "events are not used again": Fault(STREAMS, "recycling", "events.cc", "  free_.push_back(event);\n"),
    "a closed group takes operations": Fault(ENDS, "close under way", "faults.cc",
        'if (closed_) transport.raise(ErrorKind::aborted, info, -1, "the communicator is closed");'),
    "released memory is still found": Fault(ENDS, "release under way", "registry.cc",
        "    if (region.base == data) region.dropped = true;\n", "    (void)region, (void)data;\n"),
    "memory is freed beside a kernel of a peer": Fault(BUDGET, "memory", "device/spare.cc",
        "return open > 0 && threads;", "return false;"),
    "words stay registered": Fault(GROUP, "protocols", "device/spare.cc",
        "  if (spare.keeps()) spare.undo.push_back(std::move(undo));\n  else undo();\n",
        "  if (spare.keeps()) spare.undo.push_back(std::move(undo));\n"),
    # Places and queues.
    "places are not taken": Fault(BUDGET, "groups, given back", "budget.cc", "  count.taken += count_;\n"),
    "places are not given back": Fault(BUDGET, "given back", "group.cc",
        "  if (state_.setup.places) state_.setup.places->keep(0);\n"),
    "each rank has the places that it found": Fault(BUDGET, "groups", "setup.cc",
        "for (const int each : all_gather_value(setup.comm, mine)) all = std::min(all, each);",
        "for (const int each : all_gather_value(setup.comm, mine)) all = each * 0 + mine;"),
    "messages spin on a shared device": Fault(BUDGET, "sends", "group.cc",
        "  shape.messages_in_order = setup.uses_sync_words();\n"),
    "streams of lines are not counted": Fault(BUDGET, "queues", "budget.cc", "  ++count.streams;\n"),
    "the callers' streams are not counted": Fault(BUDGET, "queues", "budget.cc",
        "count.callers = std::max(count.callers, ranks_here);", "count.callers = ranks_here > 1;"),
    "messages of a rank alone are not counted": Fault(BUDGET, "queues", "budget.cc",
        "if (matters && count.callers + count.streams + 1 > queues_of(here)) return false;",
        "if (count.callers > 1 && count.callers + count.streams + 1 > queues_of(here)) return false;"),
    "streams of lines stay counted": Fault(BUDGET, "given back", "budget.cc",
        "  all.of_device[key_of(device_)].streams -= count_;\n"),
    "processes under MPS take turns": Fault(GROUP, "protocols", "protocol.cc",
        "if (!places[a].same_device(places[b]) || places[a].same_process(places[b]) ||\n"
        "          (places[a].mps && places[b].mps))\n        continue;",
        "if (!places[a].same_device(places[b]) || places[a].same_process(places[b])) continue;"),
    # What is wrong, and who hears of it.
    "nobody looks whether the peers live": Fault(FAULTY, "killed", "watch.cc", "  look_at_peers();\n"),
    "nobody looks at deadlines": Fault(FAULTY, "late rank", "watch.cc", "  state_.deadlines.look();\n"),
    "the device of a broken group goes on": Fault(FAULTY, "killed", "watch.cc",
        "  if (state_.faults.broken()) state_.words.stop_device();\n"),
    "waits in streams are not ended": Fault(FAULTY, "killed", "host_words.cc",
        "word(sync_word(n, set, p, setup_.rank())).store(1);", "(void)set, (void)p;"),
    "a peer that closed is a dead one": Fault(FAULTY, "abort and close", "watch.cc",
        "closed = p;", "dead = p;"),
    "a peer may not close before this rank does": Fault(ENDS, "closed in good order", "watch.cc",
        "dead < 0 && (closed < 0 || !running())", "dead < 0 && closed < 0"),
    "a half issued operation breaks nothing": Fault(FAULTY, "failing issue", "issue.cc",
        "    // Some steps are in the stream, others are not: this rank is out of step with its peers.\n"
        '    state_.setup.comm.abort(std::string(to_string(info.kind)) + " could not be enqueued: " + '
        "error.what());\n"),
    "no word says what is under way": Fault(FAULTY, "late rank", "issue.cc",
        "if (in_order) words.push_back({false, busy_word, busy});"),
    "an operation never ends for the deadlines": Fault(FAULTY, "busy for long", "issue.cc",
        "if (in_order) words.push_back({false, busy_word, 0});"),
    "the group's timeout serves all": Fault(FAULTY, "late rank", "deadlines.cc",
        "  if (found == line.timeouts.end()) return longest_;\n", "  return longest_;\n"),
    "the next operation has no time of its own": Fault(DEADLINES, "next operation", "deadlines.cc",
        "busy != line.busy ||", "!line.busy ||"),
    "nobody sees who came to a second exchange": Fault(DEADLINES, "second exchange", "deadlines.cc",
        "look_at(0, p), look_at(1, p);", "look_at(0, p);"),
    "a peer's own message counts as its coming": Fault(DEADLINES, "messages both ways", "deadlines.cc",
        "message < n ? set_of_receivers : set_of_senders", "message < n ? set_of_senders : set_of_receivers"),
    "an error word is used again as it is": Fault(BUDGET, "memory", "host_words.cc",
        "  std::memset(memory, 0, sizeof(ErrorWord));\n"),
    "what a sender found is not read": Fault(FAULTY, "messages that differ", "faults.cc",
        "read_record(error.records[record_of_sending(p)], OpKind::send);"),
    "a fault is read again and again": Fault(FAULTY, "mismatches", "faults.cc",
        "__atomic_store_n(&record.fault, 0, __ATOMIC_RELEASE);"),
    "a mismatch breaks the group": Fault(FAULTY, "mismatches", "faults.cc",
        "setup_.stream_ordered() || (message && setup_.uses_sync_words() && !setup_.pointers())",
        "!message || setup_.stream_ordered()"),
    "a mismatch in stream order is told and forgotten": Fault(FAULTY, "mismatches", "faults.cc",
        "if (setup_.stream_ordered() || (message && setup_.uses_sync_words() && !setup_.pointers()))\n"
        "    return note(ErrorKind::mismatch, info, peer, text);"),
    "an error is thrown again and again": Fault(FAULTY, "mismatches", "faults.cc",
        "broken() ? failure_ : std::exchange(failure_, nullptr)", "failure_"),
    "works of a broken group end well": Fault(FAULTY, "killed", "works.cc",
        "for (auto& [work, error] : ended) error = faults_.of(work->info());"),
    "a device that fails is at its end": Fault(FAULTY, "failing device", "faults.cc",
        "result != result::success && !broken()", "result == result::not_ready && !broken()"),
    "a region has no row on one rank": Fault(GROUP, "collectives", "registry.cc",
        "write_row(id, *memory);", "if (setup_.rank()) write_row(id, *memory);"),
    "a row that one rank cannot write": Fault(ENDS, "failing row", "registry.cc",
        "agree(setup_.comm, copied);", "agree(setup_.comm, {});"),
    "a row that cannot be written is told to nobody": Fault(ENDS, "failing row", "registry.cc",
        "copied = attempt([&] { write_row(id, *memory); });", "write_row(id, *memory);"),
    "a region that is nowhere keeps its number": Fault(ENDS, "failing row", "registry.cc",
        "    regions_[id] = {};\n    throw;\n", "    throw;\n"),
    "an id that a peer still uses is taken": Fault(ENDS, "released by one", "registry.cc",
        "used_anywhere |= of_rank;", "used_anywhere |= of_rank & used;"),
}  # fmt: skip
