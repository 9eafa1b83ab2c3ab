"""Faults planted into copies of csrc/, for test_cuda_mutants.py, test_cuda_host_mutants.py and planted/.

A fault is a tuple with `file` (below `root`, if nothing is said csrc/cuda), `old`, an exact text that occurs
there `times` times, and `new`, what takes its place.

[Note: several faults in one program] Compiling takes longer than running. So faults whose texts are whole
statements or expressions go into one program, where a number chooses which one acts: `{ if (planted_fault ==
7) { new } else { old } }`. The others, and those whose place is taken, have programs of their own.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CUDA = ROOT / "csrc" / "cuda"
CHOSEN = "planted_fault == {}"
PLANTED = """#include <cstdlib>
inline const int planted_fault = std::getenv("PLANTED_FAULT") ? std::atoi(std::getenv("PLANTED_FAULT")) : 0;
"""
DECLARATION = re.compile(r"^\s*(?:const|auto|bool|u?int\d*(?:_t)?|Span|U4|Announcement)\b[^;(]*=", re.M)
COMPARED = re.compile(r"[=!<>]=")


def _closed(text):
    """Every bracket has its partner in the text."""
    open_ones = []
    for letter in re.findall(r"[][(){}]", text):
        if letter in "([{":
            open_ones.append(letter)
        elif not open_ones or open_ones.pop() + letter not in ("()", "[]", "{}"):
            return False
    return not open_ones


def places_of(fault, root=CUDA):
    """[(begin, end), ...] of its text in its file."""
    text = (root / fault.file).read_text()
    return [found.span() for found in re.finditer(re.escape(fault.old), text)]


def is_statements(fault, root=CUDA):
    """Can what it replaces, and what it puts there, stand in braces?"""
    text = (root / fault.file).read_text()
    begin, end = places_of(fault, root)[0]
    before, after = text[:begin].rstrip(), text[end:].lstrip()
    whole = before[-1] in ";{})" and not (after.startswith("else") and fault.old.startswith("if"))
    return whole and all(
        not each.strip() or (each.rstrip()[-1] in ";}" and _closed(each) and not DECLARATION.search(each))
        for each in (fault.old, fault.new)
    )


def is_expression(fault, root=CUDA):
    """Is it a whole argument, operand or value, and so is what it puts there?"""
    text = (root / fault.file).read_text()
    begin, end = places_of(fault, root)[0]
    before, after = text[:begin].rstrip(), text[end:].lstrip()
    return (
        fault.times == 1
        and (before[-1] in "(,[" or before.endswith("return"))
        and after[0] in "),;]"
        and all(each and ";" not in each and "=" not in COMPARED.sub("", each) and _closed(each)
                for each in (fault.old, fault.new))
    )  # fmt: skip


def programs_of(names, faults, alike=lambda one, other: True, root=CUDA):
    """The names, those together that go into one program: alike(fault, fault). See [Note: several faults in
    one program].
    """
    together, alone = [], []
    for name in names:
        fault = faults[name]

        def fits(members, fault=fault):
            others = [faults[name] for name in members]
            return alike(fault, others[0]) and has_room(others, fault, root)

        if not (is_statements(fault, root) or is_expression(fault, root)):
            alone.append([name])
        elif members := next(filter(fits, together), None):
            members.append(name)
        else:
            together.append([name])
    return together + alone


def has_room(others, fault, root=CUDA):
    """Is no place of the fault taken by these?"""
    taken = [place for other in others if other.file == fault.file for place in places_of(other, root)]
    return all(end <= b or begin >= e for begin, end in places_of(fault, root) for b, e in taken)


def without_place(faults):
    """What says of each fault whose text does not occur as often as it should."""
    return [
        f"{name} ({fault.file})" for name, fault in faults.items() if len(places_of(fault)) != fault.times
    ]


def plant(faults, folder, root=CUDA, chosen=CHOSEN, head=""):
    """Into the sources in `folder`. The n-th fault acts where PLANTED_FAULT=n, a single one always.

    Args:
        chosen: the condition under which the n-th acts, a format.
        head: a line that each of these files begins with.
    """
    (folder / "planted.h").write_text(PLANTED)
    edits = {}  # {file: [(begin, end, text)]}
    for number, fault in enumerate(faults, 1):
        text, acts = fault.new, chosen.format(number)
        if len(faults) > 1:
            text = f"{{ if ({acts}) {{ {text} }} else {{ {fault.old} }} }}"
            if is_expression(fault, root):
                text = f"({acts} ? ({fault.new}) : ({fault.old}))"
        edits.setdefault(fault.file, []).extend((*place, text) for place in places_of(fault, root))
    for name, changes in edits.items():
        file = folder / root.relative_to(ROOT) / name
        text = file.read_text()
        for begin, end, new in sorted(changes, reverse=True):
            text = text[:begin] + new + text[end:]
        file.write_text(head + text)
