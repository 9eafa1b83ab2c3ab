"""What the page on limits says of the checks is what the table in the code says."""

import re
from pathlib import Path

import torch
from torch import nn

import pycomm.parallel as par
from pycomm.parallel.checks import TABLE, as_markdown, assumptions_of
from pycomm.parallel.ground.plan import TRUSTED, Plan

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
PARALLEL = Path(__file__).parents[2] / "parallel"
BEGIN, END = "<!-- made by pycomm.parallel.checks -->\n", "<!-- end -->"


def test_the_page_has_the_table():
    """`python tests/parallel/test_checks_table.py` writes it."""
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == as_markdown() + "\n"


def test_every_trusted_name_is_an_experiment_of_the_table():
    names = [each.name for each in TABLE]
    assert set(TRUSTED) == {each.name for each in TABLE if each.is_experiment}
    assert len(set(names)) == len(names)
    trust = Plan.__doc__.partition("trust: ")[2].partition("rules: ")[0]
    assert [name for name in TRUSTED if f'"{name}"' not in trust] == []


def test_the_files_of_the_table_exist():
    named = {path for each in TABLE for path in re.findall(r"\w+/\w+\.py", each.how)}
    assert named and [path for path in named if not (PARALLEL / path).is_file()] == []


def test_describe_shows_what_the_plan_takes_for_granted():
    model = nn.Linear(3, 3)
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), par.Plan())
    before = par.describe(model).checks
    assert set(before) == {each.name for each in assumptions_of(par.Plan())}
    assert before["rows"] == before["loss"] == "not tried yet"
    batch = torch.randn(4, 3), torch.randn(4, 3)
    par.step(model, opt, batch, nn.functional.mse_loss, microbatches=2)
    after = par.describe(model)
    assert (after.checks["rows"], after.checks["loss"]) == ("held", "held: a mean over targets")
    assert "held: a mean over targets" in str(after)


if __name__ == "__main__":
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:start]}{as_markdown()}\n{text[end:]}")
