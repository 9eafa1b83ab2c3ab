"""The metadata that setup.py states, without a build: test_wheel.py looks at those of a real wheel."""

import email
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_script import build
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
ADDRESS = "https://example.org/pycomm"


@pytest.mark.parametrize(
    ("installed", "requirement"),
    [
        ("2.13.0+cpu", "torch>=2.13,<2.14"),
        ("2.11.0", "torch>=2.11,<2.12"),
        ("2.14.1.post2", "torch>=2.14,<2.15"),
        ("2.14.0a0+git1234abc", "torch>=2.14.0.dev0,<2.15"),
        ("2.15.0.dev20260801+cu130", "torch>=2.15.0.dev0,<2.16"),
        ("2.15.0rc2", "torch>=2.15.0.dev0,<2.16"),
        ("3.0.0+rocm7.1", "torch>=3.0,<3.1"),
    ],
)
def test_required_torch(installed, requirement):
    assert build.required_torch(installed) == requirement


@pytest.mark.parametrize(
    ("text", "with_address", "without"),
    [
        ("a [page](docs/a.md#x).", f"a [page]({ADDRESS}/blob/HEAD/docs/a.md#x).", "a page (docs/a.md#x)."),
        ("[docs/a.md](docs/a.md)", f"[docs/a.md]({ADDRESS}/blob/HEAD/docs/a.md)", "docs/a.md"),
        ("[one](a.md), [two](b.md)", None, "one (a.md), two (b.md)"),
        ("[over\ntwo lines](a.md)", None, "over\ntwo lines (a.md)"),
        ("[there](https://example.org/x) [here](#install)", ..., ...),
        ("```python\nx = [f](a)\n```", ..., ...),
        ("`[f](a)`", ..., ...),
    ],
)
def test_links_of_the_readme(text, with_address, without):
    """... : nothing changes."""
    change = build.readable_elsewhere
    assert change(text, None) == (text if without is ... else without)
    changed = change(text, ADDRESS)
    assert changed == (text if with_address is ... else with_address or changed)
    assert with_address is ... or changed.count(f"]({ADDRESS}/blob/HEAD/") == text.count("](")


def test_address_of_the_repository(tmp_path, monkeypatch):
    """From the variable, or from what a source distribution was made with."""
    repository = build.repository
    monkeypatch.delenv("PYCOMM_REPOSITORY", raising=False)
    assert repository(tmp_path) is None
    (tmp_path / "PKG-INFO").write_text(f"Name: x\nProject-URL: Repository, {ADDRESS}\n\nText\n")
    assert repository(tmp_path) == ADDRESS
    monkeypatch.setenv("PYCOMM_REPOSITORY", "https://example.org/fork/")
    assert repository(tmp_path) == "https://example.org/fork"
    for wrong in ("git@example.org:pycomm", "https://user:secret@example.org/pycomm", "no"):
        monkeypatch.setenv("PYCOMM_REPOSITORY", wrong)
        with pytest.raises(SystemExit, match="PYCOMM_REPOSITORY"):
            repository(tmp_path)


@pytest.mark.parametrize("address", [ADDRESS, None])
def test_metadata_of_a_wheel(address, tmp_path):
    """As pip gets them before it builds."""
    environment = {**os.environ, "PYCOMM_CUDA": "0", "PYCOMM_REPOSITORY": address or ""}
    code = f"import setuptools.build_meta as b; b.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.dist-info/METADATA")
    metadata = email.message_from_string(file.read_text())
    minor = int(torch.__version__.split(".")[1])
    required = map(Requirement, metadata.get_all("Requires-Dist"))
    assert Requirement(f"torch>=2.{minor},<2.{minor + 1}") in required
    assert metadata["Author"] and metadata["Keywords"] and metadata.get_all("Classifier")
    assert bool(metadata.get_all("Project-URL")) == bool(address)
    targets = re.findall(r"\]\(([^)\s]+)\)", metadata.get_payload())
    assert all(target.startswith("https://") for target in targets) and bool(targets) == bool(address)
