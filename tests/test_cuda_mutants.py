"""The check that the checkers see: one fault at a time is planted into the CUDA kernels, and
tests/cpp/cuda/kernel_test.cc must find it.

A fault replaces one exact text of a source in csrc/cuda, which must occur exactly as often as said: so a
fault whose place has changed fails instead of testing nothing. What must find it:

    run    the plain program: a wrong value, a deadlock, a fault that the kernels report, or a crash, under
           one of a few seeds
    race   ThreadSanitizer: x86 shows no order that is too weak, and the fibers none at all
    weak   the plain program under the memory of weak_ctx.h: payloads are relaxed atomics, which are never a
           race

Not planted, because nothing can tell: verdicts without order (they are the whole message), one area of
verdicts, no sync in end() and before Ring::send_first (another barrier follows or went before).
"""

import functools
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import test_cuda_kernels as kernels
from compiled import command, in_parallel, link, standard
from test_cuda_kernels import (
    FEW_KERNELS,
    OWN,
    ROOT,
    TESTS,
    WEAK,
    run,
)

pytestmark = pytest.mark.timeout(900)  # of which most is for compilers on a busy machine

FLAGS = ["-O0", "-g0", FEW_KERNELS]
DETECTORS = {"run": FLAGS, "race": [*FLAGS, "-fsanitize=thread"], "weak": [*FLAGS, WEAK]}
SUITES = {  # what kernel_test is asked for until something is found
    "run": {
        "collectives": [f"mutants {seed} 150" for seed in range(1, 5)],
        "dtypes": ["forms 5 1", "random 1 150", "random 2 150"],
        "rings": ["rings 1 60", "rings 2 60"],
        "messages": ["streams 1", "streams 2", "streams 3"],
        "faults": ["faults"],
    },
    "race": {
        "collectives": ["mutants 1 60", "mutants 2 60"],
        "rings": ["rings 1 20"],
        "messages": ["streams 1"],
    },
    "weak": {
        "collectives": ["mutants 1 60", "mutants 2 60", "forms 3 2"],
        "messages": ["streams 1"],
        "records": ["records 1", "records 2"],
    },
}
SESSION, TWO_SHOT, RING, MOVE, MESSAGE, ONE_SHOT = (
    "kernels/session.cuh",
    "kernels/two_shot.cuh",
    "kernels/ring.cuh",
    "kernels/move.cuh",
    "kernels/message.cuh",
    "kernels/one_shot.cuh",
)


class Fault(NamedTuple):
    detector: str
    file: str
    old: str
    new: str
    times: int = 1
    suite: str = ""


