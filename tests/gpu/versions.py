"""python tests/gpu versions: what the figures depend on, as JSON."""

import importlib.metadata
import json
import platform
import re
import subprocess
from pathlib import Path

from pycomm.benchmarks.common import device
from pycomm.benchmarks.common.report import machine

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "pybind11",
    "ninja",
    "pytest",
    "nvidia-nccl-cu13",
    "nccl4py",
)


def output(*command):
    """What a command prints, or why there is nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({type(error).__name__})"
    return (
        done.stdout.strip()
        if done.returncode == 0
        else f"unknown ({command[0]} ended with {done.returncode})"
    )


def package(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions():
    found = {"python": platform.python_version(), **{name: package(name) for name in PACKAGES}}
    nvcc = re.search(r"release (\S+)", output("nvcc", "--version"))
    found["nvcc"] = nvcc[1].rstrip(",") if nvcc else "not found"
    found["driver"] = output(
        "nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"
    )
    found["commit"] = output("git", "rev-parse", "HEAD")
    if not found["commit"].startswith("unknown"):
        found["uncommitted"] = len(
            output("git", "status", "--porcelain", "--untracked-files=no").splitlines()
        )
    gpu = device.describe() if device.why_no_cuda() is None else {"gpu": "none"}
    return {"versions": found, "machine": machine() | gpu}


def main():
    print(json.dumps(versions()))
    return 0
