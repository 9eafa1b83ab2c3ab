"""The rules of style that no formatter checks: columns, and the length of files, classes, functions and lists
of parameters.

C++ is read by its indentation, which clang-format (`make lint`) has set: a definition starts on a line that
ends with a brace and ends with the brace at the same column.
"""

import ast
import re

import pytest
from source_tree import ROOT, cpp_files, markdown_files, python_files, show

COLUMNS = 110
MAX_FILE, MAX_CLASS, MAX_FUNCTION, MAX_PARAMETERS = 500, 300, 60, 6
PYTHON = python_files("pycomm", "parallel", "benchmarks", "examples", "tests")
CPP = cpp_files("csrc", "tests")
# Triton's and CUDA's kernels take what a launch can pass: pointers and numbers.
KERNELS = ("pycomm/fused/kernels/", "csrc/cuda/kernels/", "tests/fused/faulty_kernels.py")
# Where somebody else says what the arguments are (torch, the driver, the caller in Python), this stands in a
# comment on the first line of the definition or on the line above.
GIVEN = "signature of"


def python_definitions(path):
    """(kind, name, first line, number of lines, parameters that can be given by position)"""
    source = path.read_text()
    lines = ["", *source.splitlines()]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield "class", node.name, node.lineno, node.end_lineno - node.lineno + 1, 0
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            count = len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))
            count = 0 if GIVEN in lines[node.lineno] or GIVEN in lines[node.lineno - 1] else count
            yield "function", node.name, node.lineno, node.end_lineno - node.lineno + 1, count


NOT_A_DEFINITION = re.compile(r" *(namespace\b|extern \"C\" \{|\}|//|#|$)")
CLASS = re.compile(r" *(?:template <.*> *)?(?:class|struct|union|enum)\b(?!.*\) )")


def cpp_definitions(path):
    """(kind, first line of its text, that line's number, number of lines, parameters) of what is defined
    outside of functions.

    A definition at the top level starts in column 0, one in a class two columns after it; lines in between
    continue a signature.
    """
    lines = path.read_text().splitlines()
    columns = [0]  # where definitions start: at the top level, then in each class that we are in
    start = number = 0
    while number < len(lines):
        line = lines[number]
        column = len(line) - len(line.lstrip())
        while len(columns) > 1 and line.strip() and column < columns[-1] and line.lstrip()[0] == "}":
            columns.pop()
        if column <= columns[-1] and not NOT_A_DEFINITION.match(line):
            start = number
        if not line.endswith("{") or NOT_A_DEFINITION.match(line) or number - start > 30:
            number += 1
            continue
        end = next(
            (n for n in range(number + 1, len(lines)) if closes(lines[n], columns[-1])), len(lines) - 1
        )
        kind = "class" if CLASS.match(lines[start]) else "function"
        signature = " ".join(part.strip() for part in lines[start : number + 1])
        given = GIVEN in lines[start] or GIVEN in lines[start - 1]
        count = 0 if kind == "class" or given else parameters_of(signature)
        yield kind, lines[start].strip(), start + 1, end - start + 1, count
        if kind == "class":
            columns.append(columns[-1] + 2)
            number += 1
        else:
            number = end + 1
        start = number


def parameters_of(signature):
    """The number of parameters in the first parentheses; what is in other brackets counts as one."""
    depth = count = 0
    after = re.sub(r"^.*?\((?!\))", "(", re.sub(r"operator\(\)|template <.*?> ", "", signature), count=1)
    for character in after if after.startswith("(") else "":
        depth += (character in "([{<") - (character in ")]}>")
        count += character == "," and depth == 1
        if depth == 0:
            return count + 1
    return 0


def closes(line, column):
    return line.startswith(" " * column + "}")


def too_long(definitions, path):
    limits = {"class": MAX_CLASS, "function": MAX_FUNCTION}
    kernels = any(show(path).startswith(folder) for folder in KERNELS)
    for kind, name, line, length, parameters in definitions(path):
        if length > limits[kind] and not kernels:
            yield f"{show(path)}:{line}: {name}: {length} lines; a {kind} stops at {limits[kind]}"
        if parameters > MAX_PARAMETERS and not kernels:
            yield f"{show(path)}:{line}: {name}: {parameters} parameters; over {MAX_PARAMETERS} are a struct"


@pytest.mark.parametrize(
    ("definitions", "paths"), [(python_definitions, PYTHON), (cpp_definitions, CPP)], ids=["python", "cpp"]
)
def test_classes_functions_and_parameters_stay_few(definitions, paths):
    found = [problem for path in paths for problem in too_long(definitions, path)]
    assert not found, "\n".join(found)


def test_files_stay_short():
    lengths = {show(path): len(path.read_text().splitlines()) for path in (*PYTHON, *CPP)}
    found = {path: length for path, length in lengths.items() if length > MAX_FILE}
    assert not found, f"files aim at 300 lines and stop at {MAX_FILE}; split by idea"


def test_lines_stay_in_their_columns():
    """Of tables in Markdown and of addresses there is no shorter form."""
    found = []
    for path in (*PYTHON, *CPP, *markdown_files()):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            free = path.suffix == ".md" and (line.startswith("|") or "://" in line)
            if len(line) > COLUMNS and not free:
                found.append(f"{show(path)}:{number}: {len(line)} columns")
    assert not found, "\n".join(found)


def test_this_reads_definitions_as_they_are(tmp_path):
    """The reader itself: a class with a long signature, a template, a function with arguments that nest."""
    source = tmp_path / "a.cc"
    source.write_text(
        "namespace pycomm {\n"
        "class A : public B {\n"
        " public:\n"
        "  A(int a,\n"
        "    std::map<int, int> b)\n"
        "      : a_(a) {\n"
        "    use(b);\n"
        "  }\n"
        "  int small() { return 1; }\n"
        "};\n"
        "template <typename T, int N>\n"
        "void f(std::function<void(int, int)> g, T x, int (&y)[2]) {\n"
        "  for (;;) {\n"
        "    g(1, 2);\n"
        "  }\n"
        "}\n"
        "}  // namespace pycomm\n"
    )
    assert [(kind, line, length, count) for kind, _, line, length, count in cpp_definitions(source)] == [
        ("class", 2, 9, 0),
        ("function", 4, 5, 2),
        ("function", 12, 5, 3),
    ]
    source = tmp_path / "a.py"
    source.write_text("class A:\n    def f(self, a, b=1, *, c=2):\n        pass\n")
    assert list(python_definitions(source)) == [("class", "A", 1, 3, 0), ("function", "f", 2, 2, 2)]


MAP_LINE = re.compile(r" *([\w.]+(?:, [\w.]+)*) {2,}\S")


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in (ROOT / "parallel").glob("*/__init__.py")), ids=show
)
def test_a_folder_says_what_its_files_hold(folder):
    """In the docstring of its __init__.py, one line for each file: its name, two spaces, what it holds."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    lines = filter(None, map(MAP_LINE.match, text.splitlines()))
    named = {name.removesuffix(".py") for line in lines for name in line[1].split(", ")}
    missing = {path.stem for path in folder.glob("*.py")} - named - {"__init__"}
    assert not missing, f"{show(folder)}/__init__.py: add a line for each of {sorted(missing)}"