FAULTS = {
    # Barriers of the block.
    "no sync in post": Fault("race", SESSION,
        "PC_CALL void post(Flag flag, uint32_t peers, uint32_t step) {\n    c_.sync();",
        "PC_CALL void post(Flag flag, uint32_t peers, uint32_t step) {"),
    "no sync in wait": Fault("race", SESSION,
        "if (!c_.sync_or(!came)) return true;",
        "if (came) return true;"),
    "no sync before reading sources": Fault("race", TWO_SHOT,
        "c_.sync();\n    Shot::run(",
        "Shot::run("),
    "no sync before a ring adds": Fault("run", RING,
        "shared_.source[1] = a_.in_part[q] + at.begin;\n      }\n      c_.sync();",
        "shared_.source[1] = a_.in_part[q] + at.begin;\n      }"),
    "no sync before a ring's result goes on": Fault("race", RING,
        "if (completes && passes_on) {\n        c_.sync();",
        "if (completes && passes_on) {"),
    "no sync in message post": Fault("race", MESSAGE,
        "PC_FN void post(uint32_t step) {\n    c_.sync();",
        "PC_FN void post(uint32_t step) {"),
    "no sync in message wait": Fault("race", MESSAGE,
        "blame();\n    }\n    return !c_.sync_or(!came);\n  }\n\n  PC_FN ErrorRecord&",
        "blame();\n    }\n    return c_.thread() != 0 || came;\n  }\n\n  PC_FN ErrorRecord&"),
    "no sync in message compare": Fault("run", MESSAGE,
        "return !c_.sync_or(!came || !same || stopped);",
        "return c_.thread() != 0 || (came && same);"),
    # Orders.
    "header stored relaxed": Fault("race", SESSION,
        "c.store_release(&to.words[0], first, Scope::system);",
        "c.store_relaxed(&to.words[0], first, Scope::system);"),
    "header loaded relaxed": Fault("race", SESSION,
        "c.load_acquire(&from.words[0], Scope::system);",
        "c.load_relaxed(&from.words[0], Scope::system);"),
    "flag stored relaxed": Fault("race", SESSION,
        "c_.store_release(&control_of(a_.group, t).flags",
        "c_.store_relaxed(&control_of(a_.group, t).flags"),
    "flag loaded relaxed": Fault("race", SESSION,
        "return c_.load_acquire(word, Scope::system) >= value_of(step);",
        "return c_.load_relaxed(word, Scope::system) >= value_of(step);"),
    "message header stored relaxed": Fault("race", MESSAGE,
        "write_header(c_, theirs_.headers[epoch_ & 1], call, epoch_, Ordering::acquire_release);",
        "write_header(c_, theirs_.headers[epoch_ & 1], call, epoch_, Ordering::relaxed);"),
    "message header loaded relaxed": Fault("race", MESSAGE,
        "read_header(c_, a_, mine_.headers[epoch_ & 1], epoch_, Ordering::acquire_release, there, late);",
        "read_header(c_, a_, mine_.headers[epoch_ & 1], epoch_, Ordering::relaxed, there, late);"),
    "message flag stored relaxed": Fault("race", MESSAGE,
        "c_.store_release(&theirs_.flags",
        "c_.store_relaxed(&theirs_.flags"),
    "message flag loaded relaxed": Fault("race", MESSAGE,
        "return c_.load_acquire(word, Scope::system) >= value_of(step);",
        "return c_.load_relaxed(word, Scope::system) >= value_of(step);"),
    # Scopes.
    "header stored for this gpu": Fault("race", SESSION,
        "c.store_release(&to.words[0], first, Scope::system);",
        "c.store_release(&to.words[0], first, Scope::gpu);"),
    "header loaded for this gpu": Fault("race", SESSION,
        "c.load_acquire(&from.words[0], Scope::system);",
        "c.load_acquire(&from.words[0], Scope::gpu);"),
    "flag stored for this gpu": Fault("race", SESSION,
        "c_.block()][a_.group.rank],\n                       value_of(step), Scope::system);",
        "c_.block()][a_.group.rank],\n                       value_of(step), Scope::gpu);"),
    "flag loaded for this gpu": Fault("race", SESSION,
        "return c_.load_acquire(word, Scope::system) >= value_of(step);",
        "return c_.load_acquire(word, Scope::gpu) >= value_of(step);"),
    "message flag stored for this gpu": Fault("race", MESSAGE,
        "value_of(step), Scope::system);",
        "value_of(step), Scope::gpu);"),
    "message flag loaded for this gpu": Fault("race", MESSAGE,
        "return c_.load_acquire(word, Scope::system) >= value_of(step);",
        "return c_.load_acquire(word, Scope::gpu) >= value_of(step);"),
    # Start.
    "no wait at the start": Fault("run", SESSION,
        "return !reads_peers || compare(Ordering::acquire_release);",
        "return !reads_peers || !a_.direct_in || compare(Ordering::acquire_release);"),
    "no wait at the start where nothing is direct": Fault("race", SESSION,
        "const bool reads_peers =\n        a_.resident || (",
        "const bool reads_peers =\n        (a_.resident && a_.direct_in) || ("),
    "message: no header": Fault("run", MESSAGE,
        "return !reads_peer || compare();",
        "return !reads_peer || !a_.direct_in || compare();", suite="faults"),
    # one_shot.
    "one_shot: no headers": Fault("run", ONE_SHOT,
        "(a.stages & stage_gather) && session.compare(Ordering::relaxed)",
        "(a.stages & stage_gather)", suite="faults"),
    "one_shot: own data in the place of rank 0": Fault("run", ONE_SHOT,
        "if (p == g.rank) {\n            unit = mine(i);",
        "if (p == 0) {\n            unit = mine(i);"),
    "one_shot: words in another's place": Fault("run", ONE_SHOT,
        "words_of(g, p, g.rank, epoch)",
        "words_of(g, p, p, epoch)"),
    # two_shot.
    "two_shot: no drained wait": Fault("run", TWO_SHOT,
        "if (s >= 2 && !session_.wait(Flag::drained, all_, s - 2)) return false;",
        ""),
    "two_shot: no filled wait": Fault("run", TWO_SHOT,
        "if (!a_.direct_in && !session_.wait(Flag::filled, a_.reads, s)) return false;",
        ""),
    "two_shot: no reduced wait": Fault("run", TWO_SHOT,
        "if (!session_.wait(Flag::reduced, all_, s)) return false;",
        ""),
    "two_shot: no drained wait at the end": Fault("run", TWO_SHOT,
        "return session_.wait(Flag::drained, all_, last - 1);",
        "return true;"),
    "two_shot: order of ranks": Fault("run", "kernels/movement.cuh",
        "from = sources[s] + at;",
        "from = sources[(s + a.group.rank) % n] + at;"),
    "two_shot: result in an input's slot": Fault("run", TWO_SHOT,
        "return a_.slots - 1;",
        "return a_.slots > 1 ? a_.slots - 2 : 0;"),
    "two_shot: drained too early": Fault("run", TWO_SHOT,
        "session_.post(a_.results ? Flag::reduced : Flag::drained, all_, s);",
        "if (a_.results) session_.post(Flag::drained, all_, s);\n    session_.post(a_.results ? "
        "Flag::reduced : Flag::drained, all_, s);"),
    # ring.
    "ring: no credit": Fault("run", RING,
        "if (passes_on && !credit()) return false;",
        "", suite="rings"),
    "ring: credit one too many": Fault("race", RING,
        "sent_ < ring_slots || session_.wait(Flag::drained, 1u << next_, sent_ - ring_slots)",
        "sent_ <= ring_slots || session_.wait(Flag::drained, 1u << next_, sent_ - ring_slots - 1)",
        suite="rings"),
    "ring: no filled wait": Fault("run", RING,
        "if (!session_.wait(Flag::filled, 1u << prev_, taken_)) return false;",
        ""),
    "ring: no drained post": Fault("run", RING,
        "session_.post(Flag::drained, 1u << prev_, taken_++);",
        "taken_++;"),
    "ring: drained posted before reading": Fault("race", RING,
        "const Span at = span(q, s);\n    const std::byte* from = queue(me_, taken_);",
        "const Span at = span(q, s);\n"
        "    session_.post(Flag::drained, 1u << prev_, taken_);\n"
        "    const std::byte* from = queue(me_, taken_);", suite="rings"),
    # move, multimem, copy engine.
    "move: no drained wait": Fault("run", MOVE,
        "if (s >= 2 && !session_.wait(Flag::drained, readers(s - 2), s - 2)) return false;",
        ""),
    "move: no filled wait": Fault("run", MOVE,
        "if (!a_.direct_in && !session_.wait(Flag::filled, mask, s)) return false;",
        ""),
    "move: no drained wait at the end": Fault("run", MOVE,
        "if (a_.direct_in && (a_.stages & stage_end)) session_.wait(Flag::drained, readers(0), 0);",
        ""),
    "move: another's part": Fault("run", MOVE,
        "slot_of(a_, p, c_.block(), a_.distinct ? me_ : 0, s)",
        "slot_of(a_, p, c_.block(), a_.distinct ? p : 0, s)"),
    "move: drained before reading": Fault("race", MOVE,
        "const uint32_t mask = sources(s);\n    if",
        "const uint32_t mask = sources(s);\n    session_.post(Flag::drained, mask, s);\n    if"),
    "move: no drained post": Fault("run", MOVE,
        "session_.post(Flag::drained, mask, s);",
        ""),
    "move: short parts are all the first one's": Fault("run", "kernels/movement.cuh",
        "v[k] = c.ld16(from[base + k] + at);",
        "v[k] = c.ld16(from[base] + at);"),
    "move: short parts without their last bytes": Fault("run", "kernels/movement.cuh",
        "const uint64_t at = nbytes[s] / 16 * 16 + i % 16;",
        "const uint64_t at = (nbytes[s] + 15) / 16 * 16 + i % 16;"),
    "move: long parts are left out": Fault("run", "kernels/movement.cuh",
        "for (int s = 0; s < count; ++s) copy(c, to[s], from[s], nbytes[s]);",
        "for (int s = 1; s < count; ++s) copy(c, to[s], from[s], nbytes[s]);"),
    "move: Shared is written while it is read": Fault("race", MOVE,
        "    c_.sync();\n    copy_several(",
        "    copy_several("),
    "two_shot: a source in the place of another": Fault("run", "kernels/movement.cuh",
        "if (s + ahead < n) load(next[d], s + ahead);",
        "if (s + ahead < n) load(next[0], s + ahead);", suite="dtypes"),
    "multimem: no drained wait": Fault("run", "kernels/multimem.cuh",
        "session.wait(Flag::drained, all, 0);",
        ""),
    "copy engine: no drained wait": Fault("run", "kernels/bracket.cuh",
        "if (a.stages & stage_gather) session.wait(Flag::drained, a.exposes, 0);",
        ""),
    # Areas by parity, halves, places of blocks.
    "one area of words": Fault("run", "kernels/layout.h",
        "((epoch & 1) * max_ranks + source)",
        "(0 * max_ranks + source)"),
    "one area of headers": Fault("run", SESSION,
        "headers[epoch_ & 1]",
        "headers[0]", times=4),
    "one half of the staging": Fault("run", "kernels/layout.h",
        "(step & 1) * a.group.half_bytes",
        "0 * a.group.half_bytes"),
    "one area of message headers": Fault("run", MESSAGE,
        "headers[epoch_ & 1]",
        "headers[0]", times=2),
    "one half of the message staging": Fault("run", MESSAGE,
        "(s & 1) * (g.message_bytes / 2)",
        "0 * (g.message_bytes / 2)"),
    "flags of block 0": Fault("run", SESSION,
        "const uint64_t* word = &me_.flags[static_cast<int>(flag)][c_.block()][t];\n",
        "const uint64_t* word = &me_.flags[static_cast<int>(flag)][0][t];\n"),
    "segments overlap": Fault("run", "kernels/layout.h",
        "from = least(begin + s * segment_bytes, end);",
        "from = least(begin + (s ? s * segment_bytes - 16 : 0), end);"),
    # Epochs.
    "epoch not advanced": Fault("run", SESSION,
        "c_.store_relaxed(&me_.epoch, epoch_, Scope::gpu);",
        ""),
    "flags without the epoch": Fault("run", SESSION,
        "return epoch_ << step_bits | (step + 1);",
        "return step + 1;"),
    # Blocks that start when others of their launch have ended.
    "the first block to end writes the epoch": Fault("run", SESSION,
        """    if (c_.add(&me_.ticket, 1, Scope::gpu) + 1 != static_cast<uint64_t>(c_.blocks())) return;
    c_.store_relaxed(&me_.ticket, 0, Scope::gpu);
""",
        """    const uint64_t ended = c_.add(&me_.ticket, 1, Scope::gpu) + 1;
    if (ended == static_cast<uint64_t>(c_.blocks())) c_.store_relaxed(&me_.ticket, 0, Scope::gpu);
    if (ended != 1) return;
"""),
    "message: the first block to end writes the epoch": Fault("run", MESSAGE,
        """    if (c_.add(&mine_.ticket, 1, Scope::gpu) + 1 != static_cast<uint64_t>(c_.blocks())) return;
    c_.store_relaxed(&mine_.ticket, 0, Scope::gpu);
""",
        """    const uint64_t ended = c_.add(&mine_.ticket, 1, Scope::gpu) + 1;
    if (ended == static_cast<uint64_t>(c_.blocks())) c_.store_relaxed(&mine_.ticket, 0, Scope::gpu);
    if (ended != 1) return;
"""),
    # Payloads that are relaxed atomics.
    "only the first header word checked": Fault("weak", SESSION,
        "for (int i = 0; i < pairs; ++i) all = all && words[i].y == mark && words[i].w == mark;",
        "for (int i = 0; i < 1; ++i) all = all && words[i].y == mark;"),
    "the last header pair not checked": Fault("weak", SESSION,
        "for (int i = 0; i < pairs; ++i) all = all && words[i].y == mark && words[i].w == mark;",
        "for (int i = 0; i + 1 < pairs; ++i) all = all && words[i].y == mark && words[i].w == mark;"),
    "fault record stored relaxed": Fault("weak", SESSION,
        "c.store_release(&record.fault, static_cast<uint64_t>(fault), Scope::system);",
        "c.store_relaxed(&record.fault, static_cast<uint64_t>(fault), Scope::system);", suite="records"),
    "fault record stored first": Fault("weak", SESSION,
        "  c.store_relaxed(&record.epoch, epoch, Scope::system);\n",
        "  c.store_release(&record.fault, static_cast<uint64_t>(fault), Scope::system);\n"
        "  c.store_relaxed(&record.epoch, epoch, Scope::system);\n", suite="records"),
    "one_shot: only the first mark checked": Fault("weak", ONE_SHOT,
        "return words.y == mark && words.w == mark;",
        "return words.y == mark;"),
    "one_shot: only the second mark checked": Fault("weak", ONE_SHOT,
        "return words.y == mark && words.w == mark;",
        "return words.w == mark;"),
    "message epoch not advanced": Fault("run", MESSAGE,
        "c_.store_relaxed(&mine_.epoch, epoch_, Scope::gpu);",
        ""),
    # Messages.
    "message: no filled wait": Fault("run", MESSAGE,
        "if (!a_.direct_in && !wait(s)) return false;",
        ""),
    "message: no filled post": Fault("run", MESSAGE,
        "a_.in_part[0] + at.begin, at.size);\n        post(s);",
        "a_.in_part[0] + at.begin, at.size);"),
    "message: no drained wait": Fault("run", MESSAGE,
        "if (s >= 2 && !wait(s - 2)) return false;",
        ""),
    "message: no drained wait at the end": Fault("run", MESSAGE,
        "return !(a_.stages & stage_end) || count == 0 || wait(count - 1);",
        "return true;"),
    # Stream order.
    "exchanges with one set": Fault("run", "sync_words.h",
        "const int set = number & 1;",
        "const int set = 0 * number;"),
    "odd number of exchanges": Fault("run", "planner.cc",
        "if (count % 2) sync();",
        ""),
    "no exchange between the stages": Fault("run", "planner.cc",
        "      sync();\n      launch(key, blocks, stage);",
        "      launch(key, blocks, stage);"),
    "no exchange at the end": Fault("run", "planner.cc",
        "args_.first_segment = args_.end_segment = 0;\n  sync();",
        "args_.first_segment = args_.end_segment = 0;"),
    "message: sender's half-turn not awaited": Fault("run", "plan_message.cc",
        "turn(Step::What::post);\n      turn(Step::What::await);",
        "turn(Step::What::post);"),
    "message: receiver's half-turn not awaited": Fault("run", "plan_message.cc",
        "turn(Step::What::await);\n      launch(announce | stage_gather",
        "launch(announce | stage_gather"),
}  # fmt: skip


