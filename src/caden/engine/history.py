"""What a run returns: its models, a table of rows, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from caden.core import Problem, html_table
from caden.engine import checkpoint
from caden.engine.columns import AXES, COLUMNS, EFFORTS, MEASURES, to_target
from caden.engine.figures import figures, picture
from caden.errors import CadenError, require_choice, require_integer
from caden.networks.timers import Times

Row = dict[str, float | int | None]


@dataclass(repr=False)
class Result:
    """The end of a run."""

    x: Tensor  # (m, d)
    rows: list[Row]
    problem: Problem
    target: float | None = None
    directory: Path | None = None
    scalars: dict[str, float] = field(default_factory=dict)  # single numbers of the method's state, such as mu_z
    stopped: str = "rounds"  # why: "rounds", "target", "tolerance", "callback", "diverged", "interrupted"
    failure: str = ""  # the error message, if the run diverged or was interrupted
    outside: tuple[str, ...] = ()  # conditions of the run that its method is known not to survive, such as "loss"
    times: Times | None = None  # if there was a clock

    @property
    def history(self) -> pd.DataFrame:
        """One row per recorded round; row 0 is the start."""
        return pd.DataFrame(self.rows)

    @property
    def agents(self) -> pd.DataFrame:
        """One row per agent of a run with a clock: the shares of the time it computed and was idle, and its steps.

        With deadlines also `participation`, the share of the rounds in which it was ready.
        """
        if self.times is None:
            return pd.DataFrame(columns=["busy", "idle", "steps"])
        busy, share = self.times.busy, self.times.participation
        table = pd.DataFrame({"busy": busy, "idle": 1 - busy, "steps": self.times.steps})
        return table if share is None else table.assign(participation=share)

    @property
    def waiting(self) -> pd.DataFrame:
        """Who waited for whom in a run with a clock: agent, neighbour, simulated seconds; only where it did."""
        columns = ["agent", "neighbour", "seconds"]
        if self.times is None:
            return pd.DataFrame(columns=columns)
        owner, peer, seconds = self.times.owner, self.times.peer, self.times.waited
        order = np.lexsort((owner, peer))
        table = pd.DataFrame(dict(zip(columns, (peer[order], owner[order], seconds[order]))))
        return table[table["seconds"] > 0].reset_index(drop=True)

    @property
    def mean(self) -> Tensor:
        """(d,) the mean of the local models."""
        return self.x.mean(0)

    def _model(self, agent: int | None) -> Tensor:
        if agent is None:
            return self.mean
        if require_integer("agent", agent) >= len(self.x):
            raise CadenError(f"`agent` must lie in 0..{len(self.x) - 1}, got {agent}.")
        return self.x[agent]

    def module(self, agent: int | None = None) -> nn.Module:
        """Return the user's model with the mean of the local models loaded, or with one agent's model."""
        return self.problem.module(self._model(agent), agent)

    def save(self, path: Path | str, agent: int | None = None) -> None:
        """Write the model that `module` returns to a safetensors file, under its module's own names.

        `model.load_state_dict(safetensors.torch.load_file(path))` reads it back.
        """
        checkpoint.write_tensors(Path(path), self.module(agent).state_dict())

    def plot(self, *measures: str, x: str = "round", target: float | None = None) -> Any:
        """Draw the history as a matplotlib figure, which a notebook shows.

        Args:
            measures: columns of the history; by default all that are curves.
            x: column of the horizontal axis: "round", "communications", "gradients", "seconds", "time" or "bytes".
            target: accuracy to mark; by default the run's own.
        """
        require_choice("column", x, AXES)
        for measure in measures:
            require_choice("column", measure, MEASURES)
        target = self.target if target is None else target
        curves = figures({"": [self.history]}, target)
        chosen = [replace(f, x=x) for f in curves if not measures or f.measure in measures]
        if not chosen:
            raise CadenError(f"The history has no values of {', '.join(measures)}.")
        return picture(chosen)

    def summary(self) -> dict[str, Any]:
        """Return the final value of every column, the best accuracy, and the cost of the target (None: not reached)."""
        summary = summarise(self.rows, self.target, self.stopped) | self.scalars
        return summary | ({"outside": list(self.outside)} if self.outside else {})

    def table(self) -> list[tuple[str, str]]:
        """Return the summary as labelled text, the most important numbers first."""
        summary = self.summary()
        lines = []
        if "accuracy" in summary:
            lines.append(("final mean accuracy", COLUMNS["accuracy"].text(summary["accuracy"])))
            lines.append(("best mean accuracy", COLUMNS["accuracy"].text(summary["best_accuracy"])))
        if summary.get("target") is not None:
            for name in ("round", "communications", *(("time",) if "time" in summary else ())):
                cost = summary[to_target(name)]
                label = f"{to_target(name).removesuffix('_to_target')} to {summary['target']:.0%}"
                lines.append((label, "not reached" if cost is None else COLUMNS[name].text(cost)))
        for name in (*_SHOWN, "time", "idle", "mu_z", "seconds"):
            if summary.get(name) is not None:
                lines.append((COLUMNS[name].label, COLUMNS[name].text(summary[name])))
        if self.outside:
            lines.append(("not tolerated by the method", ", ".join(self.outside)))
        return lines

    def __repr__(self) -> str:
        rounds = self.rows[-1]["round"] if self.rows else 0
        accuracy = self.rows[-1].get("accuracy") if self.rows else None
        end = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        return f"Result({len(self.x)} agents, {rounds} rounds{end}, stopped by {self.stopped})"

    def _repr_html_(self) -> str:
        return html_table(repr(self), dict(self.table()))


_SHOWN = ("objective", "relative_error", "consensus", "dual_sum", "round", "communications", "gradients", "rejected")


def summarise(rows: list[Row], target: float | None, stopped: str) -> dict[str, Any]:
    """Return what `Result.summary` does, for rows alone."""
    summary: dict[str, Any] = {**(rows[-1] if rows else {}), "stopped": stopped}
    if "accuracy" in summary:
        summary["best_accuracy"] = max(float(row["accuracy"] or 0) for row in rows)
        if target is not None:
            reached = [row for row in rows if float(row["accuracy"] or 0) >= target]
            summary["target"] = target
            summary |= {
                to_target(column): reached[0][column] if reached else None for column in EFFORTS if column in rows[0]
            }
    return summary
