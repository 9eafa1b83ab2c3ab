"""`make test BASE=REV` (touched.py): a small tree whose uses are known by hand, in its own repository."""

import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT
from tiers import tier
from touched import HARNESS, changed_files, listed, touched

TREE = {
    "README.md": "",
    "csrc/ring/pipeline.h": "",
    "csrc/wire.cc": "",
    "parallel/run/step.py": "",
    "pycomm/__init__.py": "",
    "pycomm/doctor.py": "",
    "pycomm/plan/__init__.py": "",
    "pycomm/plan/__main__.py": "",
    "examples/common.py": "",
    "examples/01_sum.py": "import common",
    "tests/README.md": "values.py, cpp/other.cc",
    "tests/conftest.py": "",
    "tests/tiers.py": "",
    "tests/values.py": "",
    "tests/ranks.py": "from values import one",
    "tests/alone.py": "",
    "tests/cpp/work_test.cc": '#include "work.h"',
    "tests/cpp/work.h": "",
    "tests/cpp/other.cc": "",
    "tests/hosts/conftest.py": "import ranks",
    "tests/hosts/test_wires.py": "from pycomm.parallel.run import step",
    "tests/hosts/test_alone.py": "",
    "tests/test_cpp.py": 'NAMES = ("work_test",)\nFILES = [f"{name}.cc" for name in NAMES]',
    "tests/test_doctor.py": 'command = ["-m", "pycomm.plan"]',
    "tests/test_docs.py": 'PAGES = ["README.md", "docs/page.md"]',
    "tests/test_pages.py": 'PAGES = ["README.md", "docs/page.md"]\nimport test_docs',
    "tests/test_examples.py": 'script = "01_sum.py"',
    "tests/test_faults.py": 'FAULTS = ("ring/pipeline.h", "other", "values", "step.py")\nimport pycomm',
    "tests/test_ranks.py": "import test_sums, pycomm.doctor, tiers",
    "tests/test_sums.py": "import values",
    "tests/test_broken.py": "this is not Python",
}
HOSTS = ["hosts/test_alone", "hosts/test_wires"]
# (changed file, the test files that it touches)
USES = [
    ("tests/test_sums.py", ["test_ranks", "test_sums"]),
    ("tests/test_broken.py", ["test_broken"]),
    ("tests/ranks.py", [*HOSTS, "test_ranks"]),  # the last one by its name
    ("tests/values.py", [*HOSTS, "test_ranks", "test_sums"]),
    ("tests/hosts/conftest.py", HOSTS),
    ("tests/alone.py", []),  # hosts/test_alone.py does not lie beside it
    ("tests/deleted.py", []),
    ("tests/cpp/work.h", ["test_cpp"]),
    ("tests/cpp/work_test.cc", ["test_cpp"]),
    ("tests/cpp/other.cc", []),  # "other" alone is no name of a program
    ("examples/common.py", ["test_examples"]),
    ("csrc/ring/pipeline.h", ["test_faults"]),
    ("csrc/wire.cc", []),
    ("parallel/run/step.py", ["hosts/test_wires", "test_faults"]),
    ("pycomm/__init__.py", []),
    ("pycomm/doctor.py", ["test_doctor", "test_ranks"]),
    ("pycomm/plan/__main__.py", ["test_doctor"]),
    ("README.md", ["test_docs", "test_pages"]),
    ("docs/page.md", ["test_docs", "test_pages"]),
    ("docs/other.md", ["test_docs"]),
    ("tests/README.md", ["test_docs"]),
    ("tests/tiers.py", []),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A branch with a commit after main, where main has gone on too."""
    root = tmp_path_factory.mktemp("tree")
    for path, text in TREE.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    git(root, "init", "-q", "-b", "main")
    commit(root)
    git(root, "checkout", "-q", "-b", "branch")
    (root / "tests/values.py").write_text("one = 1\n")
    commit(root)
    git(root, "checkout", "-q", "main")
    (root / "csrc/wire.cc").write_text("int changed_on_main;\n")
    commit(root)
    git(root, "checkout", "-q", "branch")
    return root


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", root, *identity, *arguments], check=True, capture_output=True, timeout=30)


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "change")


@pytest.mark.parametrize("path, names", USES, ids=[path for path, _ in USES])
def test_uses(tree: Path, path: str, names: list[str]):
    found = touched([path], tree)
    assert found.tests == [f"tests/{name}.py" for name in names]
    assert found.without == ([] if names else [path])


def test_several_files(tree: Path):
    found = touched(["csrc/wire.cc", "README.md", "tests/cpp/work.h"], tree)
    assert found.tests == [
        f"tests/test_{name}.py" for name in ("cpp", "docs", "pages")
    ] and found.without == ["csrc/wire.cc"]


def test_changed_files(tree: Path):
    """Of this branch only; changed, staged, deleted, renamed and new files; without those git ignores."""
    assert changed_files("main", tree) == ["tests/values.py"] and changed_files("HEAD", tree) == []
    try:
        (tree / ".git/info/exclude").write_text("*.log\n")
        (tree / "tests/new.py").write_text("")
        (tree / "tests/run.log").write_text("")
        (tree / "README.md").write_text("more\n")
        git(tree, "rm", "-q", "tests/alone.py")
        git(tree, "mv", "csrc/wire.cc", "csrc/cable with a blank.cc")
        expected = [
            "README.md",
            "csrc/cable with a blank.cc",
            "csrc/wire.cc",
            "tests/alone.py",
            "tests/new.py",
        ]
        assert changed_files("HEAD", tree) == expected
    finally:
        git(tree, "reset", "-q", "--hard")
        git(tree, "clean", "-q", "-f", "-x")


def test_no_such_commit(tree: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="BASE=nothing is not a commit .*make test BASE=main"):
        changed_files("nothing", tree)
    with pytest.raises(ValueError, match="BASE=--all is not a commit"):
        changed_files("--all", tree)
    with pytest.raises(ValueError, match="not a git repository"):
        changed_files("main", tmp_path)
    git(tree, "checkout", "-q", "--orphan", "unrelated")
    commit(tree)
    with pytest.raises(ValueError, match="no commit in common"):
        changed_files("main", tree)
    git(tree, "checkout", "-q", "branch")


def test_the_harness_is_what_conftest_imports():
    text = (ROOT / "tests/conftest.py").read_text()
    named = {path.split("/")[1].removesuffix(".py") for path in HARNESS} - {"conftest"}
    assert all(f"from {name} import *" in text for name in named) and text.count("import *") == len(named)


def test_listed():
    assert listed(["a"], "file") == "1 file: a" and listed(["a", "b"], "file") == "2 files: a, b"
    assert listed(list("abcdefghijklmn"), "file").endswith("j, k, l and 2 more")


# --- a run ---------------------------------------------------------------------------------------

TESTS = """
import pytest
from tiers import tier
{line}
@tier(deep=1)
def test_deep(request): assert request.config.getoption("timeout") == 3600
def test_quick(): pass
@pytest.mark.torch_suite
def test_suite(): pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Three files of tests, of which one imports a helper."""
    (tmp_path / "tests").mkdir()
    path = f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    (tmp_path / "tests/conftest.py").write_text(f"{path}from tiers import *\nfrom touched import *\n")
    (tmp_path / "tests/helper.py").write_text("")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")  # a run leaves some
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for name, line in {"one": "import helper", "two": "", "three": ""}.items():
        (tmp_path / f"tests/test_{name}.py").write_text(TESTS.format(line=line))
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    return tmp_path


def run(root: Path, base: str) -> subprocess.CompletedProcess[str]:
    """As the Makefile has it."""
    options = ["-n", "2", "--dist", "loadfile", "-v", "-m", "not slow and not torch_suite", "--base", base]
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)


def test_run_of_touched_files(project: Path):
    (project / "tests/helper.py").write_text("# changed\n")
    (project / "setup.py").write_text("")
    done = run(project, "main")
    assert done.returncode == 0 and " 2 passed" in done.stdout, done.stdout + done.stderr
    assert "BASE=main: all cases of 1 test file: tests/test_one.py\n" in done.stdout
    assert "not assigned to a test file: 1 changed file: setup.py\n" in done.stdout
    assert "tests/test_one.py::test_deep" in done.stdout and "test_two" not in done.stdout


@tier(quick=1 / 2)
@pytest.mark.parametrize(
    "file, text", [(None, "nothing has changed"), ("setup.py", "no test file is touched")]
)
def test_run_without_touched_files(project: Path, file: str | None, text: str):
    """The quick tests of all files: it never passes because it had nothing to do."""
    if file:
        (project / file).write_text("")
    done = run(project, "main")
    assert done.returncode == 0 and " 3 passed" in done.stdout, done.stdout + done.stderr
    assert f"BASE=main: {text}; the run goes on as without BASE\n" in done.stdout
    assert "test_deep" not in done.stdout


def test_run_with_a_wrong_base(project: Path):
    done = run(project, "mian")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: BASE=mian is not a commit" in done.stderr and "Traceback" not in done.stderr, done.stderr