def recompiled(file):
    """The sources that hold the code of `file`: kernels are templates, which one source instantiates."""
    if file.endswith(".cc"):
        return [Path("csrc", "cuda", file)]
    users = ("kernel_test", "kernel_faults") if file == "sync_words.h" else ("kernel_launch",)
    return [TESTS / f"{name}.cc" for name in users]


def compile_all(jobs):
    """jobs: (root of the sources, source, object file, flags). Not kept by compiled.py: the copies of the
    sources are of this run.
    """
    in_parallel(lambda job: command([*kernels.FLAGS, *job[3], "-c", job[0] / job[1], "-o", job[2]]), jobs)


class Base(NamedTuple):
    """The program without a fault, as one detector needs it."""

    sources: Path  # a copy, so that all objects are of one state
    flags: list
    objects: dict
    program: Path


def build(detector, folder):
    sources = folder / "sources"
    shutil.copytree(ROOT / "csrc", sources / "csrc", ignore=shutil.ignore_patterns("torch"))
    shutil.copytree(ROOT / TESTS, sources / TESTS)
    flags = DETECTORS[detector]
    with_header = [*flags, *standard([*kernels.FLAGS, *flags])]
    own = {source: folder / f"{source.parent.name}-{source.stem}.o" for source in OWN}
    compile_all([(sources, source, target, with_header) for source, target in own.items()])
    objects = {**own, **kernels.beside()}
    return Base(sources, with_header, objects, link(objects.values(), folder / "base", flags))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """base("run") is the Base for a detector, built when first asked for."""
    return functools.cache(lambda detector: build(detector, tmp_path_factory.mktemp(detector)))


