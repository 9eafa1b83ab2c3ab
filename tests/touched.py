"""`make test BASE=REV`: all cases of the test files that a change touches, whatever their tier.

The change: what differs from the commit where this branch left REV, uncommitted and new files included. A
test file is touched

  - when it has changed, or a conftest.py of its folder has;
  - when it imports or names a changed file: by its module (`pycomm.doctor`), by its path from the root, by
    the end of its path in quotes ("collectives/pipeline.h"; "work_test" where the text adds .cc to names), a
    file of tests/ or examples/ also without quotes;
  - when it does so through other files of tests/ and examples/;
  - when it is called test_NAME.py, and NAME is what the changed file is called;
  - test_docs.py, when a page in Markdown has changed.

What a file of pycomm, parallel, benchmarks or csrc changes in the files that use it is not followed: by that
rule, nearly every change touches everything. Nor are this module and the others that conftest.py imports.
The head of the run lists changed files that touch nothing; `make test` has their tests. Where no test file is
touched, the run goes on as without BASE, so that it never passes because it had nothing to do.
"""

import re
import subprocess
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from source_tree import imports

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# Whole suites of others, and what needs a GPU, have commands of their own.
ALL_CASES = "not torch_suite and not frameworks and not gpu"
LIMIT = 3600  # seconds per test, as in `make test-deep`
READ = ("tests/", "examples/")  # whose files are followed
HARNESS = {f"tests/{name}.py" for name in ("conftest", "tiers", "workers", "touched")}
SHOWN = 12  # names in the head of the run
_head, _touched = pytest.StashKey[list[str]](), pytest.StashKey[list[str]]()


class Touched(NamedTuple):
    """Paths from the root on."""

    changed: list[str]
    tests: list[str]
    without: list[str]  # changed files that touch no test file


# --- what has changed ----------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)


def changed_files(base: str, root: Path) -> list[str]:
    """Paths from the root on, of deleted files too. Raises ValueError for what git cannot compare with."""
    commit = git(root, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}")
    if commit.returncode:
        raise ValueError(
            f"BASE={base} is not a commit that git knows in {root} ({commit.stderr.strip()}). Give a "
            "branch, a tag or a commit, as in: make test BASE=main"
        )
    left = git(root, "merge-base", "HEAD", commit.stdout.strip())
    if left.returncode:
        raise ValueError(
            f"BASE={base} and HEAD have no commit in common. Give a commit that this one follows."
        )
    differs = git(root, "diff", "--name-only", "--no-renames", "--relative", "-z", left.stdout.strip())
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z")
    differs.check_returncode()
    new.check_returncode()
    return sorted({*differs.stdout.split("\0"), *new.stdout.split("\0")} - {""})


# --- what it touches -----------------------------------------------------------------------------


class Source:
    """A file of tests/ or examples/: what it imports and which files it names."""

    def __init__(self, path: str, root: Path):
        self.path = path
        self.file = root / path

    @cached_property
    def text(self) -> str:
        return self.file.read_text(errors="replace")

    @cached_property
    def imported(self) -> set[str]:
        """Modules: of `from a import b` both a and a.b, as b may be one."""
        programs = {f"{module}.__main__" for module in re.findall(r"""-m["',\s]+([\w.]+)""", self.text)}
        if self.file.suffix != ".py":
            return programs
        try:
            found = list(imports(self.file))
        except SyntaxError:  # pytest reports it
            return programs
        return programs | {module for module, _ in found} | {f"{module}.{name}" for module, name in found}

    @cached_property
    def quoted(self) -> set[str]:
        """Words in quotes, and with .cc where that is added to names: f"{name}.cc"."""
        words = set(re.findall(r"""["']([\w./-]+)["']""", self.text))
        return words | {f"{word}.cc" for word in words if "}.cc" in self.text}

    @cached_property
    def named(self) -> set[str]:
        """What could be a path or a module, and the ends of the paths: "gpu/values.py" and "values.py" of
        "tests/gpu/values.py".
        """
        words = self.quoted | set(re.findall(r"[\w/-]+\.[\w./-]*\w", self.text))
        return {end for word in words for end in ends_of(word)}

    def uses(self, path: str) -> bool:
        if Path(path).name == "conftest.py":
            return is_test(self.path) and self.path.startswith(path.removesuffix("conftest.py"))
        modules, ends = modules_of(path), ends_of(path)
        if self.imported & modules or self.named & {path, *(name for name in modules if "." in name)}:
            return True
        if ends[-1] in ("__init__.py", "__main__.py", "README.md"):  # as many are
            return False
        return bool((self.named if path.startswith(READ) else self.quoted) & set(ends))


