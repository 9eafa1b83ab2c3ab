"""Runs PyTorch's own distributed suite on pycomm, or on Gloo to learn what passes there. See
docs/torch_suite.md.

python tests/torch_suite/run.py                    # all tests that Gloo passes, on pycomm
python tests/torch_suite/run.py test_all_reduce    # those whose names contain this
python tests/torch_suite/run.py --backend gloo     # the same on Gloo
python tests/torch_suite/run.py --regenerate 3     # all on Gloo three times; writes gloo_passes.txt
"""

import argparse
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PASSES = HERE / "gloo_passes.txt"
FLAGS = {"gpus": ["--gpus"], "rpc": ["--rpc"], "hosts": ["--hosts"]}
ANSWER_LIMIT = 180  # seconds; the worker has a limit of its own per test

# In this order: a test runs where it is first not skipped. (what the suite's conditions take the backend for,
# or "gpus" for those that want GPUs, see cuda_on_cpu.py; ranks)
SETTINGS = [
    ("gloo", 3),
    ("gloo", 2),
    ("gloo", 4),
    ("gloo", 8),
    ("mpi", 3),
    ("mpi", 4),
    ("gpus", 3),
    ("gpus", 2),
    ("gpus", 4),
]
# Another suite of its own, with its own number of ranks.
RPC = ("rpc", 4)
# What the suite runs for Gloo, with the ranks on two simulated hosts.
HOSTS = ("hosts", 4)


class Case(NamedTuple):
    conditions: str
    world_size: int
    name: str


class Worker:
    """A worker.py with its settings. What it and its ranks print is in the file `log`, which stays when the
    worker dies.
    """

    def __init__(self, backend, conditions, world_size):
        self.log = tempfile.NamedTemporaryFile(
            "w+", prefix=f"torch_suite-{backend}-{world_size}-", suffix=".log", delete=False
        )
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("TORCH_", "PYCOMM_", "GLOO_"))
            },
            "BACKEND": "gloo" if conditions in FLAGS else conditions,
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
        }
        if backend == "pycomm":
            environment["PYCOMM_REPLACE"] = "gloo"
        self.process = subprocess.Popen(
            [sys.executable, HERE / "worker.py", backend, *FLAGS.get(conditions, [])],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self.names = self._answer()

    def run(self, name):
        self.process.stdin.write(name + "\n")
        return self._answer()

    def _answer(self):
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_LIMIT)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self._stop()
            raise RuntimeError(f"the worker of the torch suite ended or hung, see {self.log.name}")
        return json.loads(line)

    def close(self):
        self._stop()
        Path(self.log.name).unlink(missing_ok=True)

    def _stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)  # its own session: the worker and its ranks
            self.process.wait()


class Workers:
    """One worker per setting, started when first needed and again after one has died."""

    def __init__(self, backend):
        self.backend, self._workers = backend, {}

    def of(self, conditions, world_size):
        key = conditions, world_size
        if key not in self._workers or self._workers[key].process.poll() is not None:
            self._workers[key] = Worker(self.backend, *key)
        return self._workers[key]

    def run(self, case, profiler=False):
        return self.of(case.conditions, case.world_size).run(case.name + ("+profiler" if profiler else ""))

    def close(self):
        for worker in self._workers.values():
            worker.close()


def read_passes():
    lines = [line.split("#")[0].split() for line in PASSES.read_text().splitlines()]
    return [Case(fields[0], int(fields[1]), fields[2]) for fields in lines if fields]


def report(case, result, out=sys.stdout):
    print(
        f"{result['outcome']:8}{result['seconds']:7.2f} s  {case.conditions} {case.world_size} {case.name}",
        file=out,
        flush=True,
    )


def last_error(text):
    """The line of a traceback that says what was wrong."""
    lines = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception|Interrupt)\b.*: ", line)]
    lines = [line for line in lines if "exited with error code" not in line]
    return (lines or text.strip().splitlines()[-1:])[0]


def sort_out(case, results, kept, dropped):
    failures = [last_error(result["reason"]) for result in results if result["outcome"] != "passed"]
    if failures:
        dropped.append((case, len(failures), failures[0]))
    else:
        kept.append(case)


def regenerate(times):
    """Finds what Gloo passes, and in which setting; a test must pass each of `times` runs."""
    workers = Workers("gloo")
    kept, dropped, undecided, reasons = [], [], None, {}
    for conditions, world_size in SETTINGS:
        worker = workers.of(conditions, world_size)
        undecided = worker.names if undecided is None else undecided
        skipped = {}
        for name in undecided:
            case = Case(conditions, world_size, name)
            results = [worker.run(name)]
            report(case, results[0])
            if results[0]["outcome"] == "skipped":
                skipped[name] = reasons.setdefault(name, results[0]["reason"].splitlines()[0])
                continue
            results += [workers.run(case) for _ in range(times - 1)]
            sort_out(case, results, kept, dropped)
        undecided = sorted(skipped)
        worker.close()
    worker = workers.of(*RPC)
    for name in worker.names:
        case = Case(*RPC, name)
        results = [workers.run(case) for _ in range(times)]
        report(case, results[0])
        sort_out(case, results, kept, dropped)
    worker.close()
    lines = [
        f"# Written by run.py --regenerate {times}: the tests that Gloo passes on a CPU, each with the "
        "suite's conditions and ranks."
    ]
    lines += [f"{case.conditions} {case.world_size} {case.name}" for case in kept]
    lines += ["", f"# Failed on Gloo in some of {times} runs:"]
    lines += [
        f"#   {case.conditions} {case.world_size} {case.name}: {count} of {times}: {text[:140]}"
        for case, count, text in dropped
    ]
    lines += ["", "# Skipped in every setting:"]
    lines += [f"#   {name}: {reason[:120]}" for name, reason in sorted(skipped.items())]
    PASSES.write_text("\n".join(lines) + "\n")
    print(f"{len(kept)} pass, {len(dropped)} fail, {len(skipped)} are skipped: {PASSES}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="run the tests whose names contain one of these")
    parser.add_argument("--hosts", action="store_true", help="4 ranks on two simulated hosts")
    parser.add_argument("--backend", choices=("pycomm", "gloo"), default="pycomm")
    parser.add_argument(
        "--profiler",
        action="store_true",
        help="let tests also check what torch's profiler shows of our operations",
    )
    parser.add_argument("--regenerate", type=int, metavar="TIMES")
    parser.add_argument("--json", type=Path, help="write all results there")
    arguments = parser.parse_args()
    if arguments.regenerate:
        return regenerate(arguments.regenerate)
    workers, results = Workers(arguments.backend), []
    for case in read_passes():
        if arguments.words and not any(word in case.name for word in arguments.words):
            continue
        if arguments.hosts:
            if case.conditions != "gloo":
                continue
            case = Case(*HOSTS, case.name)
        results.append(workers.run(case, arguments.profiler))
        report(case, results[-1])
        if results[-1]["outcome"] != "passed":
            print(results[-1]["reason"], flush=True)
    workers.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    outcomes = [result["outcome"] for result in results]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped")))
    return 0 if set(outcomes) <= {"passed"} else 1


if __name__ == "__main__":
    sys.exit(main())
