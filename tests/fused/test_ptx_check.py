"""Every rule of ptx_check finds the fault that it is for, and clean kernels give no report.

Faults are planted in the source of a small kernel (faulty_kernels.py) and, by edits of the text, in the PTX
of the real ones.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ptx_check import Counts, check, expected, shortcomings
from tiers import tier

HERE = Path(__file__).parent
REAL = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run(
        [sys.executable, str(HERE / "faulty_kernels.py"), str(folder)],
        env=environment,
        check=True,
        timeout=110,
    )
    return json.loads((folder / "kernels.json").read_text())


def rules(violations):
    return {violation.rule for violation in violations}


SOURCE_FAULTS = (
    "none", "release of the gpu", "relaxed signal", "signal before the data", "address without alignment",
    "plain load, whose loop is deleted", "volatile load", "acquire of the gpu", "relaxed loop", "one look",
    "loop that ends by a counter", "no wait",
)  # fmt: skip


@tier(slow=1 / 2)
@pytest.mark.parametrize("fault", SOURCE_FAULTS)
def test_fault_in_the_source(kernels, fault):
    kernel = kernels["exchange"][fault]
    found = check(kernel["ptx"], kernel["pointers"], Counts(posts=1, waits=1, words=0))
    assert (kernel["rule"] in rules(found)) if kernel["rule"] else not found, [*map(str, found)]


@tier(slow=1)
def test_every_fault_of_the_source_is_asked_for(kernels):
    assert set(kernels["exchange"]) == set(SOURCE_FAULTS)


@pytest.mark.parametrize("what", ("spilled", "shared memory"))
def test_oversized_configuration(kernels, what):
    assert [found for found in shortcomings(kernels["oversized"][what]) if found.startswith(what)]


def test_a_kernel_without_tensor_cores_or_that_fails(kernels):
    record = {**kernels["oversized"]["shared memory"], "shared": 0}
    assert shortcomings(record) == []
    assert shortcomings({**record, "tensor_cores": 0}) == ["tensor cores: not used"]
    assert shortcomings({**record, "violations": ["line 1: post: ..."]}) == ["line 1: post: ..."]
    assert shortcomings({"name": "", "failed": "CompilationError"}) == ["does not compile: CompilationError"]


def no_barrier_before(text, release):
    """Takes away the barriers just before every release of a kind; Triton 3.9 has put one there as well."""
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if re.search(release, line):
            for before in range(index - 25, index):
                lines[before] = "" if re.match(r"\s*bar(rier)?\.sync", lines[before]) else lines[before]
    return "\n".join(lines)


def store_behind_barrier(text):
    """Puts a store between every release at system scope and the barrier before it."""
    store = re.search(r"\n(\s*(?:@%p\d+ )?st\.global\.v4\.b32 [^;]*;)", text)[1]
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if "sys.release.exch" in line:
            lines[index] = f"{store}\n{line}"
    return "\n".join(lines)


def no_loop(text):
    """Takes away the branch back of every loop around an acquire: the next one that a label before the
    acquire is the target of.
    """
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if ".acquire" in line:
            for after in range(index, min(index + 60, len(lines))):
                branch = re.match(r"\s*@!?%p\d+ bra\s+(\S+);", lines[after])
                if branch and any(before.startswith(branch[1] + ":") for before in lines[index - 25 : index]):
                    lines[after] = ""
    return "\n".join(lines)


def no_barrier_behind_acquire(text):
    """Takes away every barrier from the first acquire on."""
    first = text.index(".acquire")
    return text[:first] + re.sub(r"\n\s*bar(rier)?\.sync[^;]*;", "\n", text[first:])


def narrow(text):
    """Every wide store as four."""
    each = "st.global.b32 [ {} + {} ], {{ {} }}".format
    return re.sub(
        r"st\.global\.v4\.b32 \[ (%rd\d+) \+ 0 \], \{ (%r\d+), (%r\d+), (%r\d+), (%r\d+) \}",
        lambda found: "; ".join(each(found[1], 4 * i, found[2 + i]) for i in range(4)),
        text,
    )


def asynchronous(text):
    return re.sub(
        r"st\.global\.v4\.b32 \[ (%rd\d+) \+ 0 \], [^;]*",
        r"cp.async.bulk.global.shared::cta.bulk_group [ \1 ], [ %r1 ], 16",
        text,
    )


EDITS = {
    "no barrier before the release": (lambda text: no_barrier_before(text, r"sys\.release\.exch"), "post"),
    "a store between barrier and release": (store_behind_barrier, "post"),
    "release at the scope of the gpu": (lambda text: text.replace(".sys.release", ".gpu.release"), "post"),
    "relaxed signal": (lambda text: text.replace(".sys.release", ".sys.relaxed"), "ways"),
    "signal lost": (lambda text: re.sub(r".*sys\.release\.exch.*", "", text), "counts"),
    "acquire at the scope of the gpu": (lambda text: text.replace(".sys.acquire", ".gpu.acquire"), "wait"),
    "relaxed poll": (lambda text: text.replace(".sys.acquire", ".sys.relaxed"), "ways"),
    "volatile poll": (lambda text: text.replace("ld.global.sys.acquire", "ld.volatile.global"), "ways"),
    "poll by a plain load": (lambda text: text.replace("ld.global.sys.acquire", "ld.global"), "counts"),
    "loop deleted": (no_loop, "wait"),
    "no barrier behind the acquire": (no_barrier_behind_acquire, "wait"),
    "stores of 4 bytes": (narrow, "width"),
    "asynchronous stores": (asynchronous, "ways"),
    "release of the local counter without a barrier":
        (lambda text: no_barrier_before(text, "acq_rel"), "post"),
    "record at the scope of the gpu":
        (lambda text: re.sub(r"release\.sys\.(cas|exch)", r"release.gpu.\1", text), "post"),
}  # fmt: skip


@pytest.mark.parametrize("op", REAL)
def test_clean_kernel(kernels, op):
    kernel = kernels["clean"][op]
    assert check(kernel["ptx"], kernel["pointers"], expected(op)) == []


@pytest.mark.parametrize("op", REAL)
@pytest.mark.parametrize("edit", EDITS)
def test_fault_in_the_ptx(kernels, op, edit):
    kernel = kernels["clean"][op]
    change, rule = EDITS[edit]
    text = change(kernel["ptx"])
    assert text != kernel["ptx"]
    found = check(text, kernel["pointers"], expected(op))
    assert rule in rules(found), [*map(str, found)]


@pytest.mark.parametrize("op", REAL)
def test_counts(kernels, op):
    kernel = kernels["clean"][op]
    for change in ({"posts": 1}, {"waits": 1}, {"words": 5}):
        assert rules(check(kernel["ptx"], kernel["pointers"], expected(op)._replace(**change))) == {"counts"}


def test_address_of_unknown_origin(kernels):
    """An address that went through shared memory is nobody's."""
    kernel = kernels["exchange"]["none"]
    text = re.sub(r"(\t)(?=st\.global\.v4)", r"\tld.shared.b64 %rd999, [%r1];\n\1", kernel["ptx"], count=1)
    text = re.sub(r"st\.global\.v4\.b32 \[ %rd\d+", "st.global.v4.b32 [ %rd999", text, count=1)
    assert "known" in rules(check(text, kernel["pointers"]))


def test_signature_of_another_kernel(kernels):
    kernel = kernels["clean"]["all_gather_matmul"]
    with pytest.raises(ValueError, match="pointer parameters"):
        check(kernel["ptx"], kernel["pointers"] * 2)
