"""An experiment as a TOML file: the same names and values that the Python functions take.

rounds = 100
participation = 0.5
[method]
name = "caden"
mu_z = 0.3
[problem]
data = "mnist"
[graph]
name = "ring"
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from caden import schedules
from caden._tensor.devices import require_device
from caden.core import Method, Problem, complete
from caden.draws import Draw
from caden.engine.history import Result
from caden.engine.options import Saving, Stopping
from caden.engine.simulate import simulate
from caden.engine.warmup import Warmup
from caden.errors import CadenError, require_choice, require_integer
from caden.graphs import GRAPHS, Graph
from caden.methods import CARDS, METHODS
from caden.networks.clock import Clock
from caden.networks.messages import Messages
from caden.networks.transport import Transport
from caden.problems import PROBLEMS
from caden.registry import Factory, everything_built, factory, load_object, make, parameters
from caden.schedules import Participation, Workload

REGISTRIES: dict[str, dict[str, Factory]] = {"method": METHODS, "problem": PROBLEMS, "graph": GRAPHS}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
HIDDEN = (
    "dtype",
    "device",
    "features",
    "labels",
    "hosted",
)  # set for the whole experiment, or too large for a file

# The paper's setting (20 agents, 37 edges, two layers without biases, warm-up) on embedded data.
DEFAULTS: dict[str, Any] = {
    "method": {"name": "caden"},
    "problem": {"name": "classification", "data": "digits", "agents": 20},
    "graph": {"name": "erdos_renyi", "p": 0.2, "edges": 37},
    "warmup": {"steps": 20, "step_size": 0.1},
    "target": 0.93,
}


class Experiment(BaseModel):
    """Everything that determines a run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rounds: int = 100
    seed: int = 0
    participation: float | list[float] | dict[str, Any] = 1.0
    local_steps: int | str | list[int] | dict[str, Any] | None = None  # see `workload`
    target: float | None = None
    stop_at_target: bool = False
    tolerance: float | None = None
    record_every: int = 1
    metrics: str = "auto"
    checkpoint_every: int = 25
    device: str = "cpu"
    dtype: str | None = None
    deterministic: bool = False
    method: dict[str, Any] = {}
    problem: dict[str, Any] = {}
    graph: dict[str, Any] = {}
    warmup: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    links: float | list[float] | dict[str, Any] = 1.0
    clock: dict[str, Any] | None = None
    compare: dict[str, dict[str, Any]] = {}  # parameters of the other methods of `caden compare`
    tune: dict[str, dict[str, Any]] = {}  # search spaces of `caden tune`
    fleet: dict[str, Any] = {}  # where peers listen, see `networks.peers.Fleet`

    def to_toml(self) -> str:
        """Return the experiment as text, without unset values."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    def _require_valid(self) -> None:
        """Refuse wrong values before any data are read."""
        require_integer("rounds", self.rounds), require_integer("seed", self.seed)
        Saving(record_every=self.record_every, metrics=self.metrics, checkpoint_every=self.checkpoint_every)
        Stopping(self.target, self.stop_at_target, self.tolerance)
        for name in self.warmup:
            require_choice("key", f"warmup.{name}", [f"warmup.{field}" for field in Warmup._fields])
        Warmup.from_spec(self.warmup), Messages.from_spec(self.messages), Clock.from_spec(self.clock)
        for kind, registry in REGISTRIES.items():
            factory(kind, registry, getattr(self, kind), HIDDEN)
        for value, schedule in ((self.participation, Participation), (self.local_steps or 0, Workload)):
            schedule(schedules.from_spec(value), Draw(self.seed, len(value) if isinstance(value, list) else 1))

    @property
    def workload(self) -> Any:
        """The local steps for `simulate`: if none are given, "auto" for methods with a local solver, else 5.

        Mini-batches are too noisy for "auto", so it is 5 there, too, and likewise with dropout (see `build`).
        """
        if self.local_steps is not None:
            return schedules.from_spec(self.local_steps)
        return "auto" if has_solver(self.method["name"]) and self.problem.get("batch_size") is None else 5

    def build(self, hosted: Callable[[Graph], list[int] | None] | None = None) -> tuple[Method, Problem, Graph]:
        """Make the method, the problem and the graph, and write the defaults used into the tables.

        `hosted` returns the agents of this process; the problem then covers only these. A factory with a parameter
        `hosted` need not load the data of the others.
        """
        dtype = {} if self.dtype is None else {"dtype": DTYPES[require_choice("dtype", self.dtype, DTYPES)]}
        shared = {"seed": self.seed, "device": str(require_device(self.device)), **dtype}
        tables = {kind: dict(getattr(self, kind)) for kind in REGISTRIES}
        model = tables["problem"].get("model")
        if isinstance(model, str) and ":" in model:
            tables["problem"]["model"] = load_object(model)
        method: Method = make("method", METHODS, tables["method"])
        takes = parameters(factory("problem", PROBLEMS, tables["problem"]))
        if hosted is not None and "hosted" in takes and "agents" in takes:
            agents = tables["problem"].get("agents", takes["agents"].default)
            graph = self.build_graph(agents)
            shared["hosted"] = hosted(graph)
            problem = complete(make("problem", PROBLEMS, tables["problem"], **shared))
        else:
            problem = complete(make("problem", PROBLEMS, tables["problem"], **shared))
            graph = self.build_graph(problem.agents)
            agents_here = None if hosted is None else hosted(graph)
            problem = problem if agents_here is None else problem.take(agents_here)
        for kind, made, wanted in (("method", method, Method), ("graph", graph, Graph)):
            if not isinstance(made, wanted):
                raise CadenError(f"{tables[kind]['name']!r} makes a {type(made).__name__}, not a {kind}.")
        self._resolve(problem)
        everything_built()
        return method, problem, graph

    def build_graph(self, agents: int) -> Graph:
        """Make the graph alone."""
        graph: Graph = make("graph", GRAPHS, dict(self.graph), agents=agents, seed=self.seed)
        return graph

    def _resolve(self, problem: Problem) -> None:
        """Write the defaults that were used into the tables, as far as TOML can express them."""
        for kind, registry in REGISTRIES.items():
            table = getattr(self, kind)
            defaults = {k: p.default for k, p in parameters(factory(kind, registry, table)).items() if k not in HIDDEN}
            if "seed" in defaults:
                defaults["seed"] = self.seed
            defaults = {k: v for k, v in defaults.items() if isinstance(v, bool | int | float | str)}
            chosen = {"execution": problem.execution} if kind == "problem" and "execution" in defaults else {}
            setattr(self, kind, {**defaults, **table, **chosen})
        if self.local_steps is None:
            noisy = problem.at(0).stochastic  # as with dropout
            self.local_steps = 5 if noisy else self.workload

    def with_method(self, name: str) -> Experiment:
        """Return the same experiment with another method and the parameters that `compare` has for it."""
        table = self.method if self.method["name"] == name else {"name": name}
        table = {**table, **self.compare.get(name, {})}
        factory("method", METHODS, table)
        steps = None if self.local_steps == "auto" else self.local_steps  # not every method can stop by itself
        return self.model_copy(update={"method": table, "compare": {}, "local_steps": steps})

    def run(
        self,
        directory: Path | None = None,
        resume: bool = False,
        built: tuple[Problem, Graph] | None = None,
        transport: Transport | None = None,
        **options: Any,
    ) -> Result:
        """Build and simulate; `built` is a problem and a graph to reuse."""
        if built is None:
            method, problem, graph = self.build(None if transport is None else transport.hosts)
        else:
            method, (problem, graph) = make("method", METHODS, self.method), built
            self._resolve(problem)
        same = (
            "rounds",
            "seed",
            "record_every",
            "metrics",
            "checkpoint_every",
            "target",
            "stop_at_target",
            "tolerance",
        )
        given = {name: getattr(self, name) for name in (*same, "deterministic")}
        given |= {n: schedules.from_spec(getattr(self, n)) for n in ("participation", "links")}
        given |= {"local_steps": self.workload, "clock": self.clock}
        given |= {"warmup": self.warmup, "messages": self.messages, "config": self.to_toml(), "transport": transport}
        return simulate(method, problem, graph, **given, directory=directory, resume=resume, **options)


def has_solver(method: str) -> bool:
    """Return whether the agents of a method solve subproblems with a local solver."""
    return method in CARDS and CARDS[method].has_solver


def parse(text: str, source: str = "the experiment") -> dict[str, Any]:
    """Parse TOML text."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CadenError(f"{source} is not valid TOML: {error}.") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CadenError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None


