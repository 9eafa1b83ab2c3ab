"""Runs every family under every plan and writes docs/models.md.

    make test-models        installs timm and torchvision into build/vision, then runs this
    python tests/model_families/table.py [word ...]      families whose names have a word, printed only

Ends with 1 where something is wrong or has crashed.
"""

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import torch  # noqa: E402
from compare import AXES, LIMIT, MORE, outcomes  # noqa: E402
from families import FAMILIES, families  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
EQUAL = "="
TAIL = "\n## Tried by hand\n"  # what the page has from here on is not written here
HEAD = """# Models under plans

Written by `make test-models`, which runs all of it again; `make test` runs one plan of each axis.

Models of transformers, timm, torchvision and torch.nn, as they are: small configurations with random weights
(`tests/model_families/families.py`, where a line adds a family). Each is trained for three steps in fp64,
with uneven targets, in two microbatches (one for BatchNorm, whose statistics are those of a microbatch), and
compared with plain torch in one process: every loss and every parameter. The loss is the model's own. Plans
with `ep` are for mixtures of experts.

`=` is equal: no parameter is off by more than 1e-6 of what training changed in it. (Some of these models
compute a part in fp32 whatever they are given, which makes differences of 1e-7.) A number is a refusal: a
`ValueError` on every rank, with the sentence below. No case is wrong, none crashes, none hangs.
"""


def number_of(text, reasons):
    """Refusals that differ in names, numbers, plan and what torch said are one, told by its first case."""
    text = re.sub(r"^Plan\([^)]*\): ", "", text)
    text = re.sub(r"it fails \(.*?\)\. ", "it fails. ", text)
    kind = re.sub(
        r"'[^']*'|\([\d, ]*\)|\d+|(?<=at its blocks )\([a-z_, ]+\)|\w+(?= cuts the sequence)", "#", text
    )
    return reasons.setdefault(kind, (len(reasons) + 1, text))[0]


def cell(outcome, reasons):
    if outcome is None:
        return ""
    if outcome.kind == "equal":
        return EQUAL
    return str(number_of(outcome.text, reasons)) if outcome.kind == "refused" else outcome.kind


def page(results, texts):
    """results: {family: {plan: Outcome}}."""
    reasons, lines = {}, []
    for name, found in results.items():
        lines.append(f"| {name} | " + " | ".join(cell(found.get(text), reasons) for text in texts) + " |")
    head = "| | " + " | ".join(f"`{text.replace(',', ', ')}`" for text in texts) + " |"
    count = [sum(o.kind == "equal" for found in results.values() for o in found.values())]
    count.append(sum(map(len, results.values())))
    why = [
        textwrap.fill(f"- {number}: {text}", 108, subsequent_indent="  ", break_on_hyphens=False)
        for number, text in reasons.values()
    ]
    return "\n".join(
        [
            HEAD,
            f"Equal: {count[0]} of {count[1]}.\n",
            head,
            "|---" * (len(texts) + 1) + "|",
            *lines,
            "",
            "What is refused, and why:\n",
            *why,
            "",
        ]
    )


def documented():
    """{family: {plan: whether it is equal}} as docs/models.md says."""
    rows = [
        [part.strip() for part in line.strip("|\n").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|") and not line.startswith("|--")
    ]
    texts = [part.strip("`").replace(", ", ",") for part in rows[0][1:]]
    return {
        name: {text: value == EQUAL for text, value in zip(texts, values, strict=True) if value}
        for name, *values in rows[1:]
    }


def main(words):
    torch.set_num_threads(1)
    texts, results, bad = AXES + MORE, {}, 0
    for name in families():
        if words and not any(word in name for word in words):
            continue
        results[name] = outcomes(name, texts, LIMIT * len(texts))
        for text, outcome in results[name].items():
            bad += outcome.kind in ("wrong", "crash")
            print(f"{name:28} {text:28} {outcome.kind:8} {outcome.text[:150]}", flush=True)
    if not words:
        missing = FAMILIES.keys() - results.keys()
        if missing:
            print(f"not written: timm and torchvision are needed for {', '.join(sorted(missing))}")
            return 1
        tail = PAGE.read_text().partition(TAIL)
        PAGE.write_text(page(results, texts) + "".join(tail[1:]))
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
