"""python tests/gpu [one ... | versions | pack ... | warm ...]: see --help and the files of these names."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # nothing is installed where this runs


def main():
    from gpu import one, pack, program, versions, warm  # not found before the line above

    if sys.argv[1:2] == ["one"]:
        one.run_and_leave(sys.argv[2:])
    if sys.argv[1:2] == ["versions"]:
        return versions.main()
    if sys.argv[1:2] == ["pack"]:
        return pack.main(sys.argv[2:])
    if sys.argv[1:2] == ["warm"]:
        return warm.main(sys.argv[2:])
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
