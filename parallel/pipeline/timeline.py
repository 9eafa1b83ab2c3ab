"""When each pass of a schedule would run, given the time that a pass takes: the bubble as a number and the
schedule as a picture.

Every virtual stage takes the same time per microbatch; a rank runs its actions in order, each as soon as its
input has come; a message takes `comm` from the end of the pass that made it, and occupies no rank (play in
schedules.py).

    bubble = (makespan - m v (F + B + W)) / makespan
    makespan = max over ranks of (its last end - its own first start)

m microbatches, v virtual stages per rank. This is the definition behind the tables of Qi et al. 2024 (arXiv
2401.10241): with the measured times of their table 9 it gives the 24 rates that their table 5 has for 1F1B
and ZB-H1, to all four digits. It leaves out the optimizer: PipeDream's U takes no time. Stages of unlike
size, and links that are shared, are not modelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pycomm.parallel.pipeline.schedules import Action, Schedule, play

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes

__all__ = ["Span", "Timeline", "simulate"]

COLOURS = {"F": "#4c78a8", "B": "#e4804a", "W": "#58a76a"}
MEANINGS = {"F": "F  forward", "B": "B  gradient of the input", "W": "W  gradient of the weights"}
LIGHTER = 0.42  # share of white in the colour of the last chunk; the first chunk has none


class Span(NamedTuple):
    """start and end: in the unit of the times that were given to simulate()."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """spans[rank]: the actions of a rank, in order. work: the time of a rank in which it computes."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    work: float

    @property
    def makespan(self) -> float:
        """The longest time between a rank's first start and its last end."""
        return max(row[-1].end - row[0].start for row in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which a rank is idle; see the head of this file."""
        return (self.makespan - self.work) / self.makespan

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the timeline into a file (the suffix says which format): a row per rank, a box with the
        microbatch's number per pass.

        Later chunks of a rank have a lighter colour. Needs matplotlib.
        """
        from matplotlib.figure import Figure

        end = max(row[-1].end for row in self.spans)
        boxes = end / min(
            span.end - span.start for row in self.spans for span in row if span.action.kind in COLOURS
        )
        figure = Figure(
            figsize=(min(max(0.30 * boxes + 1.2, 6.5), 40), 0.46 * len(self.spans) + 1.25),
            layout="constrained",
        )
        axes = figure.add_subplot()
        for rank in range(len(self.spans)):
            self._plot_rank(axes, rank, figure.get_figwidth() - 0.9, end)
        axes.set(xlim=(0, end), ylim=(len(self.spans) - 0.5, -0.5), xlabel="time")
        axes.set_yticks(range(len(self.spans)), [f"rank {rank}" for rank in range(len(self.spans))])
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_facecolor("#f4f4f2")
        schedule = self.schedule
        of_chunks = f", {schedule.chunks} chunks per rank" if schedule.chunks > 1 else ""
        bubble = f"bubble {100 * self.bubble:.1f}%"
        title = f"{schedule.name}: {schedule.microbatches} microbatches{of_chunks}, {bubble}"
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=24)
        self._plot_legend(axes)
        figure.savefig(path, dpi=150)

    def _plot_rank(self, axes: Axes, rank: int, width: float, end: float) -> None:
        """The boxes of one row; a number is left out where its box is too narrow for it. width: of the axes,
        in inches.
        """
        mine = self.schedule.stages_of(rank)
        for action, start, stop in self.spans[rank]:
            if action.kind not in COLOURS:
                continue
            chunk = mine.index(action.stage) / max(len(mine) - 1, 1)
            axes.barh(
                rank,
                stop - start,
                left=start,
                height=0.86,
                color=_lighter(COLOURS[action.kind], LIGHTER * chunk),
                edgecolor="white",
            )
            if (stop - start) / end * width > 0.11 * len(str(action.microbatch)):
                colour = "#222" if chunk > 0.5 else "white"
                axes.text(
                    (start + stop) / 2,
                    rank,
                    str(action.microbatch),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=colour,
                )

    def _plot_legend(self, axes: Axes) -> None:
        for kind, colour in COLOURS.items():
            axes.barh(0, 0, color=colour, label=MEANINGS[kind])
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=3,
            frameon=False,
            fontsize=8,
            handlelength=1,
            borderaxespad=0.2,
        )


def _lighter(colour: str, white: float) -> str:
    """'#rrggbb' mixed with a share of white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def simulate(
    schedule: Schedule, forward: float, backward: float, weight: float, comm: float = 0.0
) -> Timeline:
    """A Timeline. forward, backward, weight: time of F, B, W of one virtual stage and one microbatch; comm:
    of a message between two ranks.

    All in one unit, forward, backward and weight above 0. Raises ValueError for other times and for a
    schedule that deadlocks.
    """
    if min(forward, backward, weight) <= 0 or comm < 0:
        raise ValueError(
            f"times must be above 0, got forward={forward}, backward={backward}, weight={weight}, "
            f"comm={comm} (may be 0)"
        )
    rows = play(schedule, {"F": forward, "B": backward, "W": weight, "U": 0}, comm)
    spans = (
        tuple(Span(a, *t) for a, t in zip(row, times, strict=True))
        for row, times in zip(schedule.actions, rows, strict=True)
    )
    return Timeline(
        schedule, tuple(spans), schedule.microbatches * schedule.chunks * (forward + backward + weight)
    )
