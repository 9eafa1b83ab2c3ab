"""What the facts mean: one function per line of the report, from the facts of one rank or of all. No function
here looks at the machine, so the tests give them facts that they make up.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from pycomm import env

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pycomm.doctor.facts import Extension, Facts


class State(str, enum.Enum):
    ok = "ok"
    slow = "slow"  # works, but something costs time
    missing = "missing"  # something cannot be used


@dataclasses.dataclass(frozen=True)
class Finding:
    name: str
    state: State
    found: str
    mend: str | None = None  # one sentence: what to do
    fatal: bool = False  # pycomm cannot be used


MIN_FILES = 1024  # of which sockets, data loaders and groups of other processes take some
# Goes on from "CUDA tensors need" and "start".
BUILD_KERNELS = (
    "a build with PYCOMM_CUDA=1: `PYCOMM_CUDA=1 make build`, or `PYCOMM_CUDA=1 pip install "
    "--no-build-isolation --no-deps --force-reinstall` with the folder of the sources"
)
BUILD_VARIABLES = ("PYCOMM_CUDA", "PYCOMM_CUDA_ARCH", "PYCOMM_REPOSITORY")  # read by setup.py alone
SLOW_US = 30.0  # 8 bytes with a core per rank take 1 to 5 us on the machines of docs/benchmarks.md


def judge(answers: Sequence[Facts], silent: Sequence[int] = ()) -> list[Finding]:
    """All findings. `answers`: of the ranks that answered; `silent`: numbers of the others."""
    findings = [_ranks(answers, silent), *(_merged(answers, check) for check in PER_RANK)]
    findings += [check(answers) for check in OF_ALL]
    return [finding for finding in findings if finding]


def _merged(answers: Sequence[Facts], check: Callable[[Facts], Finding | None]) -> Finding | None:
    """The worst finding of a check over all ranks; where ranks differ, which ranks it is about."""
    findings = {facts.rank: finding for facts in answers if (finding := check(facts))}
    if not findings:
        return None
    order = list(State)
    worst = max(findings.values(), key=lambda finding: (finding.fatal, order.index(finding.state)))
    if len(set(findings.values())) == 1:
        return worst
    which = [str(rank) for rank, finding in findings.items() if finding == worst]
    label = "rank" if len(which) == 1 else "ranks"
    return dataclasses.replace(worst, found=f"{label} {', '.join(which)}: {worst.found}")


def _ranks(answers: Sequence[Facts], silent: Sequence[int]) -> Finding | None:
    if silent:
        names = ", ".join(map(str, silent))
        mend = "Look at the output of these ranks; start all of them with the same launcher."
        return Finding("ranks", State.missing, f"no answer from {names}", mend, fatal=True)
    versions = {(facts.versions["pycomm"], facts.versions["torch"], facts.python) for facts in answers}
    if len(versions) > 1:
        mend = "Start all ranks from one Python environment."
        return Finding("ranks", State.missing, "ranks have different versions", mend, fatal=True)
    hosts = sorted({facts.host for facts in answers})
    where = "one node" if len(hosts) == 1 else f"{len(hosts)} nodes: {', '.join(hosts)}"
    return Finding("ranks", State.ok, f"{len(answers)} on {where}") if len(answers) > 1 else None


# --- of one rank ---------------------------------------------------------------------------------


def _versions(facts: Facts) -> Finding:
    torch = facts.versions["torch"]
    found = f"pycomm {facts.versions['pycomm']}, torch {torch or 'not installed'}, Python {facts.python}"
    if torch is None:
        return Finding("versions", State.missing, found, "Install torch 2.11 to 2.15.", fatal=True)
    minor = tuple(int(part) for part in torch.split(".")[:2])
    if not (2, 11) <= minor <= (2, 15):
        mend = "pycomm supports torch 2.11 to 2.15: install one of these and build again."
        return Finding("versions", State.missing, found, mend, fatal=True)
    return Finding("versions", State.ok, found)


def _extension(facts: Facts) -> Finding:
    extension = facts.extension
    if extension.problem:
        mend = "Build it: `make build`, or `pip install --no-build-isolation -e .`"
        return Finding("extension", State.missing, extension.problem, mend, fatal=True)
    found = f"for torch {extension.built_for}, {extension.simd}, {_kernels(extension)}"
    if not extension.cuda:
        state = State.missing if facts.gpus.names else State.ok
        return Finding(
            "extension", state, found, f"CUDA tensors need nvcc 12.5 or newer and {BUILD_KERNELS}."
        )
    lacking = [gpu for gpu in facts.gpus.architectures if not _runs_on(gpu, extension.architectures)]
    if lacking:
        names = ", ".join(sorted({f"sm_{gpu}" for gpu in lacking}))
        mend = f"No kernel runs on the GPUs with {names}: unset PYCOMM_CUDA_ARCH, and start {BUILD_KERNELS}."
        return Finding("extension", State.missing, found, mend)
    return Finding("extension", State.ok, found)


def _kernels(extension: Extension) -> str:
    if not extension.cuda:
        return "without CUDA kernels"
    names = ", ".join(f"sm_{name}" for name in extension.architectures)
    return f"with CUDA kernels for {names}" if names else "with CUDA kernels"


def _runs_on(gpu: str, architectures: Sequence[str]) -> bool:
    """Whether kernels for these architectures run on a GPU of architecture `gpu`: machine code runs on later
    minor versions; of several architectures setup.py adds the newest as PTX, which runs on all later ones.
    """
    if not architectures:
        return True  # not known
    fits = any(int(one) // 10 == int(gpu) // 10 and int(one) <= int(gpu) for one in architectures)
    return fits or (len(architectures) > 1 and max(map(int, architectures)) < int(gpu))


def _optional_packages(facts: Facts) -> Finding:
    installed = {name: facts.versions[name] for name in ("triton", "cupy", "nccl4py")}
    found = ", ".join(f"{name} {version or 'not installed'}" for name, version in installed.items())
    if facts.gpus.names and not installed["triton"]:
        mend = "Install triton 3.6 to 3.9: without it pycomm.fused runs a product and a collective."
        return Finding("optional packages", State.missing, found, mend)
    return Finding("optional packages", State.ok, found)


def _numa(facts: Facts) -> Finding:
    touched = [node for node, cores in facts.numa.items() if set(cores) & set(facts.cores)]
    found = f"{len(facts.numa) or 1} node(s), this process may run on {len(touched) or 1}"
    if len(touched) > 1:
        mend = "Pin each rank to one node, for example with `numactl --cpunodebind=0 --membind=0`."
        return Finding("NUMA", State.slow, found, mend)
    return Finding("NUMA", State.ok, found)


def _shared_memory(facts: Facts) -> Finding:
    found = (
        f"/dev/shm is not needed: memory comes from memfd; huge pages for it: {facts.huge_pages or 'unknown'}"
    )
    if facts.huge_pages == "never":
        mend = (
            "Registered memory asks for them by itself on Linux 6.1 or later; writing `advise` to "
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled gives them to all of pycomm's memory."
        )
        return Finding("shared memory", State.ok, found, mend)
    return Finding("shared memory", State.ok, found)


def _peer_memory(facts: Facts) -> Finding | None:
    if facts.group is None or facts.group.reach is None:
        return None
    reach = facts.group.reach
    if reach != "staging only":
        return Finding("peers' memory", State.ok, reach)
    if facts.settings.get("PYCOMM_CMA") == "0":
        mend = "Large messages are copied twice: unset PYCOMM_CMA."
        return Finding("peers' memory", State.slow, "process_vm_readv is turned off by PYCOMM_CMA=0", mend)
    mend = (
        "Large messages are copied twice: set kernel.yama.ptrace_scope to 0, or start the container with "
        "--cap-add SYS_PTRACE."
    )
    return Finding("peers' memory", State.slow, "process_vm_readv is not allowed between ranks", mend)


def _limits(facts: Facts) -> Finding:
    files = "no limit" if facts.max_files is None else str(facts.max_files)
    locked = "no limit" if facts.max_locked is None else f"{facts.max_locked >> 10} KiB"
    found = f"open files {files}; locked memory {locked} (pycomm locks none)"
    if facts.max_files is not None and facts.max_files < MIN_FILES:
        mend = "Sockets, data loaders and groups take descriptors: `ulimit -n 4096` before the start."
        return Finding("limits", State.slow, found, mend)
    return Finding("limits", State.ok, found)


def _gpus(facts: Facts) -> Finding:
    gpus = facts.gpus
    if gpus.problem:
        mend = "CUDA tensors cannot be used: install a torch with CUDA that fits the driver (`nvidia-smi`)."
        return Finding("GPUs", State.missing, gpus.problem, mend)
    if not gpus.names:
        return Finding("GPUs", State.ok, "none: CPU tensors only")
    found = f"{len(gpus.names)}: {', '.join(sorted(set(gpus.names)))}"
    if gpus.no_peer_access:
        pairs = ", ".join(f"{a}-{b}" for a, b in gpus.no_peer_access)
        mend = "Ranks on these GPUs cannot share a group for CUDA tensors: put them into groups of their own."
        return Finding("GPUs", State.missing, f"{found}; no peer access {pairs}", mend)
    return Finding("GPUs", State.ok, found)


def _environment(facts: Facts) -> Finding:
    found = (
        ", ".join(f"{name}={value}" for name, value in facts.settings.items())
        or "no variable of pycomm is set"
    )
    if facts.settings_problem:
        mend = "Mend or unset the variable; the table is in pycomm/env.py."
        return Finding("environment", State.missing, facts.settings_problem, mend, fatal=True)
    if unknown := sorted(set(facts.settings).difference(env.VARIABLES, BUILD_VARIABLES)):
        mend = f"pycomm does not know {', '.join(unknown)}: correct the name; the table is in pycomm/env.py."
        return Finding("environment", State.missing, found, mend)
    return Finding("environment", State.ok, found)


# --- of all ranks --------------------------------------------------------------------------------


def _group(answers: Sequence[Facts]) -> Finding:
    groups = [facts.group for facts in answers if facts.group is not None]
    if len(groups) < len(answers):
        return Finding("group", State.missing, "not tried, because of what is missing above")
    for facts, group in zip(answers, groups, strict=True):
        if group.problem:
            mend = "No group could be made or used: the text says which call failed."
            return Finding("group", State.missing, f"rank {facts.rank}: {group.problem}", mend, fatal=True)
    ranks, slowest = groups[0].ranks, max(group.all_reduce_us or 0.0 for group in groups)
    found = f"{ranks} ranks, all_reduce of 8 bytes in {slowest} us, load {answers[0].load}"
    if slowest > SLOW_US and ranks <= len(_all_cores(answers)):
        mend = (
            "Look for other work on these cores (`uptime`), and for ranks that are pinned to the same core."
        )
        return Finding("group", State.slow, found, mend)
    return Finding("group", State.ok, found)


def _all_cores(answers: Sequence[Facts]) -> set[int]:
    return {core for facts in answers for core in facts.cores}


def _cores(answers: Sequence[Facts]) -> Finding:
    allowed = _all_cores(answers)
    found = f"{len(allowed)} of {answers[0].machine_cores} may be used"
    if len(answers) > len(allowed):
        mend = f"{len(answers)} ranks share them: start at most {len(allowed)}, or allow more cores."
        return Finding("cores", State.slow, found, mend)
    if len(answers) == 1:
        return Finding("cores", State.ok, f"{found}: up to {len(allowed)} ranks have a core each")
    return Finding("cores", State.ok, f"{found} by {len(answers)} ranks")


def _autogroup(answers: Sequence[Facts]) -> Finding:
    """Ranks in sessions of their own (torchrun) are groups of their own for the scheduler: sched_yield then
    lets no peer run, and a rank that shares its core has to sleep to hand it over.
    """
    groups = {facts.autogroup for facts in answers}
    if groups == {None}:
        return Finding("autogroup", State.ok, "off")
    allowed = _all_cores(answers)
    if len(groups) > 1 and len(answers) > len(allowed):
        found = "on, and ranks that share a core are in different groups: small messages take tens of us"
        mend = "Start fewer ranks, or turn it off: `sysctl kernel.sched_autogroup_enabled=0`."
        return Finding("autogroup", State.slow, found, mend)
    return Finding("autogroup", State.ok, "on; costs nothing while each rank has a core of its own")


PER_RANK: tuple[Callable[[Facts], Finding | None], ...] = (
    _versions,
    _extension,
    _optional_packages,
    _environment,
    _peer_memory,
    _shared_memory,
    _limits,
    _numa,
    _gpus,
)
OF_ALL: tuple[Callable[[Sequence[Facts]], Finding], ...] = (_cores, _autogroup, _group)
