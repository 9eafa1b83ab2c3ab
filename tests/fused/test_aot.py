"""Every kernel of pycomm.fused compiles for sm_80, sm_90 and sm_100 as it would be launched there, and keeps
the rules: nothing spilled, shared memory within the limit, tensor cores used for 16-bit types, data and
signals in order (ptx_check.py).

Compiled in a process of its own by aot.py, without a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ptx_check import shortcomings
from tiers import tier

HERE = Path(__file__).parent
ARCHS = (80, 90, 100)
pytest.importorskip("triton")


def records(folder, cases, archs, limit):
    out = folder / "records.jsonl"
    command = [
        sys.executable,
        str(HERE / "aot.py"),
        cases,
        "--arch",
        ",".join(map(str, archs)),
        "--out",
        str(out),
    ]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, check=True, timeout=limit)
    return [json.loads(line) for line in out.read_text().splitlines()]


def assert_all_keep_the_rules(found):
    wrong = {record["name"]: shortcomings(record) for record in found if shortcomings(record)}
    assert not wrong, json.dumps(wrong, indent=1)


@tier(slow=1)
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "archs", [(90,), pytest.param((80, 100), marks=pytest.mark.deep)], ids=["sm_90", "others"]
)
def test_shipped_configurations(tmp_path, archs):
    found = records(tmp_path, "quick", archs, 400)
    for arch in archs:
        for op in ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            assert sum(record["name"].startswith(f"sm_{arch} {op} ") for record in found) >= 6
    assert_all_keep_the_rules(found)


@tier(deep=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_combinations(tmp_path, arch, deep):
    """Each two properties of a kernel together; with --deep all."""
    found = records(tmp_path, "all" if deep else "pairs", (arch,), 1700)
    assert len(found) > 100
    assert_all_keep_the_rules(found)
