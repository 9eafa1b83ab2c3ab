"""Tables of a report: a column in which no line has a figure is left out, wherever the table is shown."""

import pytest

from pycomm.benchmarks.collectives import cases, columns, runner
from pycomm.benchmarks.common import report

N = report.MISSING


@pytest.mark.parametrize(
    "lines, titles, cells",
    [
        ([["8", N, "1.0"], ["16", N, N]], ["size", "c"], [["8", "1.0"], ["16", N]]),
        ([["8", N, N]], ["size"], [["8"]]),
        ([["8", "2", N], ["16", N, N]], ["size", "b"], [["8", "2"], ["16", N]]),
        ([["8", "", "0"]], ["size", "b", "c"], [["8", "", "0"]]),
        ([], ["size", "b", "c"], []),
    ],
)
def test_columns_without_a_figure_are_not_shown(lines, titles, cells, capsys):
    given = ["size", "b", "c"], lines
    assert report.with_figures(*given) == (titles, cells)
    marks = [titles, ["---"] * len(titles), *cells]
    assert report.markdown_table(*given) == [f"| {' | '.join(line)} |" for line in marks]
    page = report.Page([], [report.Table("title", *given)], [])
    content = {"machine": {**report.machine(), "cpu": "a"}, "date": "d", "command": "c"}
    assert report.markdown(content, page)[4:-1] == ["", "## title", "", *report.markdown_table(*given)]
    report.show([report.Table(None, *given)])
    assert [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()] == [
        titles,
        *[[cell for cell in line if cell] for line in cells],
    ]


def _row(backend: str, forms: tuple[str, ...]) -> dict:
    """A row of an all_reduce in which the backend has these forms."""
    timing = cases.Timing(1.0, 2.0, 3.0, 4.0, 0, 1.0)
    times = {form: timing if form in forms else None for form in cases.FORMS}
    return runner.as_record(runner.Row(backend, cases.Case("all_reduce", 2, "f32", "sum", 0), 2, 8, **times))


@pytest.mark.parametrize(
    "forms, groups",
    [
        ((("in_place",), ("in_place",)), 1),  # pycomm-torch beside Gloo, as in `make demo`
        ((("out_of_place", "in_place"), ("in_place",)), 2),  # pycomm beside Gloo: one n/a in each column
    ],
)
def test_forms_that_no_backend_has_are_not_shown(forms, groups, capsys):
    rows = [_row(backend, has) for backend, has in zip(("pycomm", "gloo"), forms, strict=True)]
    report.show([columns.of_op(rows, "{op}, {place}")])
    printed = capsys.readouterr().out
    assert printed.count("busbw") == printed.count("#wrong") == groups
    assert printed.count("in place") == 5 and printed.count(N) == 5 * (groups - 1)
