"""What happens in the random trainings of recovery_kills.py: the plan, who is struck, when, and how. A seed
draws it; with_save(), with_stops() and draw_over_hosts() change what the same seed has drawn.
"""

import random
from typing import NamedTuple

RANKS, STEPS = 4, 9
PLANS = ("dp=4", "dp=4,zero=1", "dp=4,zero=2", "dp=4,zero=3", "dp=2,tp=2", "dp=2,pp=2")
EVENTS = ("step", "piece", "shrink", "rebuild")
SAVING = ("begun", "write", "rename", "remove")  # the last two on rank 0 alone
PLACES = ("0011", "0101", "0001", "0122")  # the host of each rank


class Victim(NamedTuple):
    event: str
    count: int  # the how many-th of these events
    delay: float  # seconds after it
    stops: bool = False  # or is killed
    wake: float | None = None  # seconds after it was stopped; None: never


class Case(NamedTuple):
    plan: str
    every: int
    replaced: bool
    wait: float
    victims: dict  # slot -> Victim
    hosts: str = ""  # of each rank; "": all are on this one
    forked: bool = False
    save: int = 0  # after this step an asynchronous save begins; 0: none
    pause: float = 0.0  # seconds, before a rank writes its part of it
    lingers: bool = False  # whoever wakes up is awaited before the last step, or behind it
    pace: float = 0.0  # seconds, before each step
    early: bool = False  # the script makes the default group at its top

    def __str__(self) -> str:
        """What differs from the defaults."""
        victims = {slot: ", ".join(_told(victim)) for slot, victim in self.victims.items()}
        return ", ".join(_told(self._replace(victims=victims)))

    @property
    def stops(self) -> bool:
        return any(victim.stops for victim in self.victims.values())


def _told(values: NamedTuple) -> list[str]:
    defaults = values._field_defaults
    return [f"{key}={value}" for key, value in values._asdict().items() if value != defaults.get(key)]


def draw(seed):
    draws = random.Random(seed)
    victims = {}
    for rank in draws.sample(range(RANKS), draws.randint(1, RANKS - 1)):
        event = draws.choice(EVENTS) if victims else draws.choice(EVENTS[:2])  # the first brings the others
        count = {"step": draws.randrange(1, STEPS), "piece": draws.randrange(1, 90)}.get(event, 1)
        victims[rank] = Victim(event, count, draws.choice([0, draws.uniform(0, 0.05), draws.uniform(0, 0.5)]))
    replaced = draws.random() < 0.5
    wait = draws.choice([0.0, 20.0]) if replaced else 0.0
    return Case(draws.choice(PLANS), draws.randint(1, 4), replaced, wait, victims)


def draw_over_hosts(seed):
    """The same, and in every second run a whole host. With three hosts the one that follows it lives."""
    case, draws = draw(seed), random.Random(-seed)
    hosts, victims = draws.choice(PLACES), case.victims
    if draws.random() < 0.5 or len(set(hosts)) > 2:
        host = draws.choice(sorted(set(hosts)))
        victim = Victim(*next(iter(victims.values()))[:2], draws.choice([0.0, draws.uniform(0, 0.2)]))
        victims = {rank: victim for rank in range(RANKS) if hosts[rank] == host}
    plan = draws.choice([plan for plan in PLANS if "pp" not in plan])
    return case._replace(plan=plan, victims=victims, hosts=hosts, replaced=False, wait=0.0)


def with_children(case: Case, seed: int) -> Case:
    return case._replace(forked=True)


def with_save(case: Case, seed: int) -> Case:
    """The first victim strikes while all save. Nobody does in the step before it: of par.save itself, outside
    of run.step, a death is an error for all.
    """
    draws, victims = random.Random(f"save {seed}"), {}
    for rank, victim in case.victims.items():
        events = SAVING if rank == 0 else SAVING[:2]
        event = draws.choice(events if not victims else (*events, "shrink", "rebuild"))
        victims[rank] = victim._replace(event=event, count=1)
    save, pause = draws.randrange(1, STEPS - 1), draws.choice([0.0, draws.uniform(0, 0.3)])
    return case._replace(victims=victims, save=save, pause=pause)


def with_stops(case: Case, seed: int) -> Case:
    """Some victims are stopped. Over hosts so few that the others are a quorum: these alone go on."""
    draws, victims = random.Random(f"stops {seed}"), dict(case.victims)
    if case.hosts:
        hosts = [
            [rank for rank in range(RANKS) if case.hosts[rank] == host] for host in sorted(set(case.hosts))
        ]
        hosts = [ranks for ranks in hosts if 0 not in ranks and 2 * len(ranks) <= RANKS]
        victim = next(iter(victims.values()))
        ranks = draws.choice(hosts) if draws.random() < 0.5 else [draws.randrange(RANKS)]
        victims = dict.fromkeys(ranks, victim)
    wakes = [None, (0.3, 7.0), (9.0, 13.0), (14.0, 18.0), *([(18.0, 25.0)] if case.hosts else [])]
    stopped = [rank for rank in victims if case.hosts or draws.random() < 0.6] or list(victims)[:1]
    for rank in stopped:
        between = draws.choice(wakes)
        wake = draws.uniform(*between) if between else None
        victims[rank] = victims[rank]._replace(stops=True, wake=wake)
    lingers = draws.random() < 0.5
    return case._replace(victims=victims, lingers=lingers, replaced=False, wait=0.0)
