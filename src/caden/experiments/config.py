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
from caden.core import Method, Problem, complete
from caden.engine.history import Result
from caden.engine.simulate import simulate
from caden.engine.warmup import Warmup
from caden.errors import CadenError, require_choice, require_integer
from caden.graphs import GRAPHS, Graph
from caden.methods import METHODS
from caden.networks.messages import Messages
from caden.networks.transport import Transport
from caden.problems import PROBLEMS
from caden.registry import Factory, factory, load_object, make, parameters

REGISTRIES: dict[str, dict[str, Factory]] = {"method": METHODS, "problem": PROBLEMS, "graph": GRAPHS}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
HIDDEN = (
    "dtype",
    "device",
    "features",
    "labels",
    "hosted",
)  # said once for the whole experiment, or too large for a file

# The paper's setting (20 agents, 37 edges, two layers without biases, 5 local steps, warm-up) on embedded data.
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
    local_steps: int | list[int] | dict[str, Any] = 5
    target: float | None = None
    stop_at_target: bool = False
    tolerance: float | None = None
    record_every: int = 1
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
    compare: dict[str, dict[str, Any]] = {}  # parameters of the methods that `caden compare` runs beside this one
    tune: dict[str, dict[str, Any]] = {}  # search spaces of `caden tune`, see `tune.SPACES`
    fleet: dict[str, Any] = {}  # where peers listen, see `peers.Fleet`

    def to_toml(self) -> str:
        """The experiment as text; unset values are left out."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    def build(self, hosted: Callable[[Graph], list[int] | None] | None = None) -> tuple[Method, Problem, Graph]:
        """Make the method, the problem and the graph; what was chosen by measuring is written back.

        `hosted` names the agents of this process: the problem is then theirs alone. A factory that takes `hosted`
        itself need not load what belongs to the others.
        """
        dtype = {} if self.dtype is None else {"dtype": DTYPES[require_choice("dtype", self.dtype, DTYPES)]}
        shared = {"seed": self.seed, "device": str(device_of(self.device)), **dtype}
        tables = {kind: dict(getattr(self, kind)) for kind in REGISTRIES}
        model = tables["problem"].get("model")
        if isinstance(model, str) and ":" in model:
            tables["problem"]["model"] = load_object(model)
        method: Method = make("method", METHODS, tables["method"])
        takes = parameters(factory("problem", PROBLEMS, tables["problem"]))
        if hosted is not None and "hosted" in takes and "agents" in takes:
            agents = tables["problem"].get("agents", takes["agents"].default)
            graph: Graph = make("graph", GRAPHS, tables["graph"], agents=agents, seed=self.seed)
            shared["hosted"] = hosted(graph)
            problem = complete(make("problem", PROBLEMS, tables["problem"], **shared))
        else:
            problem = complete(make("problem", PROBLEMS, tables["problem"], **shared))
            graph = make("graph", GRAPHS, tables["graph"], agents=problem.agents, seed=self.seed)
            mine = None if hosted is None else hosted(graph)
            problem = problem if mine is None else problem.take(mine)
        for kind, made, wanted in (("method", method, Method), ("graph", graph, Graph)):
            if not isinstance(made, wanted):
                raise CadenError(f"{tables[kind]['name']!r} makes a {type(made).__name__}, not a {kind}.")
        self._resolve(problem)
        return method, problem, graph

    def _resolve(self, problem: Problem) -> None:
        """Write the defaults that were used into the tables, as far as TOML can say them."""
        for kind, registry in REGISTRIES.items():
            table = getattr(self, kind)
            found = {k: p.default for k, p in parameters(factory(kind, registry, table)).items() if k not in HIDDEN}
            if "seed" in found:
                found["seed"] = self.seed
            found = {k: v for k, v in found.items() if isinstance(v, bool | int | float | str)}
            chosen = {"execution": problem.execution} if kind == "problem" and "execution" in found else {}
            setattr(self, kind, {**found, **table, **chosen})

    def with_method(self, name: str) -> Experiment:
        """The same experiment with another method, with the parameters that `compare` has for it."""
        table = self.method if self.method["name"] == name else {"name": name}
        table = {**table, **self.compare.get(name, {})}
        factory("method", METHODS, table)
        return self.model_copy(update={"method": table, "compare": {}})

    def run(
        self,
        directory: Path | None = None,
        resume: bool = False,
        built: tuple[Problem, Graph] | None = None,
        transport: Transport | None = None,
        **options: Any,
    ) -> Result:
        """Build and simulate; `built` reuses a problem and a graph."""
        if built is None:
            method, problem, graph = self.build(None if transport is None else transport.hosts)
        else:
            method, (problem, graph) = make("method", METHODS, self.method), built
            self._resolve(problem)
        same = ("rounds", "seed", "record_every", "checkpoint_every", "target", "stop_at_target", "tolerance")
        given = {name: getattr(self, name) for name in (*same, "deterministic")}
        given |= {n: schedules.from_spec(getattr(self, n)) for n in ("participation", "local_steps", "links")}
        given |= {"warmup": self.warmup, "messages": self.messages, "config": self.to_toml(), "transport": transport}
        return simulate(method, problem, graph, **given, directory=directory, resume=resume, **options)


def parse(text: str, source: str = "the experiment") -> dict[str, Any]:
    """TOML text as a dictionary, or one clear line."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CadenError(f"{source} is not valid TOML: {error}.") from None


def assign(table: dict[str, Any], setting: str) -> None:
    """Apply `key.key=value`; the value is read as TOML, else as a plain string."""
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
    """An experiment from a file (or none) and `key=value` settings, over the default one."""
    given: dict[str, Any] = {}
    if path is not None:
        try:
            given = parse(path.read_text(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise CadenError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None
    for setting in settings:
        assign(given, setting)
    for key in given:
        require_choice("key", key, Experiment.model_fields)
    merged = {k: dict(v) if isinstance(v, dict) else v for k, v in defaults.items()}
    for key, value in given.items():
        table = merged.get(key)
        if isinstance(table, dict) and isinstance(value, dict):
            # Another name brings its own parameters: the defaults' parameters belong to the default name.
            same = value.get("name", table.get("name")) == table.get("name")
            kept = table if same else {k: table[k] for k in ("agents",) if k in table}
            merged[key] = {**kept, **value}
        else:
            merged[key] = value
    try:
        found = Experiment.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        raise CadenError(f"`{first['loc'][0]}` ({where}): {first['msg']}, got {first['input']!r}.") from None
    require_integer("seed", found.seed)
    for name in found.warmup:
        require_choice("key", f"warmup.{name}", [f"warmup.{field}" for field in Warmup._fields])
    Messages.from_spec(found.messages)
    for kind, registry in REGISTRIES.items():
        factory(kind, registry, getattr(found, kind), HIDDEN)
    return found


def device_of(name: str) -> torch.device:
    """A torch device by name, or one clear line."""
    try:
        torch.zeros(1, dtype=torch.float64, device=name).item()  # the small algebra of L-BFGS needs float64
        return torch.device(name)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise CadenError(f"`device` {name!r} is not available here: {str(error).splitlines()[0]}") from None