def assign(table: dict[str, Any], setting: str) -> None:
    """Apply `key.key=value`; the value is read as TOML, or else as a plain string."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise CadenError(f"`--set` takes key=value, got {setting!r}.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise CadenError(f"`--set {setting}`: {part} is not a table.")
    table[last] = value


def experiment(
    path: Path | None = None, settings: list[str] | tuple[str, ...] = (), defaults: Mapping[str, Any] = DEFAULTS
) -> Experiment:
    """Return an experiment from a file (or none) and `key=value` settings, on top of the defaults."""
    table = {} if path is None else read_toml(path)
    for setting in settings:
        assign(table, setting)
    for key in table:
        require_choice("key", key, Experiment.model_fields)
    merged = {k: dict(v) if isinstance(v, dict) else v for k, v in defaults.items()}
    for key, value in table.items():
        default = merged.get(key)
        if isinstance(default, dict) and isinstance(value, dict):
            # The default parameters belong to the default name; another name has its own.
            same = value.get("name", default.get("name")) == default.get("name")
            kept = default if same else {k: default[k] for k in ("agents",) if k in default}
            merged[key] = {**kept, **value}
        else:
            merged[key] = value
    try:
        checked = Experiment.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        raise CadenError(f"`{first['loc'][0]}` ({where}): {first['msg']}, got {first['input']!r}.") from None
    checked._require_valid()
    return checked
