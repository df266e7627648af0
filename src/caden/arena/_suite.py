"""The suite: problems, graphs and conditions, each a table of settings, and which combinations are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from caden.errors import CadenError, require_choice
from caden.experiments.config import Experiment, experiment, parse, read_toml
from caden.experiments.tune import space_of
from caden.methods import CARDS, CONDITIONS, METHODS, not_survived
from caden.networks.messages import Messages
from caden.registry import factory, parameters

FOLDER = Path(__file__).parent


class Cell(NamedTuple):
    """One place of the arena."""

    problem: str
    graph: str
    condition: str

    def __str__(self) -> str:
        return "/".join(self)


class Suite(NamedTuple):
    """Everything that determines the runs of the arena besides the methods."""

    seeds: list[int]
    tuning_seed: int
    trials: int
    local_steps: int
    agents: int
    clock: dict[str, Any]
    graphs: dict[str, dict[str, Any]]
    conditions: dict[str, dict[str, Any]]
    largest: dict[str, int]
    left_out: dict[str, str]  # method -> why
    left_out_without_batches: dict[str, str]
    slices: dict[str, list[str]]
    problems: dict[str, dict[str, Any]]  # experiments, with a table `arena` of what else the arena needs to know

    def cells(self, names: Iterable[str]) -> list[Cell]:
        """Return the cells that texts such as "pca,robust/ring/half" name, without repetition."""
        axes = {"problem": self.problems, "graph": self.graphs, "condition": self.conditions}
        cells: list[Cell] = []
        for text in names:
            parts = [[word.strip() for word in part.split(",")] for part in text.split("/")]
            if len(parts) != 3:
                raise CadenError(f"A cell is problem/graph/condition, got {text!r}.")
            for words, (kind, known) in zip(parts, axes.items()):
                for word in words:
                    require_choice(kind, word, known)
            cells += map(Cell._make, product(*parts))
        return list(dict.fromkeys(cells))

    def everything(self) -> list[Cell]:
        """Return all cells."""
        return [Cell(*names) for names in product(self.problems, self.graphs, self.conditions)]

    def effort(self, cell: Cell) -> str:
        """Return by which effort methods are tuned and ranked in a cell."""
        return str(self.conditions[cell.condition].get("effort", "communications"))

    def experiment(self, cell: Cell, method: str) -> Experiment:
        """Return the experiment of a method in a cell, with its default parameters."""
        table = {k: dict(v) if isinstance(v, dict) else v for k, v in self.problems[cell.problem].items()}
        del table["arena"]
        table["problem"] = {"agents": self.agents, **table["problem"]}
        agents = table["problem"]["agents"]
        condition = {k: v for k, v in self.conditions[cell.condition].items() if k != "effort"}
        clock = {**self.clock, **condition.pop("clock", {})}
        if clock.get("mode") == "deadline" and method in CARDS and "sleep" not in CARDS[method].survives:
            clock = {k: v for k, v in clock.items() if k not in ("mode", "deadline")}  # it waits
        table |= {
            "local_steps": self.local_steps,
            "graph": self._graph(cell.graph, agents),
            "method": {"name": method},
            "clock": {k: _repeat(v, agents) for k, v in clock.items()},
            **{k: _repeat(v, agents) for k, v in condition.items()},
        }
        if "target" in table:
            table["stop_at_target"] = True
        return experiment_of(table)

    def space(self, problem: str, method: str) -> dict[str, Any]:
        """Return the search space of a method; on mini-batches its local solver is one of the problem's."""
        space = space_of(method, needed=False)
        solvers = self.problems[problem]["arena"].get("solvers")
        if solvers and "solver" in parameters(factory("method", METHODS, {"name": method})):
            return {name: entry for name, entry in space.items() if name != "lr"} | {"solver": solvers}
        return space

    def _graph(self, name: str, agents: int) -> dict[str, Any]:
        """Return a graph's table; one made for 20 agents has fewer edges for fewer agents."""
        table = dict(self.graphs[name])
        if "edges" in table:
            table["edges"] = max(agents - 1, round(table["edges"] * agents / self.agents))
        return table


def _repeat(value: Any, agents: int) -> Any:
    return (value * agents)[:agents] if isinstance(value, list) else value


def experiment_of(table: Mapping[str, Any]) -> Experiment:
    """Return a checked experiment from a table alone."""
    return experiment(None, (), table)


def load_suite() -> Suite:
    """Read the suite of this package."""
    paths = sorted((FOLDER / "problems").glob("*.toml"))
    problems = {path.stem: read_toml(path) for path in paths}
    return Suite(**parse((FOLDER / "suite.toml").read_text(encoding="utf-8")), problems=problems)


def excluded(config: Experiment) -> str:
    """Return why a method is not measured under the conditions of an experiment, or "".

    A method that is exact takes part where it remains so. One that is biased anyway takes part wherever it runs.
    """
    name = config.method["name"]
    if name in CARDS and not CARDS[name].survives:
        return ""
    present = {"sleep": config.participation != 1.0, "links": config.links != 1.0}
    fatal = not_survived(name, present | Messages.from_spec(config.messages).conditions)
    return f"does not survive {' and '.join(CONDITIONS[name] for name in fatal)}" if fatal else ""


def chosen(
    cells: Sequence[Cell], problems: Sequence[str], graphs: Sequence[str], conditions: Sequence[str]
) -> list[Cell]:
    """Return the cells that the filters leave; an empty filter leaves all."""
    kept = [cell for cell in cells if all(not f or name in f for name, f in zip(cell, (problems, graphs, conditions)))]
    if not kept:
        raise CadenError("No cell of the slice is left: use --all, or other --problems, --graphs and --conditions.")
    return kept
