"""PTX of one kernel as instructions, the paths between them, and where each address comes from.

Enough of the language for what Triton writes: one entry function, no calls, virtual registers that are
assigned where they are defined and at the ends of branches. Inline assembly may open scopes with names of
their own.

    origins      of a register: the pointer parameters it was computed from; PEER: an address loaded from the
                 parameter `table`; DESCRIPTOR: a tensor descriptor among the parameters; UNKNOWN: it came out
                 of shared memory
    successors   per instruction; loops are natural loops, found by dominators
"""

import functools
import re
from typing import NamedTuple

PEER, DESCRIPTOR, UNKNOWN = "address from the table", "descriptor", "unknown"
REGISTER = re.compile(r"%[\w.@]+")
# Instructions that write no register, whatever their first operand is.
SILENT = re.compile(
    r"(st|red|bra|brx|bar|barrier|cp|prefetch|prefetchu|fence|membar|ret|exit|stmatrix|setmaxnreg|"
    r"griddepcontrol|nanosleep|trap|clusterlaunchcontrol)\b"
    r"|mbarrier\.(init|inval|expect_tx|arrive|complete_tx)|wgmma\.(fence|commit|wait)"
    r"|tcgen05\.(st|mma|commit|alloc|dealloc|wait|cp|fence|relinq)"
)


class Fields(NamedTuple):
    line: int  # in the text, from 1
    guard: str | None  # predicate, with "!" where it is negated
    opcode: str
    operands: tuple[str, ...]
    site: str  # where it comes from: "signal.py:56:4"
    calls: str  # that led there, innermost first; "" in the kernel itself


class Instruction(Fields):
    """What is asked of one thousands of times is found once."""

    def has(self, *words):
        """Whether the opcode has all of these parts: has("st", "global")."""
        return self._parts.issuperset(words)

    @functools.cached_property
    def _parts(self):
        return {part.partition("::")[0] for part in self.opcode.split(".")}

    @property
    def address(self):
        """The operand in brackets, or None; of a copy the one in global memory."""
        brackets = [operand for operand in self.operands if operand.startswith("[")]
        reads = re.search(r"\.shared(::\w+)?\.global\b", self.opcode)
        return brackets[1 if reads else 0] if brackets else None

    @property
    def nbytes(self):
        """That one thread moves; 0 of a copy, whose size is an operand."""
        vector, bits = re.search(r"\.v(\d)\b", self.opcode), re.search(r"\.[busf](\d+)\b", self.opcode)
        return int(vector[1] if vector else 1) * int(bits[1] if bits else 0) // 8

    @functools.cached_property
    def written(self):
        if SILENT.match(self.opcode) or not self.operands or self.operands[0].startswith("["):
            return []
        return REGISTER.findall(self.operands[0])

    @functools.cached_property
    def read(self):
        first = 1 if self.written else 0
        return [register for operand in self.operands[first:] for register in REGISTER.findall(operand)]


