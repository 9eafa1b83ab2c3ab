"""The documentation: links lead somewhere, files that are named exist, Python blocks are right, and the
Chinese pages have the shape of the English ones.
"""

import ast
import builtins
import collections
import fnmatch
import functools
import importlib
import os
import re
import subprocess
import textwrap
import unicodedata

import pytest
import torch
import torch.distributed as dist
from source_tree import ROOT, cpp_files, markdown_files, show
from tiers import tier

import pycomm
from pycomm.testing import run_ranks

WIDTH = 110
PAGES = [path for path in markdown_files() if "results" not in path.parts]
# Dated records: they name files as they were on that day.
HISTORY = {ROOT / "docs" / "log.md", ROOT / "CHANGELOG.md"}
ZH = sorted((ROOT / "docs" / "zh").glob("*.md"))
# Named in the pages, but made when something runs.
MADE = {"fused.json", "script.py", "env.sh", "trace.json", "train.py", "trace.html", "step.png"}


def prose(path):
    """The text without code blocks; lines keep their numbers."""
    text = path.read_text()
    return re.sub(r"```.*?\n```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)


def slug(heading):
    """The anchor of a heading, as the site and GitHub make it."""
    heading = re.sub(r"`|\*", "", heading).strip().lower()
    return re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", heading))


@functools.cache
def anchors(path):
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)}


