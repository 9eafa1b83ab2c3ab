"""Faults of csrc/ in one extension: an environment variable chooses which one acts.

Compiling takes longer than running, so all faults that can share a program do ([Note: several faults in one
program] in planting.py). Each place also says that it was reached, in a file that all processes map: so the
tests that reach a fault are recorded with the same extension (reach.py, [Note: C++]). A fault with `alone`
is compiled by itself, when its turn comes.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import planting

from planted.fault import ROOT, Fault
from planted.reach import MARKS, PLACES
from planted.trial import Copy

NUMBER = "PLANTED_FAULT"
LIST = "planted_faults.json"  # in the folder of the extension: its faults, in the order of their numbers
HEADER = f"""#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

namespace planted_faults {{
inline unsigned char* map_marks() {{
  const char* path = std::getenv("{MARKS}");
  int file = path ? ::open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return nullptr;
  void* address = ::mmap(nullptr, {PLACES}, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  return address == MAP_FAILED ? nullptr : static_cast<unsigned char*>(address);
}}
inline unsigned char* const marks = map_marks();
inline const int chosen = std::getenv("{NUMBER}") ? std::atoi(std::getenv("{NUMBER}")) : 0;
inline bool acts(int number) {{
  if (marks) marks[number] = 1;
  return number == chosen;
}}
}}  // namespace planted_faults
"""


def can_share(fault: Fault) -> bool:
    one = planting.is_statements(fault, ROOT) or planting.is_expression(fault, ROOT)
    return one and not fault.alone


def numbered(faults: Iterable[Fault]) -> list[Fault]:
    """Those that share the extension; the place in the list, from 1 on, is the number."""
    shared: list[Fault] = []
    for fault in sorted(faults, key=lambda fault: fault.name):
        if (
            not fault.is_python
            and can_share(fault)
            and planting.has_room([other for other in shared if other.file == fault.file], fault, ROOT)
        ):
            shared.append(fault)
    return shared


def numbers(folder: Path, faults: Mapping[str, Fault]) -> dict[str, int]:
    """{name: number} in the extension of this folder, of those that are still what they were."""
    path = folder / LIST
    built = json.loads(path.read_text()) if path.exists() else []
    return {
        name: number
        for number, (name, *text) in enumerate(built, 1)
        if name in faults and text == [faults[name].file, faults[name].old, faults[name].new]
    }


def build(copy: Copy, faults: list[Fault]) -> None:
    """The extension with all of these faults, none of which acts."""
    (copy.folder / LIST).write_text(json.dumps([[one.name, one.file, one.old, one.new] for one in faults]))
    header = copy.folder / "planted_places.h"
    header.write_text(HEADER)
    head = f'#include "{header}"\n'
    planting.plant(faults, copy.folder, ROOT, "planted_faults::acts({})", head)
    compile_in(copy.folder)


def compile_in(folder: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the faults do not compile in {folder}:\n{(done.stdout + done.stderr)[-6000:]}")