def planted(fault, sources, folder):
    """A copy of the sources with the fault."""
    shutil.copytree(sources, folder)
    file = folder / "csrc" / "cuda" / fault.file
    file.write_text(file.read_text().replace(fault.old, fault.new))
    return folder


def cases_for(fault):
    return SUITES[fault.detector][fault.suite or ("messages" if "message" in fault.file else "collectives")]


def outcome_of(detector, status, output):
    """What went wrong, or None."""
    if status == 0:
        return None
    if detector == "race":
        return "race" if "ThreadSanitizer: data race" in output else None
    found = re.search(
        r"is wrong|DEADLOCK|FAULT|reported fault|passed a barrier|a write beyond|expected:", output
    )
    return found[0] if found else f"signal {-status}" if status < 0 else None


def find(name, base, folder):
    """(what was found or None, text)."""
    fault = FAULTS[name]
    root = planted(fault, base.sources, folder)
    objects = dict(base.objects)
    for source in recompiled(fault.file):
        objects[source] = folder / f"{source.stem}.o"
        command(["-std=c++20", "-pthread", *base.flags, "-w", "-c", root / source, "-o", objects[source]])
    program = link(objects.values(), folder / "kernel_test", DETECTORS[fault.detector])
    output = ""
    for case in cases_for(fault):
        status, output = run(program, case)
        if outcome := outcome_of(fault.detector, status, output):
            return outcome, f"{case}: {outcome}"
    shutil.rmtree(folder)
    return None, f"{cases_for(fault)} found nothing:\n{output[-1000:]}"