class Kernel:
    """See the head of the file. pointers: names of the pointer parameters in their order."""

    def __init__(self, text, pointers=()):
        header, body, first_line = split_entry(text)
        self.threads = int(re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", header)[1])
        parameters = re.findall(r"\.param \.u64 \.ptr \.global[^,)]*?(\w+_param_\d+)", header)
        if not len(pointers) <= len(parameters) <= len(pointers) + 2:  # Triton's own two follow
            raise ValueError(
                f"{len(parameters)} pointer parameters in the PTX, {len(pointers)} in the signature: "
                f"{pointers}"
            )
        self.parameters = dict(zip(parameters, pointers, strict=False))
        self.parameters |= dict.fromkeys(
            re.findall(r"\.param [^,)]*\.b8 (\w+_param_\d+)\[\d+\]", header), DESCRIPTOR
        )
        self.operands = {}  # see named_in
        self.instructions, self.labels = parse(body, first_line)
        tables = re.findall(r"([\w$]+):\s*\.branchtargets\s+([^;]+);", body)
        self.tables = {label: [target.strip() for target in targets.split(",")] for label, targets in tables}
        self.successors = [self.followers(index) for index in range(len(self.instructions))]
        self.predecessors = [[] for _ in self.instructions]
        for index, followers in enumerate(self.successors):
            for follower in followers:
                self.predecessors[follower].append(index)
        self.definitions = {}
        for instruction in self.instructions:
            for register in instruction.written:
                self.definitions.setdefault(register, []).append(instruction)
        self.origins = self.find_origins()

    def followers(self, index):
        instruction = self.instructions[index]
        if instruction.opcode in ("ret", "exit", "trap"):
            return [index + 1] if instruction.guard else []
        if instruction.opcode.startswith("call"):
            raise ValueError(f"line {instruction.line}: {instruction.opcode} is not followed")
        if instruction.opcode.startswith("brx"):
            return [self.labels[target] for target in self.tables[instruction.operands[1]]]
        if not instruction.opcode.startswith("bra"):
            return [index + 1]
        target = self.labels[instruction.operands[0]]
        return [target, index + 1] if instruction.guard else [target]

    def find_origins(self):
        origins = {}
        changed = True
        while changed:
            changed = False
            for instruction in self.instructions:
                found = self.origins_of(instruction, origins)
                for register in instruction.written:
                    known = origins.setdefault(register, set())
                    if not found <= known:
                        known |= found
                        changed = True
        return origins

    def origins_of(self, instruction, origins):
        """Of what the instruction writes."""
        if instruction.has("ld") and not instruction.has("param"):
            if instruction.has("shared"):
                return {UNKNOWN} if "64" in instruction.opcode else set()
            return {PEER} if "table" in self.look_up(instruction.address, origins) else set()
        return set().union(*(self.look_up(operand, origins) for operand in instruction.operands[1:]))

    def look_up(self, operand, origins):
        parameters, registers = self.named_in(operand)
        return parameters.union(*(origins.get(register, ()) for register in registers))

    def named_in(self, operand):
        """(names of the parameters, registers but for predicates)"""
        if operand not in self.operands:
            names = {
                name
                for symbol, name in self.parameters.items()
                if symbol in operand and re.search(rf"\b{symbol}\b", operand)
            }
            registers = [x for x in REGISTER.findall(operand) if not is_predicate(x)]
            self.operands[operand] = names, registers
        return self.operands[operand]

    def origins_of_address(self, instruction):
        return self.look_up(instruction.address, self.origins)

    def only_one_thread(self, instruction):
        """Whether the guard says: thread 0 of the program."""
        if not instruction.guard or instruction.guard.startswith("!"):
            return False
        definitions = self.definitions[instruction.guard]
        return all(
            definition.opcode.startswith("setp.eq.")
            and definition.operands[2] == "0"
            and self.is_thread_id(definition.operands[1])
            for definition in definitions
        )

    def same_in_all_threads(self, instruction):
        """Whether the address is computed from nothing that differs between the threads of a program."""
        seen, pending = set(), REGISTER.findall(instruction.address)
        while pending:
            register = pending.pop()
            if register in ("%tid.x", "%laneid", "%warpid"):
                return False
            if register not in seen:
                seen.add(register)
                pending += [
                    other for definition in self.definitions.get(register, ()) for other in definition.read
                ]
        return True

    def is_thread_id(self, operand):
        if operand == "%tid.x":
            return True
        return all(
            definition.opcode.startswith("mov.") and self.is_thread_id(definition.operands[1])
            or definition.opcode.startswith("and.") and self.is_thread_id(definition.operands[1])
            and int(definition.operands[2], 0) & (self.threads - 1) == self.threads - 1
            for definition in self.definitions.get(operand, [])
        ) and operand in self.definitions  # fmt: skip

    def holds(self, gained, lost):
        """Per instruction whether, on every path from the entry to just before it, something that `gained`
        accepts came after everything that `lost` accepts. An instruction that both accept counts as lost."""
        return self.solve(gained, lost, self.predecessors, self.successors, [0])

    def will_hold(self, gained):
        """Per instruction whether every path from just behind it to the end meets one that `gained`
        accepts.
        """
        ends = [index for index, followers in enumerate(self.successors) if not followers]
        return self.solve(gained, lambda instruction: False, self.successors, self.predecessors, ends)

    def solve(self, gained, lost, sources, sinks, starts):
        before = [True] * len(self.instructions)
        for start in starts:
            before[start] = False
        after = [not lost(x) and (gained(x) or before[index]) for index, x in enumerate(self.instructions)]
        pending = list(range(len(self.instructions)))
        while pending:
            index = pending.pop()
            here = index not in starts and all(after[source] for source in sources[index])
            x = self.instructions[index]
            then = not lost(x) and (gained(x) or here)
            before[index] = here
            if then != after[index]:
                after[index] = then
                pending.extend(sinks[index])
        return before

    def loop_around(self, index):
        """The instructions of the innermost loop around one, as a set of indices; empty outside loops."""
        loops = [loop for loop in self.loops() if index in loop]
        return min(loops, key=len, default=set())

    def loops(self):
        """Natural loops: an edge back to an instruction that every path to its origin goes through."""
        if not hasattr(self, "found_loops"):
            backward = [
                (tail, head)
                for tail, followers in enumerate(self.successors)
                for head in followers
                if head <= tail and self.dominates(head, tail)
            ]
            self.found_loops = []
            for head in {head for _, head in backward}:
                loop, pending = {head}, [tail for tail, target in backward if target == head]
                while pending:
                    index = pending.pop()
                    if index not in loop:
                        loop.add(index)
                        pending.extend(self.predecessors[index])
                self.found_loops.append(loop)
        return self.found_loops

    def dominates(self, head, tail):
        """Whether tail cannot be reached without head."""
        seen, pending = {head}, [0]
        while pending:
            index = pending.pop()
            if index == tail:
                return head == tail
            if index not in seen:
                seen.add(index)
                pending.extend(self.successors[index])
        return True

    def values_from(self, index):
        """Registers, predicates too, whose value depends on what an instruction loads: by computation, or by
        way of shared memory to the threads of the program (a store there, then loads in the same run of
        instructions)."""
        found = set(self.instructions[index].written)
        size = -1
        while len(found) != size:
            size, handed_on = len(found), False
            for position, instruction in enumerate(self.instructions):
                if position and self.predecessors[position] != [position - 1]:
                    handed_on = False
                if instruction.has("st", "shared"):
                    handed_on = not found.isdisjoint(instruction.read)
                elif instruction.has("ld"):
                    if handed_on and instruction.has("shared"):
                        found.update(instruction.written)
                elif not found.isdisjoint(instruction.read):
                    found.update(instruction.written)
        return found


def is_predicate(register):
    return re.match(r"%p\d", register) is not None


def split_entry(text):
    """(what is before the body, the body, number of its first line)."""
    start = re.search(r"^\.visible \.entry", text, re.MULTILINE).start()
    brace = re.search(r"^\{", text[start:], re.MULTILINE).start() + start
    end = text.find("\t// -- End function", brace)
    end = text.find("// -- End function", brace) if end < 0 else end
    return text[start:brace], text[brace:end], text.count("\n", 0, brace) + 1


def parse(body, first_line):
    """(instructions, index of the instruction that each label is before)."""
    instructions, labels, waiting, scopes = [], {}, [], []
    statement, started, site = "", 0, ("", "")
    parents = {}
    for number, line in enumerate(body.split("\n"), first_line):
        code, _, comment = line.partition("//")
        if code.lstrip().startswith(".loc"):
            site = read_location(code, comment.strip(), parents)
            continue
        while code := code.strip():
            label = re.match(r"([\w$]+):(?!:)", code)
            if statement or not (code[0] in "{}" or label):
                started = started if statement else number
                part, end, code = code.partition(";")
                statement = f"{statement} {part}".strip()
                if end:
                    instruction = read_statement(statement, started, site, scopes)
                    statement = ""
                    if instruction:
                        labels.update(dict.fromkeys(waiting, len(instructions)))
                        waiting = []
                        instructions.append(instruction)
            elif label:
                waiting.append(local_name(label[1], scopes))
                code = code[label.end() :]
            else:
                if code[0] == "{":
                    scopes.append((number, set()))
                else:
                    scopes.pop()
                code = code[1:]
    return instructions, labels


def read_location(code, comment, parents):
    """(site, calls) of a .loc. The calls are in the comment, or (Triton 3.9) given by `inlined_at`, the place
    of another .loc before, which may be inlined itself; parents: the calls of every place so far."""
    place, at = re.match(r"\s*\.loc\s+(\d+ \d+ \d+)(?:.*\binlined_at (\d+ \d+ \d+))?", code).groups()
    site, _, calls = comment.partition(" @[ ")
    if at:
        calls = f"{at} @[ {parents.get(at, '')}"
    parents[place] = calls
    return site, calls


def local_name(label, scopes):
    """Labels of inline assembly are named like no other: the same text may be there many times."""
    return label if len(scopes) == 1 else f"{label}@{scopes[-1][0]}"


def read_statement(text, line, site, scopes):
    """An Instruction, or None of a declaration, which is noted if it is one of an inner scope."""
    scope, names = scopes[-1]
    if text.startswith("."):
        if len(scopes) > 1 and text.startswith(".reg"):
            names |= {name.strip() for name in text.split(None, 2)[2].split(",")}
        return None
    for name in names:
        text = re.sub(rf"(?<![\w%.]){re.escape(name)}(?![\w.])", f"%{name.lstrip('%')}@{scope}", text)
    guard, rest = re.match(r"(?:@(!?\s*[%\w@]+)\s+)?(.*)", text, re.DOTALL).groups()
    opcode, *operands = rest.split(None, 1)
    operands = tuple(split_operands(operands[0] if operands else ""))
    if opcode.startswith("bra"):
        operands = (local_name(operands[0], scopes),)
    return Instruction(line, guard and guard.replace(" ", ""), opcode, operands, *site)


def split_operands(text):
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [part for part in [*parts, current.strip()] if part]
