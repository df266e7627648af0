"""`Agent`: CADEN and other methods inside a training loop of your own.

The user's loop is a local solver. A method asks its local solver for a few steps on f_i(v) + slope.(v - x) +
rho/2 |v - x|^2, and here these are the steps of the user's optimizer: hooks add the method's part to the gradients, and
after `every` steps the new parameters go back to the method, which exchanges rows and updates its duals.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from caden.core import LocalSolver, Method, Problem
from caden.engine.checkpoint import Part
from caden.engine.history import Result
from caden.engine.options import Conditions, Saving
from caden.engine.process import deterministic_mode
from caden.engine.recorder import Recorder
from caden.engine.run_directory import RunDirectory
from caden.errors import CadenError, require_choice
from caden.experiments.config import Experiment, experiment
from caden.experiments.peer import run_peer
from caden.graphs import Graph, as_graph, exponential
from caden.methods import METHODS
from caden.networks import cluster
from caden.networks.peers.fleet import Fleet
from caden.networks.peers.transports import Free, Lockstep
from caden.networks.transport import Overlapped, Transport
from caden.own_loop import _saved
from caden.own_loop._loop import Handoff, OwnLoop, own_solver
from caden.own_loop._parameters import Parameters
from caden.own_loop._ranks import WITH_SGD, Job, run_rank, state_of
from caden.own_loop._steps import Every, Steps
from caden.registry import make

WITH_SOLVER = ("adapd", "caden", "dinno", "dpsgd", "fedadmm", "local", "radmm")


class Agent:
    """One agent of a network, whose local steps are those of a training loop of your own.

    Under torchrun there is one agent per process; with `fleet`, this is a peer as of `caden peer`.

    Args:
        model, optimizer: yours. Parameters that the optimizer lacks or that need no gradient are left alone.
        method: a name ("caden", "radmm", "adapd", "dinno", "fedadmm", "dpsgd", "local", "led", "kgt"), or a function
            solver=... -> Method. Its parameters are keywords of `Agent`, for example `mu_z=0.1`.
        every: length of a round: a number of steps, seconds as "30s", or "auto": until more steps would not help (for
            full gradients).
        graph: who talks to whom; by default the exponential graph.
        fleet, agent: fleet file and number of this agent. Method, graph, rounds and so on are then those of the file.
        rounds: end after so many; by default when a loop calls `finish`.
        seed, participation, messages: as for `caden.simulate`.
        overlap: rows travel while the next steps are made, and are used one round later.
        directory: where to write history and checkpoints; if it has a checkpoint, continue from there.
        record_every, checkpoint_every: rounds between two rows of the history, and between two checkpoints.
        buffers: "mean": `finish` averages the model's buffers (such as running statistics) over the ranks; "own": not.
        hooks: False: call `before_step` and `after_step` yourself, around the optimizer's step.
        deterministic: one thread and deterministic kernels, so that results are bit-identical.

    The attributes `round` and `step` say what the next gradient is for, `steps` how many were made; `history` is a
    DataFrame with one row per recorded round, `waited` the seconds spent waiting for others.

    Example:
        agent = caden.Agent(model, optimizer, method="caden", every=20, mu_z=0.05)
        for inputs, targets in loader:
            loss = loss_fn(model(inputs), targets)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        agent.finish()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        method: str | Callable[..., Method] | None = None,
        every: int | str | None = None,
        *,
        graph: Any = None,
        fleet: str | Path | None = None,
        agent: int | None = None,
        rounds: int | None = None,
        seed: int = 0,
        participation: Any = 1.0,
        messages: Mapping[str, Any] | None = None,
        overlap: bool = False,
        directory: str | Path | None = None,
        record_every: int = 10,
        checkpoint_every: int = 25,
        buffers: str = "mean",
        hooks: bool = True,
        deterministic: bool = False,
        **parameters: Any,
    ):
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise CadenError("`Agent` takes a model and an optimizer of PyTorch, in this order.")
        require_choice("buffers", buffers, ("mean", "own"))
        self._model, self._optimizer, self._average_buffers = model, optimizer, buffers == "mean"
        self._handoff, self._stop, self._open = Handoff(), threading.Event(), ExitStack()
        self._recorder: Recorder | None = None
        self._result: Result | None = None
        self._mean: Tensor | None = None
        self._finished = self._warned = False
        self._require_sgd: Callable[[], None] | None = None  # for methods whose duals are scaled by their own step
        self._parameters = Parameters(model, optimizer)
        self._count = _number_of_parameters(optimizer)
        if fleet is not None:
            given = {"graph": graph, "rounds": rounds, "method": method, "messages": messages, **parameters}
            changed = {"seed": seed != 0, "participation": participation != 1.0, "overlap": overlap}
            changed |= {"deterministic": deterministic, "record_every": record_every != 10}
            changed["checkpoint_every"] = checkpoint_every != 25
            given |= {name: True for name, is_set in changed.items() if is_set}
            work = self._join_fleet(Path(fleet), agent, every, given, directory)
        else:
            if agent is not None:
                raise CadenError("`agent` is for a fleet; under torchrun rank i is agent i.")
            self._every = Every.parse(20 if every is None else every)
            spec = "caden" if method is None else method
            text = _configuration(spec, parameters, every, seed, participation, messages, overlap)
            resume = directory is not None and Path(directory).exists()
            if directory is not None and resume:
                _require_same(Path(directory), text)
            conditions = Conditions(participation, self._every.local_steps, messages)  # type: ignore[arg-type]
            saving = Saving(directory, resume, record_every, "auto", checkpoint_every, text, picture=False)
            self._open.enter_context(deterministic_mode(deterministic))
            work = self._join_job(Job(spec, parameters, graph, conditions, saving, seed, rounds, overlap))
        self._steps = Steps(self._parameters, self._handoff, self._every)
        self._handles = [*self._register()] if hooks else []
        atexit.register(self._remind)
        self._handoff.start(work)
        try:
            self._steps.receive()
        except BaseException:
            self._close()
            raise

    # Joining.

    def _join_job(self, job: Job) -> Callable[[], None]:
        """Prepare the run of a rank under torchrun, and return what its thread does."""
        job.require_consistent()
        ranks: Transport = cluster.join(one_each=True)
        self.agent, self.agents = ranks.rank, ranks.world
        graph = exponential(ranks.world) if job.graph is None else as_graph(job.graph)
        if graph.agents != ranks.world:
            raise CadenError(f"The graph has {graph.agents} agents, but the job has {ranks.world} processes.")
        on_gpu = self._parameters.device.type == "cuda" and torch.distributed.get_backend() == "nccl"
        device = self._parameters.device if on_gpu else torch.device("cpu")
        method, problem = self._build(job.method, job.parameters, device)
        problem.agree = lambda values: ranks.reduce(values, "max")
        transport = Overlapped(ranks) if job.overlap else ranks

        def work() -> None:
            self._result = run_rank(job, method, problem, graph, transport, self)

        return work

    def _join_fleet(
        self, file: Path, agent: int | None, every: int | str | None, given: dict[str, Any], directory: Any
    ) -> Callable[[], None]:
        """Prepare the run of a peer, and return what its thread does."""
        for name, value in given.items():
            if value is not None:
                raise CadenError(f"`{name}` is set in the fleet file: remove it here.")
        if agent is None:
            raise CadenError("`agent` must be the number of this agent in the fleet.")
        config = experiment(file)
        fleet = Fleet.of(config)
        if self._parameters.dtype not in (torch.float32, torch.float64):
            raise CadenError(f"Peers exchange float32 or float64, got {self._parameters.dtype}.")
        steps = config.local_steps if every is None else every
        if not isinstance(steps, int | str | None):
            raise CadenError("`local_steps` must be a number here: schedules are for simulations.")
        self._every = Every.parse(20 if steps is None else steps)
        config.local_steps = "auto" if self._every == Every() else self._every.steps or 1
        config.warmup = {"steps": 0}  # the loop's own steps are all there is
        self.agent, self.agents = agent, len(fleet.endpoints)
        self._fleet_rounds = config.rounds if fleet.mode == "lockstep" else None
        folder = Path("runs") / fleet.name / f"agent-{agent}" if directory is None else Path(directory)
        self._open.enter_context(deterministic_mode(config.deterministic))

        def work() -> None:
            self._result = run_peer(config, self.agent, folder, self._stop, None, file.parent, owner=self)

        return work

    def build(self, config: Experiment, graph: Graph) -> tuple[Method, Problem]:
        """Return the method and the problem of a peer."""
        table = {k: v for k, v in config.method.items() if k not in ("name", "solver")}
        return self._build(config.method["name"], table, torch.device("cpu"))

    def _build(
        self, spec: str | Callable[..., Method], parameters: dict[str, Any], device: torch.device
    ) -> tuple[Method, OwnLoop]:
        as_oracle = spec in WITH_SGD
        problem = OwnLoop(self._parameters, self._handoff, device, as_oracle)
        problem.save, problem.load = self._save, self._load
        solver = own_solver(self._handoff, problem, fresh=self._every != Every())
        if as_oracle:
            self._require_sgd = partial(_require_sgd, self._optimizer, str(spec), parameters, self._every)
            self._require_sgd()
        return _method(spec, parameters, None if as_oracle else solver), problem

    def attach(self, recorder: Recorder) -> None:
        """Keep the recorder of the run, which has the history."""
        self._recorder = recorder
        if isinstance(self._transport, Free):
            self._transport.mark = float(self._parameters.digest())

    @property
    def _transport(self) -> Transport:
        assert self._recorder is not None
        return self._recorder.run.network.transport

    def introduce(self) -> None:
        """Compare the models of all agents before the run begins."""
        model, transport = self._parameters.digest(), self._transport
        start = hashlib.sha256(self._parameters.row().cpu().numpy().tobytes()).digest()[:3]
        values = [float(sign * number) for number in (model, int.from_bytes(start, "big")) for sign in (1, -1)]
        if isinstance(transport, Free):
            return  # each message says it, see `attach`
        largest = transport.agree(0, *values) if isinstance(transport, Lockstep) else transport.reduce(values, "max")
        if largest[0] != -largest[1]:
            raise CadenError("The agents have different models: names and shapes of all parameters must be the same.")
        if largest[2] != -largest[3] and self.agent == 0:
            warnings.warn(
                "The agents begin with different parameters, which can make the mean of networks useless: seed torch "
                "alike before the model is made.",
                stacklevel=2,
            )

    def conclude(self, mean: Tensor) -> None:
        """Keep the mean of all peers for `finish`."""
        self._mean = mean

    # The loop.

    def _register(self) -> list[Any]:
        before, after = self._optimizer.register_step_pre_hook, self._optimizer.register_step_post_hook
        return [before(self._hook_before), after(self._hook_after)]

    def _hook_before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):  # args[0] is the optimizer
            raise CadenError(
                "`optimizer.step(closure)` computes gradients after the method's part was added: call it without one, "
                "or use `hooks=False` and call `agent.before_step()` at the end of the closure."
            )
        last = next(reversed(optimizer._optimizer_step_pre_hooks.values()))
        if last != self._hook_before:
            raise CadenError(
                "A hook that was registered after the agent could change the gradients again: make the agent last."
            )
        self.before_step()

    def _hook_after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.after_step()

    def before_step(self) -> None:
        """Add the method's part to the gradients, right before the optimizer's step."""
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise CadenError(
                "A fused optimizer under GradScaler removes the scale inside its step, after the method's part was "
                "added: use `fused=False`."
            )
        if _number_of_parameters(self._optimizer) != self._count:
            raise CadenError("Parameters were added or thawed after the agent was made: make the agent last.")
        if self._require_sgd is not None:
            self._require_sgd()  # a scheduler may have changed the step
        if self._steps.over and not self._warned and not self._finished:
            self._warned = True
            warnings.warn("The run has ended, so further steps are not exchanged: call `finish`.", stacklevel=4)
        self._steps.before()

    def after_step(self) -> None:
        """Count a step, and after the last one of a round hand the parameters to the method."""
        self._steps.after()

    def skip(self) -> None:
        """End this round now, with the steps made so far: the others do not wait for more."""
        if self._require_sgd is not None:
            raise CadenError("This method needs equally many steps in all rounds, so none can be skipped.")
        if self._steps.task is not None and self._steps.task.kind == "solve":
            self._steps.hand_in()

    @property
    def round(self) -> int:
        """The round of the next step; -1 while "auto" measures, and the number of rounds after the end."""
        return self._steps.round

    @property
    def step(self) -> int:
        """The number of the next step in its round."""
        return self._steps.count

    @property
    def steps(self) -> int:
        """How many steps have been made, also before a restart."""
        return self._steps.total

    @property
    def waited(self) -> float:
        """Seconds spent waiting for the method and its messages."""
        return self._steps.waited

    @property
    def is_over(self) -> bool:
        """Whether the run has ended: further steps are not exchanged."""
        return self._steps.over

    @property
    def history(self) -> pd.DataFrame:
        """One row per recorded round."""
        return pd.DataFrame(self._recorder.rows if self._recorder is not None else [])

    # The end, and checkpoints.

    def finish(self) -> None:
        """End the run, and load the mean of all agents' parameters into the model.

        Under torchrun and in lockstep that is the mean of all; for a free-running peer, of those that finish within
        `fleet.patience` seconds.
        """
        if self._finished:
            return
        planned = getattr(self, "_fleet_rounds", None)
        if not self._steps.over and planned is not None:
            raise CadenError(
                f"The loop ended in round {self.round}, but in lockstep all agents make {planned} rounds: make more "
                "steps, or change `rounds` in the fleet file."
            )
        if not self._steps.over:
            self._steps.hand_in(ended=True)
        self._handoff.raise_error()
        assert self._recorder is not None and self._result is not None
        row = self._result.mean if self._mean is None else self._mean
        self._parameters.write(row.reshape(1, -1))
        transport = self._transport
        if self._average_buffers and transport.world > 1:
            for buffer in self._model.buffers():
                if buffer.is_floating_point():
                    rows = transport.gather(buffer.detach().reshape(1, -1).to(self._recorder.run.problem.device))
                    buffer.copy_(rows.mean(0).reshape(buffer.shape))
        self._close()

    def _close(self) -> None:
        self._finished = True
        for handle in self._handles:
            handle.remove()
        self._open.close()
        atexit.unregister(self._remind)

    def _remind(self) -> None:
        self._open.close()
        if not self._finished:
            warnings.warn("`agent.finish()` was not called: the model is this agent's own, not the mean.", stacklevel=2)

    def _save(self) -> dict[str, Tensor]:
        saved = _saved.save(self._model, self._optimizer)
        return {**saved, "steps": torch.tensor(self._steps.total), "model": torch.tensor(self._parameters.digest())}

    def _load(self, saved: dict[str, Tensor]) -> None:
        if int(saved["model"]) != self._parameters.digest():
            raise CadenError("The checkpoint belongs to another model: names or shapes of its parameters differ.")
        _saved.load(saved, self._model, self._optimizer)
        self._steps.total = int(saved["steps"])

    def state_dict(self) -> dict[str, Any]:
        """Return the agent's part of a checkpoint; model and optimizer are for you to save."""
        if self._recorder is None or self._steps.task is None or self._steps.task.kind != "solve":
            raise CadenError("There is nothing to save before the first round and after the last.")
        return {**state_of(self._recorder), "loop": self._steps.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; under torchrun, all ranks from that of the same step."""
        if self._recorder is None or self._transport.world < 2 or self._steps.task is None:
            raise CadenError("Only ranks under torchrun load a state; a peer continues from its directory.")
        self._handoff.answer(Part(dict(state["tensors"]), dict(state["numbers"]), {}))
        self._steps.receive()
        self._steps.load(state["loop"])


def _number_of_parameters(optimizer: Optimizer) -> int:
    """Return how many tensors an optimizer trains."""
    return sum(p.requires_grad for group in optimizer.param_groups for p in group["params"])


def _configuration(spec: Any, parameters: dict[str, Any], *rest: Any) -> str:
    """Return what determines a run, as text."""
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", type(spec).__name__)
    return tomli_w.dumps({"agent": {"method": name, "options": repr(sorted(parameters.items())), "rest": repr(rest)}})


def _require_same(directory: Path, text: str) -> None:
    """Require that a directory belongs to an unfinished run with the same settings."""
    run_dir, saved = RunDirectory(directory), directory / "config.toml"
    if run_dir.complete():
        raise CadenError(f"The run in {directory} has finished: choose another directory.")
    if saved.is_file() and saved.read_text() != text:
        raise CadenError(f"{directory} belongs to a run with other settings: choose another directory.")


def _method(spec: str | Callable[..., Method], parameters: dict[str, Any], solver: LocalSolver | None) -> Method:
    """Return the method with the user's loop as its local solver, if it takes one."""
    own = {} if solver is None else {"solver": solver}
    if not isinstance(spec, str):
        made = spec(**own, **parameters)
        if not isinstance(made, Method):
            raise CadenError(f"`method` must be a name or a function that returns a Method, got {spec!r}.")
        return made
    if spec in METHODS and spec not in (*WITH_SOLVER, *WITH_SGD):
        raise CadenError(
            f"{spec!r} asks for gradients at points of its own, which a training loop cannot give: choose one of "
            f"{', '.join(sorted((*WITH_SOLVER, *WITH_SGD)))}."
        )
    method: Method = make("method", METHODS, {"name": spec, **parameters, **own})
    return method


def _require_sgd(optimizer: Optimizer, method: str, parameters: dict[str, Any], every: Every) -> None:
    """Require what the duals of K-GT and LED assume: plain SGD with their own step, equally many steps for all."""
    alpha = parameters.get("alpha", inspect.signature(METHODS[method]).parameters["alpha"].default)
    plain = all(
        group["lr"] == alpha and not any(group.get(k) for k in ("momentum", "weight_decay", "maximize"))
        for group in optimizer.param_groups
    )
    if type(optimizer) is not torch.optim.SGD or not plain:
        raise CadenError(
            f"{method} scales its duals by its own step: use torch.optim.SGD with `lr = alpha` ({alpha:g}), without "
            "momentum, weight decay and schedulers."
        )
    if every.steps is None:
        raise CadenError(f"{method} needs equally many steps in all rounds: `every` must be a number of steps.")
