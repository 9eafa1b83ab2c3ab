"""python tests/gpu [one ... | versions]: see --help, one.py, versions.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # nothing is installed where this runs


def main():
    from gpu import one, program, versions  # not found before the line above

    if sys.argv[1:2] == ["one"]:
        one.run_and_leave(sys.argv[2:])
    if sys.argv[1:2] == ["versions"]:
        return versions.main()
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
