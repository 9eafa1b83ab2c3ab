"""pycomm on CUDA tensors without a GPU: a variant of the extension for tests, and the processes in which it
runs.

The variant is made by linking the object files of the normal build with a driver that lives in host memory
(tests/cpp/cuda/fake_*.cc), the kernels on fibers (fake_launch.cc) and a CUDA device for torch over both
(fake_torch_device.h), in place of launch.cu or stub.cc. So what is tested are the very object files that
users get. It needs a torch built without CUDA, whose place for that device is free.

pybind11 types can be registered once per process, so the variant and the normal extension exclude each other.
A Server is a process with the variant; it forks one for each case, and that one forks ranks: as with CUDA
nobody may fork after the first use.

    with Server() as server:
        server.run("cuda_native_cases.abort", devices=1)      a function of that module, in a fresh process
"""

import contextlib
import gc
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from pathlib import Path

import compiled
import torch

ROOT = Path(__file__).parent.parent
HERE = ROOT / "tests" / "cpp" / "cuda"
FOR_TORCH = ("fake_torch_module", "fake_torch_device", "fake_nccl")
REPLACED = ("stub.cc",)  # and what nvcc makes, which has no source of this ending
LIMIT = 40  # seconds of a case


# --- building --------------------


def build():
    """Path of the variant; made anew when a source or an object file has changed."""
    normal = compiled.built(path for path in (ROOT / "csrc").rglob("*.cc") if path.name not in REPLACED)
    include = Path(torch.__file__).parent / "include"
    folders = [
        HERE / "brief",
        include,
        include / "torch" / "csrc" / "api" / "include",
        sysconfig.get_path("include"),
    ]
    of_torch = [part for path in folders for part in ("-isystem", path)]
    sources = [HERE / f"{name}.cc" for name in FOR_TORCH]
    of_torch.append("-DAT_PER_OPERATOR_HEADERS")  # see brief/ATen/Functions.h
    jobs = [
        # What is in headers of torch takes the compiler longer to optimise than to run.
        lambda: [compiled.unit("fake_torch", sources, [*compiled.DEVICE_FLAGS, "-O0", *of_torch])],
        lambda: [compiled.fake_driver(), *compiled.fake_launch()],
    ]
    files = [*normal, *(file for made in compiled.in_parallel(lambda job: job(), jobs) for file in made)]
    facts = "".join(f"{path} {path.stat().st_mtime_ns} {path.stat().st_size}\n" for path in sorted(files))
    folder = ROOT / "build" / "fake_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"_C-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    with compiled.locked(library):
        _link(library, files)
    return library


def _link(library: Path, files: list[Path]) -> None:
    if not library.exists():
        for old in library.parent.glob("_C-*.so"):
            old.unlink(missing_ok=True)
        lib = Path(torch.__file__).parent / "lib"
        libraries = [f"-L{lib}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
        own = library.with_name(f"{library.name}.{os.getpid()}")
        compiled.link([*files, *libraries], own, ["-shared"]).rename(library)


# --- in a process with the variant --------------------


def load(library):
    """Makes `import pycomm` find the variant, and torch believe that CUDA is initialised."""
    global driver
    for name in ("pycomm._C", "_fake_cuda"):
        spec = importlib.util.spec_from_file_location(name, library)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    driver = sys.modules["_fake_cuda"]
    torch.cuda._lazy_init = lambda: None
    torch.cuda.current_device = driver.current_device
    torch.cuda.get_device_capability = lambda *device: (9, 0)


@contextlib.contextmanager
def stream(device=0):
    """A stream of torch's pool is current, as with torch.cuda.stream(torch.cuda.Stream()). What is in it has
    run at the end.
    """
    made = driver.new_stream(device)
    before = driver.exchange_stream(made, device)
    try:
        yield made
        driver.synchronize(made, device)
    finally:
        driver.exchange_stream(before, device)


def synchronize(device=0):
    """Blocks until the current stream has run."""
    driver.synchronize(driver.current_stream(device), device)


def wait_until(condition, limit=15.0):
    """Polls; bounded."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come"
        time.sleep(0.002)


def idle(device=0):
    """Has the current stream nothing to run?"""
    return driver.query(driver.current_stream(device), device)


def gate(device=0):
    """Holds up the current stream until open() of the result is called."""
    return driver.Gate(device)


def check_nothing_left():
    """Waits for all streams; every object of the driver was given back and none of its rules was broken."""
    gc.collect()
    driver.finish()
    assert not driver.left_over(), driver.left_over()
    assert not driver.violations(), driver.violations()


# --- the server --------------------


# torch asks for its CUDA hooks while it is imported: ours are in the process before.
BOOT = """
import ctypes, sys
for library in sys.argv[1:]: ctypes.CDLL(library)
import fake_cuda
fake_cuda.serve(sys.argv[-1])
"""


class Server:
    """A process that runs functions, each in a fork of itself."""

    def __init__(self):
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-c",
            BOOT,
            str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"),
            str(build()),
        ]
        self._process = subprocess.Popen(
            command,
            cwd=Path(__file__).parent,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *ignored):
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT + 10)
        finally:
            self._process.kill()
            self._process.stdout.close()

    def run(self, case, *args, **settings):
        """Fails with what the case has printed unless it returns. settings: of FakeSettings in
        fake_driver.h.
        """
        self._process.stdin.write(json.dumps([case, args, settings]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process with the variant of the extension has ended"
        ok, text = json.loads(answer)
        assert ok, text


def serve(library):
    load(library)
    for line in sys.stdin:
        case, args, settings = json.loads(line)
        module, function = case.split(".")
        function = getattr(importlib.import_module(module), function)
        with tempfile.TemporaryFile() as output:
            pid = os.fork()
            if pid == 0:
                _run_case(function, args, settings, output.fileno())
            _, status = os.waitpid(pid, 0)  # an alarm ends it
            output.seek(0)
            text = output.read().decode(errors="replace")
        print(json.dumps([status == 0, f"{case}: status {status}\n{text[-8000:]}"]), flush=True)


def _run_case(function, args, settings, output):
    """Never returns."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.alarm(LIMIT)
    code = 1
    try:
        torch.set_num_threads(1)
        driver.use({"multiprocessors": 4, "longest_wait": 15.0, **settings})
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
