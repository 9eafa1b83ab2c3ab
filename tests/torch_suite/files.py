"""Runs PyTorch's own test files for torch.distributed, which are not in the wheel, on Gloo and on pycomm, and
compares test by test. See docs/torch_suite.md.

    python tests/torch_suite/files.py /path/to/pytorch                      # all FILES
    python tests/torch_suite/files.py /path/to/pytorch test_c10d_gloo       # files whose path contains this
    python tests/torch_suite/files.py /path/to/pytorch gloo::broadcast      # and tests whose names do
    python tests/torch_suite/files.py /path/to/pytorch --gpus               # those that want GPUs, on the CPU

The folder is a checkout of PyTorch at the tag of the installed torch. A test that Gloo passes and pycomm
does not must be in files_differences.txt, with its reason; a test that stands there must not pass. Else the
exit status is 1. A reason that begins with "words:" says that pycomm refuses the same calls in other words;
the test is run once more with any words accepted, and must pass then.
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
DIFFERENCES = HERE / "files_differences.txt"
START_LIMIT = 180  # seconds until a file is imported
TEST_LIMIT = 120  # seconds per test
WORDS = "words:"

# Below test/distributed; * as in a shell.
FILES = [
    "test_c10d_gloo.py",
    "test_c10d_common.py",
    "test_c10d_functional_native.py",
    "test_c10d_object_collectives.py",
    "test_c10d_pypg.py",
    "test_functional_api.py",
    "test_pg_wrapper.py",
    "test_device_mesh.py",
    "test_data_parallel.py",
    "algorithms/test_join.py",
    "algorithms/ddp_comm_hooks/test_*.py",
    "optim/test_*.py",
    "_composable/test_*.py",
    "_composable/fsdp/test_*.py",
    "tensor/test_*.py",
    "tensor/parallel/test_*.py",
    "checkpoint/test_*.py",
]


class Checkout(NamedTuple):
    folder: Path
    version: str


class Compared(NamedTuple):
    name: str  # file::Class.test
    gloo: dict
    pycomm: dict
    other_words: dict  # on pycomm with any words of errors accepted; empty where that was not asked

    @property
    def differs(self):
        return self.gloo["outcome"] == "passed" != self.pycomm["outcome"]


def open_checkout(folder, torch_version, any_version=False):
    """Raises ValueError if the folder is no checkout of PyTorch, or of another version than torch_version."""
    if not folder:
        raise ValueError(
            "no folder is given; pass a checkout of PyTorch at the tag of the installed torch "
            "(make test-torch-files PYTORCH=folder)"
        )
    tests, version = Path(folder) / "test" / "distributed", Path(folder) / "version.txt"
    if not tests.is_dir():
        raise ValueError(f"{folder} is no checkout of PyTorch: it has no folder test/distributed")
    has = version.read_text().strip() if version.is_file() else "unknown"
    if minor(has) != minor(torch_version) and not any_version:
        raise ValueError(
            f"{folder} is PyTorch {has}, but torch {torch_version} is installed, and tests fit their own "
            f"version only. Check out the tag v{torch_version.partition('+')[0]}, or pass --any-version."
        )
    return Checkout(tests, has)


def minor(version):
    found = re.match(r"(\d+)\.(\d+)", version)
    return found.groups() if found else version


def choose(checkout, words):
    """The files of the checkout that are meant, each with the words that the names of its tests must have."""
    files = [path for pattern in FILES for path in sorted(checkout.folder.glob(pattern))]
    chosen = {}
    for word in words or [""]:
        file_word, _, test_word = word.partition("::")
        for path in files:
            if file_word in str(path.relative_to(checkout.folder)):
                chosen.setdefault(path, []).append(test_word)
    return chosen


class Worker:
    """A files_worker.py. What it and its ranks print is in the file `log`, which stays if it dies."""

    def __init__(self, backend, path, seconds, with_gpus=False):
        self.backend, self.path, self.seconds = backend, path, seconds
        self.log = tempfile.NamedTemporaryFile(
            "w+", prefix=f"torch_files-{backend}-{path.stem}-", suffix=".log", delete=False
        )
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCH_", "PYCOMM_", "GLOO_"))
        }
        kept["OMP_NUM_THREADS"] = "1"
        if backend == "pycomm":
            kept["PYCOMM_REPLACE"] = "gloo"
        self.process = subprocess.Popen(
            [sys.executable, HERE / "files_worker.py", backend, path, str(seconds), *["--gpus"] * with_gpus],
            env=kept,
            cwd=path.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            bufsize=1,
        )
        self.names = self._answer(START_LIMIT)

    def run(self, name):
        self.process.stdin.write(name + "\n")
        return self._answer(self.seconds + 30)

    def _answer(self, limit):
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"{self.path.name} on {self.backend}: {last_line(Path(self.log.name))}")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        Path(self.log.name).unlink(missing_ok=True)


def last_line(log):
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'ended without a word'} ({log})"


def run_file(path, file, words, seconds, with_gpus, known):
    """Runs the file's tests on both backends and compares. Raises RuntimeError if it cannot be imported."""
    worker = Worker("gloo", path, seconds, with_gpus)
    on_gloo = run_tests(worker, words)
    worker.close()
    worker = Worker("pycomm", path, seconds, with_gpus)
    on_pycomm = run_tests(worker, words)
    in_other_words = {
        name: worker.run(name + "+words")
        for name, result in on_pycomm.items()
        if result["outcome"] == "failed" and known.get(f"{file}::{name}", "").startswith(WORDS)
    }
    worker.close()
    missing = {"outcome": "failed", "reason": "the test does not exist on this backend", "seconds": 0}
    return [
        Compared(
            f"{file}::{name}",
            on_gloo.get(name, missing),
            on_pycomm.get(name, missing),
            in_other_words.get(name, {}),
        )
        for name in sorted(on_gloo.keys() | on_pycomm.keys())
    ]


