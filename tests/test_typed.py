"""The share of functions that are typed stays, and so does what their types say (tests/typed.py)."""

import re

import pytest
import typed
from source_tree import python_files, show

FILES = python_files(*typed.FOLDERS)


def test_functions_are_whole():
    folders = typed.by_folder().values()
    assert sum(each.whole for each in folders) >= 0.95 * sum(each.functions for each in folders)


def test_few_annotations_are_vague():
    folders = typed.by_folder().values()
    assert sum(each.vague for each in folders) <= 0.03 * sum(each.annotations for each in folders)


@pytest.mark.parametrize("path", FILES, ids=show)
def test_ignores_have_a_code_and_a_reason(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.search(r"#\s*type:\s*ignore", line):
            assert re.search(r"# type: ignore\[[\w\-, ]+\]  # \S", line), f"{show(path)}:{number}: {line}"


def test_counting(tmp_path):
    path = tmp_path / "one.py"
    path.write_text(
        "class C:\n"
        "    def whole(self, a: int, *, b: 'list[int]') -> None: ...\n"
        "    def half(self, a, b: int): ...\n"
        "def vague(a: object, b: list, c: dict[str, Any]) -> int | Any: ...  # type: ignore[misc]\n"
    )
    right = typed.Counts(functions=3, whole=2, annotations=8, vague=3, trees=0, ignores=1)
    assert typed.counts(path) == right
