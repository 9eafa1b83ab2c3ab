"""setup.py: what is compiled with what, when the kernels are built, and what a user sees of it. Nothing of
csrc/ is compiled here; test_wheel.py builds all.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from build_script import build

ROOT = Path(__file__).parent.parent


@pytest.fixture
def torch_of(monkeypatch: pytest.MonkeyPatch):
    """torch_of(cuda="13.0", gpu=(9, 0)): setup.py sees such a torch and such a GPU."""

    def replace(cuda: str | None, gpu: tuple[int, int] | None) -> None:
        monkeypatch.setattr(build, "TORCH", build.TORCH._replace(cuda=cuda))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)

    monkeypatch.delenv("PYCOMM_CUDA", raising=False)
    monkeypatch.delenv("PYCOMM_CUDA_ARCH", raising=False)
    return replace


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """nvcc(release): the only one that is found; its libcudart_static.a lies in tmp_path/lib64."""

    def make(release: str = "13.0") -> str:
        path = tmp_path / "bin" / "nvcc"
        path.parent.mkdir(exist_ok=True)
        (tmp_path / "lib64").mkdir(exist_ok=True)
        (tmp_path / "lib64" / "libcudart_static.a").touch()
        path.write_text(
            f'#!/bin/sh\necho "Cuda compilation tools, release {release}"\necho "#$ TOP={tmp_path}" >&2\n'
        )
        path.chmod(0o755)
        return str(path)

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return make


# --- what is compiled


@pytest.mark.parametrize("with_kernels", [False, True])
def test_every_source_is_in_one_unit(with_kernels, tmp_path):
    units = [*build.torch_units(tmp_path), *build.core_units(with_kernels)]
    found = sorted(source for unit in units for source in unit.sources)
    stub = ROOT / "csrc" / "cuda" / "kernels" / "stub.cc"
    expected = [path for path in (ROOT / "csrc").rglob("*.cc") if not (with_kernels and path == stub)]
    assert found == sorted(expected)
    assert len({unit.object for unit in units}) == len(units)


def test_names_of_hot_and_cold_files_exist():
    """A name that no file begins with would change nothing."""
    names = [path.relative_to(ROOT / "csrc").as_posix() for path in (ROOT / "csrc").rglob("*.cc")]
    for start in (*build.COLD, *build.CALLED):
        assert any(name.startswith(start) for name in names), start


def test_a_unit_is_written_again_only_when_it_changes(tmp_path):
    first = {unit.source: unit.source.stat().st_mtime_ns for unit in build.torch_units(tmp_path)}
    assert first == {unit.source: unit.source.stat().st_mtime_ns for unit in build.torch_units(tmp_path)}


def test_the_torch_that_is_installed():
    assert build.installed_torch() == (Path(torch.__file__).parent, torch.__version__, torch.version.cuda)


# --- the kernels


@pytest.mark.parametrize(
    ("seen", "asked", "expected"),
    [
        ({"cuda": None, "gpu": None}, None, False),  # a torch for CPUs, wherever nvcc lies
        ({"cuda": None, "gpu": (9, 0)}, None, False),
        ({"cuda": "13.0", "gpu": None}, None, True),  # a login node: no GPU is visible
        ({"cuda": "13.0", "gpu": (9, 0)}, None, True),
        ({"cuda": None, "gpu": None}, "1", True),
        ({"cuda": "13.0", "gpu": (9, 0)}, "0", False),
    ],
)
def test_when_kernels_are_built(seen, asked, expected, torch_of, nvcc, monkeypatch):
    torch_of(**seen)
    path = nvcc()
    if asked:
        monkeypatch.setenv("PYCOMM_CUDA", asked)
    found = build.find_cuda()
    assert (found is not None) == expected
    if found:
        assert found.nvcc == path and found.archs == (["90"] if seen["gpu"] else ["80", "90"])


def test_without_a_usable_nvcc(torch_of, nvcc, monkeypatch, capsys):
    torch_of("13.0", None)
    nvcc("12.4")
    assert build.find_cuda() is None
    assert "built without the kernels for CUDA tensors, because" in capsys.readouterr().out
    monkeypatch.setenv("PYCOMM_CUDA", "1")
    with pytest.raises(SystemExit, match=r"PYCOMM_CUDA=1, but .*nvcc is older than 12.5"):
        build.find_cuda()
    monkeypatch.setenv("PYCOMM_CUDA", "yes")
    with pytest.raises(SystemExit, match="PYCOMM_CUDA=yes: 0, 1 or auto"):
        build.find_cuda()


@pytest.mark.parametrize(
    ("gpu", "asked", "expected"),
    [
        (None, None, ["80", "90"]),
        (None, "all", ["80", "90"]),
        (None, "90", ["90"]),
        ((10, 3), None, ["103"]),
        ((10, 3), "native", ["103"]),
        ((10, 3), "all", ["80", "90"]),
    ],
)
def test_architectures(gpu, asked, expected, torch_of):
    torch_of("13.0", gpu)
    assert build.architectures(asked) == expected
    flags = " ".join(build.flags_for(expected))
    assert flags.startswith("-std=c++20 -O3")
    assert flags.count("-gencode") == len(expected)
    for arch in expected:
        assert f"arch=compute_{arch},code=" in flags


@pytest.mark.parametrize(
    ("asked", "text"), [("native", "finds no GPU"), ("sm_90", "a number like 90"), ("75", "at least 80")]
)
def test_wrong_architectures(asked, text, torch_of):
    torch_of("13.0", None)
    with pytest.raises(SystemExit, match=text):
        build.architectures(asked)


# --- what a user sees


def test_ninja_beside_the_interpreter(tmp_path, monkeypatch):
    """In a virtual environment that is not activated; before another version in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(build, "sys", SimpleNamespace(executable=str(tmp_path / "python")))
    with pytest.raises(SystemExit, match="pip install ninja"):
        build.find_ninja()
    for folder in (tmp_path / "elsewhere", tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "ninja").write_text("#!/bin/sh\n")
        (folder / "ninja").chmod(0o755)
        assert build.find_ninja() == str(folder / "ninja")


def test_progress():
    lines = [
        "ninja: Entering directory `/x/build'\n",
        "@1 12 transport/wait.cc\n",
        "csrc/transport/join.cc:7:1: warning: something\n",
        "@12 12 the extension\n",
        "ninja: no work to do.\n",
    ]
    assert list(build.progress(lines, lambda: 7.4)) == [
        "[ 1 of 12,    7 s] transport/wait.cc",
        "csrc/transport/join.cc:7:1: warning: something",
        "[12 of 12,    7 s] the extension",
    ]


def test_an_error_is_the_message_of_the_compiler(tmp_path):
    """One file is compiled for real, with a mistake in it."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "wrong.cc").write_text("int f() { return missing; }\n")
    for name in ("parallel", "benchmarks"):
        (tmp_path / "pycomm" / name).mkdir(parents=True)
        (tmp_path / "pycomm" / name / "__init__.py").touch()
    (tmp_path / "pycomm" / "__init__.py").write_text('__version__ = "1"\n')
    code = (
        "import setup\n"
        "text = setup.ninja_file(setup.core_units(False), setup.BUILD / 'x.so', None)\n"
        "setup.write(setup.BUILD / 'build.ninja', text)\n"
        "setup.run_ninja()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert (
        "FAILED: build/core/wrong.o\n" in done.stdout and "error: ‘missing’ was not declared" in done.stdout
    )
    assert " -o " not in done.stdout
    assert done.stderr == "pycomm was not built: see the compiler's message above.\n"