def is_test(path: str) -> bool:
    return re.fullmatch(r"tests/(.*/)?test_\w+\.py", path) is not None


def ends_of(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def modules_of(path: str) -> set[str]:
    """The names under which a Python file is imported: tests/gpu/values.py is values and gpu.values. Packages
    have none: `import pycomm` is no use of pycomm/__init__.py alone.
    """
    if not path.endswith(".py") or path.endswith("/__init__.py"):
        return set()
    names = [end.removesuffix(".py").replace("/", ".") for end in ends_of(path)]
    if path.startswith(READ):
        return set(names)
    return {names[0] if path.startswith("pycomm/") else f"pycomm.{names[0]}"}


def touched(changed: Iterable[str], root: Path) -> Touched:
    """The test files that these changed files touch."""
    changed = sorted(changed)
    files = [file for folder in READ for file in sorted((root / folder).rglob("*")) if is_text(file)]
    paths = [file.relative_to(root).as_posix() for file in files]
    sources = [Source(path, root) for path in paths if path not in HARNESS]
    found, without = set(), []
    for path in changed:
        tests = {test for test in paths if test == path or is_named_after(test, path)}
        tests |= {user.path for user in reached(path, sources)}
        tests = {test for test in tests if is_test(test)}
        found |= tests
        without += [] if tests else [path]
    return Touched(changed, sorted(found), without)


def is_text(file: Path) -> bool:
    """A page names files that it does not use."""
    others = (".md", ".pyc", ".png", ".so")
    return file.is_file() and file.suffix not in others and file.stat().st_size < 1_000_000


def is_named_after(test: str, path: str) -> bool:
    """test_NAME.py of a product's file NAME; a file of tests/ has it beside it. Pages have test_docs.py."""
    folder, _, name = test.rpartition("/")
    if path.endswith(".md"):
        return test == "tests/test_docs.py"
    beside = not path.startswith("tests/") or path.rpartition("/")[0] == folder
    return beside and name == f"test_{Path(path).stem}.py"


def reached(path: str, sources: list[Source]) -> list[Source]:
    """The files that use `path`, and those that use them; of a page only the former."""
    found, ahead = [], [] if path in HARNESS else [path]
    others = [source for source in sources if source.path != path]
    while ahead:
        used = ahead.pop()
        users = [source for source in others if source.uses(used)]
        others = [source for source in others if source not in users]
        found += users
        ahead += [] if path.endswith(".md") else [source.path for source in users]
    return found


# --- hooks of pytest -----------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Sets the options before other plugins read them. Workers of pytest-xdist get the list of the run."""
    base = config.getoption("--base")
    if not base:
        return
    if hasattr(config, "workerinput"):
        chosen = config.workerinput["touched"]
    else:
        try:
            found = touched(changed_files(base, config.rootpath), config.rootpath)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        config.stash[_head], chosen = head_of(base, found), found.tests
    config.stash[_touched] = chosen
    if chosen:
        config.option.deep, config.option.markexpr, config.option.timeout = True, ALL_CASES, LIMIT


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: "WorkerController") -> None:
    node.workerinput["touched"] = node.config.stash.get(_touched, [])


def head_of(base: str, found: Touched) -> list[str]:
    """Lines at the head of a run."""
    if found.tests:
        head = [f"BASE={base}: all cases of {listed(found.tests, 'test file')}"]
    elif found.changed:
        head = [f"BASE={base}: no test file is touched; the run goes on as without BASE"]
    else:
        head = [f"BASE={base}: nothing has changed; the run goes on as without BASE"]
    if found.without:
        head.append(f"not assigned to a test file: {listed(found.without, 'changed file')}")
    return head


def listed(names: list[str], noun: str) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {noun}{'s' * (len(names) != 1)}: {', '.join(names[:SHOWN])}{more}"


def pytest_report_header(config: pytest.Config) -> list[str]:
    return config.stash.get(_head, [])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.stash.get(_touched, [])
    if not chosen or not collection_path.is_file():
        return None
    return collection_path.relative_to(config.rootpath).as_posix() not in chosen or None
