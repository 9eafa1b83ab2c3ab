"""Code that Triton's compiler got wrong is found by its pattern. See loading.py, [Note: halves of a pair]."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from pycomm.fused import loading

# From Triton 3.6 for sm_90, where %r57 was to be 2 * (%r171 % 4).
WRONG = """
	mul.wide.u32 	%rd48, %r171, 2147483648;
	cvt.u64.u32 	%rd49, %r175;
	shl.b64 	%rd50, %rd49, 33;
	or.b64 	%rd51, %rd48, %rd50;
	shl.b32 	%r176, %r175, 1;
	mov.b64 	{_, %r57}, %rd51;
"""
RIGHT = {
    "the upper half of a loaded word": "ld.global.b64 %rd51, [%rd1];\n\tmov.b64 {_, %r57}, %rd51;",
    "both halves": WRONG.replace("{_, %r57}", "{%r56, %r57}"),
    "a sum of what is not shifted": WRONG.replace("mul.wide.u32", "cvt.u64.u32").replace(
        "shl.b64", "mov.b64"
    ),
}


def compiled(ptx):
    return SimpleNamespace(name="matmul", asm={"ptx": ptx})


def test_pattern():
    assert "matmul to code that gives wrong results" in loading.miscompiled(compiled(WRONG))
    assert loading.miscompiled(None) == ""


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right(what):
    assert loading.miscompiled(compiled(RIGHT[what])) == ""