def blocks(path):
    """The Python blocks of a page, without the indentation of a list around them."""
    found = re.findall(r"^( *)```python\n(.*?)^ *```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


@pytest.mark.parametrize("path", PAGES, ids=show)
def test_links(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere in the net
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        if "api" in page.parts:
            continue  # made by docs/site/hooks.py; `make docs` checks them
        assert page.exists(), f"{show(path)}: {target}"
        assert not anchor or anchor in anchors(page), f"{show(path)}: {target}: no such heading"


@functools.cache
def tracked():
    """Files and folders of the repository; a folder ends with /."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    files = files or [show(path) for path in ROOT.rglob("*") if path.is_file()]  # without git
    folders = {
        "/".join(name.split("/")[:depth]) + "/" for name in files for depth in range(1, name.count("/") + 1)
    }
    return sorted(folders.union(files))


PATH = re.compile(r"[\w.*<>-]+(?:/[\w.*<>-]+)*(?:/|\.(?:py|cc|h|inc|cuh|cu|md|txt|toml|yml|json|png))")


@pytest.mark.parametrize("path", [page for page in PAGES if page not in HISTORY], ids=show)
def test_named_files_exist(path):
    """`transport/layout.h` may be written for csrc/transport/layout.h: the end of a path is enough."""
    for name in re.findall(r"`([^`\n]+)`", prose(path)):
        if not PATH.fullmatch(name) or name in MADE or name.startswith(("~", "/")) or "<" in name:
            continue
        found = any(fnmatch.fnmatch(file, name) or fnmatch.fnmatch(file, f"*/{name}") for file in tracked())
        assert found or (ROOT / name).exists(), f"{show(path)}: there is no {name}"


@functools.cache
def cpp_text():
    return "\n".join(path.read_text() for path in cpp_files("csrc"))


@pytest.mark.parametrize("path", [page for page in PAGES if page not in HISTORY], ids=show)
def test_named_cpp_members_exist(path):
    """`Call::publish` is a class and a member that csrc/ has."""
    for owner, member in re.findall(r"`(\w+)::(\w+)", prose(path)):
        if owner not in ("std", "c10", "c10d"):
            found = re.search(rf"\b{owner}\b", cpp_text()) and re.search(rf"\b{member}\b", cpp_text())
            assert found, f"{show(path)}: there is no {owner}::{member}"


def columns(line):
    """Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)


@pytest.mark.parametrize("path", PAGES, ids=show)
def test_lines_are_narrow(path):
    """Rows of tables and headings of links cannot be broken."""
    wide = [
        number
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if columns(line) > WIDTH and not line.startswith(("|", "!["))
    ]
    assert not wide, f"{show(path)}: lines {wide} have more than {WIDTH} columns"


@pytest.mark.parametrize("path", PAGES, ids=show)
def test_lists_begin_after_an_empty_line(path):
    """Else the site takes them for a part of the paragraph above."""
    item = re.compile(r"\s*([-*]|\d+\.) ")
    lines = path.read_text().splitlines()
    in_code = in_list = False
    for number, (above, line) in enumerate(zip(["", *lines], lines, strict=False), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and item.match(line):
            assert in_list or not above.strip(), f"{show(path)}, line {number}"
            in_list = True
        elif not in_code and line.strip() and not line.startswith(" "):
            in_list = False


@tier(slow=1)
@pytest.mark.timeout(1800)
def test_site_can_be_built():
    """Strict: a broken link between pages, or in a docstring, is an error."""
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


# --- code ----------------------------------------------------------------------------------------


def names_of_pycomm(code):
    """The dotted names in it that begin in pycomm: par.Plan is pycomm.parallel.Plan."""
    homes = {"pycomm": "pycomm", "par": "pycomm.parallel", "fused": "pycomm.fused"}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            first, _, rest = dotted.partition(".")
            if first in homes and re.fullmatch(r"[\w.]+", rest):
                yield f"{homes[first]}.{rest}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pycomm":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "pycomm")


def resolve(dotted):
    """The object of a dotted name; modules are imported on the way. Raises AttributeError."""
    thing, name = pycomm, "pycomm"
    for part in dotted.split(".")[1:]:
        name += f".{part}"
        try:
            thing = getattr(thing, part)
        except AttributeError:
            try:
                thing = importlib.import_module(name)
            except ModuleNotFoundError:
                raise AttributeError(dotted) from None
    return thing


CODE = [(path, number, code) for path in PAGES for number, code in enumerate(blocks(path))]


@pytest.mark.parametrize(
    ("path", "number", "code"), CODE, ids=lambda value: show(value) if value in PAGES else ""
)
def test_python_block(path, number, code):
    compile(code, f"{show(path)}, Python block {number}", "exec")
    if "import lightning" in code:
        pytest.importorskip("lightning")  # the names in the block are in a module that needs it
    for name in names_of_pycomm(code):
        resolve(name)


@pytest.mark.parametrize("path", [page for page in PAGES if page not in HISTORY], ids=show)
def test_names_of_pycomm_in_the_text(path):
    """`par.sampler(model, dataset)` and `pycomm.explain` in a sentence are names that exist."""
    for text in re.findall(r"`((?:par|pycomm)\.\w[\w.]*)", prose(path)):
        for name in names_of_pycomm(text.rstrip(".")):
            resolve(name)


def blocks_with(page, *words):
    (code,) = [code for code in blocks(ROOT / page) if all(word in code for word in words)]
    return code


def run_block(comm, code, given):
    """On one rank. What the block does not import or define itself is in `given`."""
    names = {"__builtins__": builtins, "comm": comm, **given}
    exec(code, names)
    return names


def test_first_example_of_the_readme(capsys):
    """It starts its four ranks itself."""
    run_block(None, blocks_with("README.md", "run_ranks"), {})
    assert capsys.readouterr().out.count("24., 24., 24., 24.") == 4
    run_block(None, blocks_with("docs/index.md", "run_ranks"), {})
    assert capsys.readouterr().out.count("6., 6., 6., 6.") == 4


PLANS = [
    code
    for page in ("docs/strategies.md", "README.md")
    for code in blocks(ROOT / page)
    if "par.Plan(" in code or "par.parallelize(" in code
]


@pytest.mark.parametrize("code", PLANS, ids=lambda code: code.splitlines()[0][:40])
def test_plans_can_be_made(code):
    """Each Plan(...) and each text of a plan in a block, whatever the lines around it need."""
    given = {"par": importlib.import_module("pycomm.parallel")}
    given["make_compression"] = importlib.import_module("pycomm.parallel.data.compression").make_compression
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "par.Plan":
            assert eval(ast.unparse(node), given).world_size >= 1
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "par.parallelize":
            for text in (part.value for part in node.args[2:] if isinstance(part, ast.Constant)):
                assert given["par"].Plan.of(text).world_size >= 1


def small_model():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    return {
        "model": model,
        "opt": torch.optim.SGD(model.parameters(), lr=0.1),
        "batch": (torch.ones(16, 8), torch.zeros(16, 8)),
        "loss_fn": torch.nn.functional.mse_loss,
    }


def planned_model():
    names = ("first", torch.nn.Linear(8, 16)), ("act", torch.nn.GELU()), ("head", torch.nn.Linear(16, 8))
    model = torch.nn.Sequential(collections.OrderedDict(names))
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    importlib.import_module("pycomm.parallel").parallelize(model, opt, "dp=2,zero=1")
    x, y = torch.ones(16, 8), torch.zeros(16, 8)
    loss_fn = torch.nn.functional.mse_loss
    return {"model": model, "opt": opt, "x": x, "y": y, "batch": (x, y), "loss_fn": loss_fn, "path": "dcp"}


def attention_inputs():
    return {name: torch.ones(1, 2, 4, 8) for name in "qkv"} | {"group": None}


# (page, words that only this block has, what it needs, plan of the page -> plan for two ranks)
ON_TWO_RANKS = [
    ("README.md", "par.save", small_model, ("dp=2,tp=2,pp=2,zero=1", "dp=2,zero=1")),
    ("docs/strategies.md", "par.load(", small_model, ("dp=2,tp=2,pp=2,zero=1", "dp=2,zero=1")),
    ("docs/strategies.md", "par.gathered", planned_model, None),
    ("docs/strategies.md", "checkpoint_id=path", planned_model, None),
    ("docs/strategies.md", "ema.applied", planned_model, None),
    ("docs/strategies.md", "par.clip_grad_norm_", planned_model, None),
    ("docs/strategies.md", "par.verify", small_model, None),
    ("docs/strategies.md", "make_compression", small_model, None),
    ("docs/strategies.md", "parallelize_tensor", lambda: small_model() | {"h": 8, "group": None}, None),
    ("docs/strategies.md", "sequence.ulysses_attention", attention_inputs, None),
    ("docs/strategies.md", "sequence.ring_attention", attention_inputs, None),
    (
        "docs/strategies.md",
        "par.MoE",
        lambda: {"h": 8, "make_expert": lambda: torch.nn.Linear(8, 8), "group": None},
        None,
    ),
]


def run_on_two_ranks(comm, folder):
    """The blocks above, and the MLP of the README: its largest difference from one process."""
    os.chdir(folder)
    torch.manual_seed(0)
    dist.init_process_group("pycomm", init_method=f"file://{folder}/store", rank=comm.rank, world_size=2)
    parallel = importlib.import_module("pycomm.parallel")
    for page, word, given, plan in ON_TWO_RANKS:
        code = blocks_with(page, word)
        names = {"pycomm": pycomm, "par": parallel, "torch": torch}
        run_block(comm, code.replace(*plan) if plan else code, names | given())
    difference = mlp_difference(comm)
    dist.destroy_process_group()
    return difference


def mlp_difference(comm):
    generator = torch.Generator().manual_seed(1)
    x, w1, w2 = (torch.randn(shape, generator=generator) for shape in ((8, 4), (6, 4), (4, 6)))
    b1, b2 = torch.randn(6, generator=generator), torch.randn(4, generator=generator)
    rows, features = slice(4 * comm.rank, 4 * comm.rank + 4), slice(3 * comm.rank, 3 * comm.rank + 3)
    mlp = run_block(comm, blocks_with("README.md", "def mlp"), {})["mlp"]
    found = mlp(x[rows], w1[features], b1[features], w2[:, features], b2)
    whole = torch.nn.functional.gelu(x @ w1.t() + b1) @ w2.t() + b2
    return (found - whole[rows]).abs().max().item()


def test_blocks_run_on_two_ranks(tmp_path):
    assert max(run_ranks(2, run_on_two_ranks, tmp_path, mode="processes")) < 1e-5


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


# --- the Chinese pages ---------------------------------------------------------------------------


def shape(path):
    """What a page and its translation have in common: headings by level, code, tables by size, pictures."""
    text, plain = path.read_text(), prose(path)
    return {
        "headings": re.findall(r"^(#+) ", plain, re.MULTILINE),
        "code blocks": re.findall(r"^```(\w*)$", text, re.MULTILINE),
        "rows of tables": [row.count("|") for row in plain.splitlines() if row.startswith("|")],
        "pictures": [name.split("/")[-1] for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", plain)],
    }


@pytest.mark.parametrize("path", ZH, ids=show)
def test_translation_has_the_shape_of_its_page(path):
    english, chinese = shape(ROOT / "docs" / path.name), shape(path)
    for part in english:
        assert chinese[part] == english[part], f"{show(path)}: {part}"


@pytest.mark.parametrize("path", ZH, ids=show)
def test_translation_runs_the_same_code(path):
    """Comments apart, the Python blocks are those of the English page."""
    assert [ast.dump(ast.parse(code)) for code in blocks(path)] == [
        ast.dump(ast.parse(code)) for code in blocks(ROOT / "docs" / path.name)
    ]


def test_teaching_pages_are_translated():
    assert [path.name for path in ZH] == ["algorithms.md", "fused.md", "strategies.md"]