def run_tests(worker, words):
    results = {}
    for name in worker.names:
        if any(word in name for word in words):
            result = results[name] = worker.run(name)
            text = f"{result['outcome']:8}{result['seconds']:7.2f} s  {worker.backend:7} {name}"
            print(text, flush=True)
    return results


def read_differences(path=DIFFERENCES):
    """{file::Class.test: reason}"""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"{path.name}: {pair[0]} has no reason")
    return dict(pairs)


def judge(compared, known):
    """([(name, text)] of the tests that differ and are not explained, names of explained ones that pass)"""
    new, passing = [], []
    for one in compared:
        if one.name in known and one.pycomm["outcome"] == "passed":
            passing.append(one.name)
        elif one.differs and one.name not in known:
            new.append((one.name, one.pycomm["reason"]))
        elif one.other_words and one.other_words["outcome"] != "passed":
            new.append((one.name, "with any words accepted: " + one.other_words["reason"]))
    return new, passing


def table(compared, known):
    """Lines of a table in Markdown, one per file."""
    lines = [
        "| file | tests | Gloo passes | pycomm passes | both skip | explained |",
        "|---|---|---|---|---|---|",
    ]
    files = {}
    for one in compared:
        files.setdefault(one.name.partition("::")[0], []).append(one)
    for file, ones in [*files.items(), ("together", compared)]:
        counts = [
            len(ones),
            sum(one.gloo["outcome"] == "passed" for one in ones),
            sum(one.pycomm["outcome"] == "passed" for one in ones),
            sum(one.gloo["outcome"] == "skipped" == one.pycomm["outcome"] for one in ones),
            sum(one.differs and one.name in known for one in ones),
        ]
        lines.append(f"| {file} | " + " | ".join(map(str, counts)) + " |")
    return lines


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="a checkout of PyTorch")
    parser.add_argument("words", nargs="*", help="part of a file's path, or FILE::TEST with parts of both")
    parser.add_argument("--any-version", action="store_true", help="take a checkout of another version")
    parser.add_argument("--gpus", action="store_true", help="let tests that ask for GPUs run on the CPU")
    parser.add_argument("--limit", type=float, default=TEST_LIMIT, help="seconds per test")
    parser.add_argument("--json", type=Path, help="write all results there")
    arguments = parser.parse_intermixed_args(arguments)
    import torch

    try:
        checkout = open_checkout(arguments.folder, torch.__version__, arguments.any_version)
        known = read_differences()
    except ValueError as error:
        print(f"torch_suite/files.py: {error}", file=sys.stderr)
        return 2
    compared, broken = [], []
    for path, words in choose(checkout, arguments.words).items():
        file = str(path.relative_to(checkout.folder))
        print(f"--- {file}", flush=True)
        try:
            compared += run_file(path, file, words, arguments.limit, arguments.gpus, known)
        except RuntimeError as error:
            broken.append(f"{file}: {error}")
    if arguments.json:
        arguments.json.write_text(json.dumps([one._asdict() for one in compared], indent=1))
    return conclude(compared, broken, known)


def conclude(compared, broken, known):
    """Prints what came out; returns the exit status. A file that cannot be imported on Gloo, because it wants
    another package, is no difference.
    """
    new, passing = judge(compared, known)
    for name, text in new:
        print(f"\nDIFFERS {name}\n{text}")
    for name in passing:
        print(f"\nPASSES NOW, take it out of {DIFFERENCES.name}: {name}")
    print("\n".join(["", *table(compared, known), "", *(f"not run: {text}" for text in broken)]))
    print(
        f"{len(new)} differences to explain, {len(passing)} explained ones that pass, "
        f"{len(broken)} files not run"
    )
    only_ours = any(" on pycomm: " in text for text in broken)
    return 1 if new or passing or only_ours or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
