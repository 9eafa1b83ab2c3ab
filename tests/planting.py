"""Faults planted into copies of csrc/cuda, for test_cuda_mutants.py and test_cuda_host_mutants.py.

A fault is a tuple with `file` (in csrc/cuda), `old`, an exact text that occurs there `times` times, and
`new`, what takes its place.

[Note: several faults in one program] Compiling takes longer than running. So faults whose texts are whole
statements or expressions go into one program, where a number chooses which one acts: `{ if (planted_fault ==
7) { new } else { old } }`. The others, and those whose place is taken, have programs of their own.
"""

import re
from pathlib import Path

CUDA = Path(__file__).parent.parent / "csrc" / "cuda"
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


def places_of(fault):
    """[(begin, end), ...] of its text in its file."""
    text = (CUDA / fault.file).read_text()
    return [found.span() for found in re.finditer(re.escape(fault.old), text)]


def is_statements(fault):
    """Can what it replaces, and what it puts there, stand in braces?"""
    text = (CUDA / fault.file).read_text()
    begin, end = places_of(fault)[0]
    before, after = text[:begin].rstrip(), text[end:].lstrip()
    whole = before[-1] in ";{})" and not (after.startswith("else") and fault.old.startswith("if"))
    return whole and all(
        not each.strip() or (each.rstrip()[-1] in ";}" and _closed(each) and not DECLARATION.search(each))
        for each in (fault.old, fault.new)
    )


def is_expression(fault):
    """Is it a whole argument, operand or value, and so is what it puts there?"""
    text = (CUDA / fault.file).read_text()
    begin, end = places_of(fault)[0]
    before, after = text[:begin].rstrip(), text[end:].lstrip()
    return (
        fault.times == 1
        and (before[-1] in "(,[" or before.endswith("return"))
        and after[0] in "),;]"
        and all(each and ";" not in each and "=" not in COMPARED.sub("", each) and _closed(each)
                for each in (fault.old, fault.new))
    )  # fmt: skip


def programs_of(names, faults, alike=lambda one, other: True):
    """The names, those together that go into one program: alike(fault, fault). See [Note: several faults in
    one program].
    """
    together, alone = [], []
    for name in names:
        fault = faults[name]

        def fits(members, fault=fault):
            others = [faults[name] for name in members]
            return alike(fault, others[0]) and has_room(others, fault)

        if not (is_statements(fault) or is_expression(fault)):
            alone.append([name])
        elif members := next(filter(fits, together), None):
            members.append(name)
        else:
            together.append([name])
    return together + alone


def has_room(others, fault):
    """Is no place of the fault taken by these?"""
    taken = [place for other in others if other.file == fault.file for place in places_of(other)]
    return all(end <= b or begin >= e for begin, end in places_of(fault) for b, e in taken)


def without_place(faults):
    """What says of each fault whose text does not occur as often as it should."""
    return [
        f"{name} ({fault.file})" for name, fault in faults.items() if len(places_of(fault)) != fault.times
    ]


def plant(faults, folder):
    """Into the sources in `folder`. The n-th fault acts where PLANTED_FAULT=n, a single one always."""
    (folder / "planted.h").write_text(PLANTED)
    edits = {}  # {file: [(begin, end, text)]}
    for number, fault in enumerate(faults, 1):
        text = fault.new
        if len(faults) > 1:
            text = f"{{ if (planted_fault == {number}) {{ {text} }} else {{ {fault.old} }} }}"
            if is_expression(fault):
                text = f"(planted_fault == {number} ? ({fault.new}) : ({fault.old}))"
        edits.setdefault(fault.file, []).extend((*place, text) for place in places_of(fault))
    for name, changes in edits.items():
        file = folder / "csrc" / "cuda" / name
        text = file.read_text()
        for begin, end, new in sorted(changes, reverse=True):
            text = text[:begin] + new + text[end:]
        file.write_text(text)