def test_every_fault_has_its_place():
    texts = {fault.file: (ROOT / "csrc" / "cuda" / fault.file).read_text() for fault in FAULTS.values()}
    lost = [
        f"{name} ({fault.file})"
        for name, fault in FAULTS.items()
        if texts[fault.file].count(fault.old) != fault.times
    ]
    assert not lost, f"the sources have changed; say where these faults belong now: {lost}"


def survivors(names, base, tmp_path):
    """The faults that are not found, with what was said."""

    def find_one(name):
        outcome, text = find(name, base(FAULTS[name].detector), tmp_path / re.sub(r"\W", "_", name))
        print(f"{name}: {text}")  # for pytest -s
        return None if outcome else f"{name}: {text}"

    for detector in {FAULTS[name].detector for name in names}:
        base(detector)
    return [text for text in in_parallel(find_one, names) if text]


def test_a_fault_is_found(base, tmp_path):
    assert not survivors(["epoch not advanced"], base, tmp_path)


@pytest.mark.slow
def test_every_fault_is_found(base, tmp_path):
    """All in one test, two at a time."""
    assert not survivors(FAULTS, base, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("detector", DETECTORS)
def test_nothing_is_found_without_a_fault(base, detector):
    cases = [case for cases in SUITES[detector].values() for case in cases]
    outcomes = in_parallel(lambda case: (case, run(base(detector).program, case)), cases)
    for case, (status, output) in outcomes:
        assert status == 0, f"{case} ended with {status}:\n{output[-5000:]}"
