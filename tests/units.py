"""Several C++ sources as the text of one, for compiled.py.

A name in an unnamed namespace belongs to its source. Where another source of the unit has the same word,
and for types, which may be in a header, it is made longer: `tick` of transport/wait.cc becomes
`tick_in_transport_wait`. So are functions main: the main of the unit runs that of the source that its first
argument names. What is missed here is defined twice, which the compiler refuses.
"""

import re
from pathlib import Path

UNNAMED = re.compile(r"^namespace \{\n(.*?)^\}  // namespace$", re.DOTALL | re.MULTILINE)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
# What begins a definition at the left margin: clang-format indents all else.
TYPE = re.compile(r"(?:struct|class|union|enum class|enum|using(?=.*=)) (?:alignas\(\w+\) )?(\w+)")
FUNCTION = re.compile(r"(?:^|[\s*&])([a-z_]\w*)(?=\(|$)")
VARIABLE = re.compile(r"(?:^|[\s*&])([a-z_]\w*)(?=(?:\[[^]]*\])*(?: =|;|\{|, ))")
NO_NAMES = {"alignas", "decltype", "static_assert", "const", "constexpr", "nullptr", "true", "false"}
# A name in a string or a comment, of a member or of another namespace is not the one that is renamed.
OTHER = r"""R"\((?s:.*?)\)"|"(?:\\.|[^"\\\n])*"|//[^\n]*|#include.*|(?:\.|->|::)\w+"""


def joined(sources: list[Path]) -> str:
    """The text of the unit."""
    texts = {source: source.read_text() for source in sources}
    words = {source: set(re.findall(r"\w+", text)) for source, text in texts.items()}
    own = {source: own_names(text) for source, text in texts.items()}
    mains = [source for source in sources if "main" in own[source]]
    parts = []
    for source, text in texts.items():
        elsewhere = set().union(*(words[other] for other in sources if other != source))
        renamed = {name for name in own[source] if name in elsewhere or name[0].isupper()}
        renamed = renamed - {"main"} if len(mains) == 1 else renamed
        parts.append(f'#line 1 "{source}"\n{prepared(source, text, renamed)}')
    return "".join([*parts, dispatch(mains) if len(mains) > 1 else ""])


def own_names(text: str) -> set[str]:
    """What a source defines for itself, and main."""
    names = set(re.findall(r"^int (main)\(", text, re.MULTILINE))
    for body in UNNAMED.findall(text):
        for line in body.splitlines():
            if line[:1].isalpha():
                names |= names_in(re.sub(r"^template <.*?>\s*|\s*//.*", "", line))
    return names


def names_in(line: str) -> set[str]:
    if found := TYPE.match(line):
        return {found[1]}
    if line.startswith("using "):
        return set()
    if "(" not in line.partition("=")[0] and ("=" in line or line.endswith((";", "{"))):
        return set(VARIABLE.findall(line)) - NO_NAMES
    return set(FUNCTION.findall(line)[:1]) - NO_NAMES


def prepared(source: Path, text: str, renamed: set[str]) -> str:
    """The text with longer names, and with what it includes by its whole path."""
    if renamed:
        pattern = re.compile(rf"{OTHER}|\b({'|'.join(sorted(renamed))})\b")
        text = pattern.sub(lambda found: f"{found[1]}_in_{label(source)}" if found[1] else found[0], text)
    return INCLUDE.sub(lambda found: f'#include "{(source.parent / found[1]).resolve()}"', text)


def label(source: Path) -> str:
    return f"{source.parent.name}_{source.stem}"


DISPATCH = """#line 1 "main"
#include <string>
inline int run_main(int (*program)(), int, char**) { return program(); }
inline int run_main(int (*program)(int, char**), int count, char** arguments) {
  return program(count, arguments);
}
int main(int count, char** arguments) {
  const std::string program = count > 1 ? arguments[1] : "";
CASES  return 64;
}
"""


def dispatch(mains: list[Path]) -> str:
    """A main that runs one of several. Each takes its arguments, or none."""
    case = '  if (program == "{}") return run_main(main_in_{}, count - 1, arguments + 1);\n'
    return DISPATCH.replace("CASES", "".join(case.format(path.stem, label(path)) for path in mains))


def needed(rule: str) -> list[str]:
    """The files that a rule for make names as needed."""
    text = rule.partition(": ")[2].replace("\\\n", " ")
    return [name.replace("\\ ", " ") for name in re.findall(r"(?:\\ |\S)+", text)]
