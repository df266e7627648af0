"""A plan of runs: section 4 of the paper, and experiments beyond it.

The setting "as in the paper". The paper gives the network (784-128-10 without biases, from d = 101,632), MNIST at
random over 20 agents, a random graph (37 edges, from the communication counts, all multiples of 74), 500 rounds, 5
local steps, the local training before round 0 and the accuracies and counts of Table 1. It does not give mu_z, mu_y,
any step size, the mixing matrix, the activation, the memory of L-BFGS or whether gradients are full. The following
rules fill the gaps. They have one free number, c, and were fixed before any run used them:

    L        the largest |change of gradient| / |change of x| of the local training, all agents, float64
    all      full gradients, ReLU, cross-entropy, pixels of zero mean and unit deviation, the same start
    CADEN    mu_z = c L, mu_y = mu_z (the theorem's mu_y diverges), relax = 1/2; L-BFGS with 10 pairs, restarted in
             every round as in Algorithm 1; c is fitted to the published number: CADEN takes about 117 rounds to 93 %
    CADEN-GD the same mu_z and mu_y; 5 gradient steps of 1 / (L + mu_z d_i), the subproblem's own smoothness
    ADAPD    1 / eta = mu_z times the mean degree, which makes its subproblem as stiff as CADEN's; 5 steps of
             1 / (L + 1 / eta); Metropolis weights
    GT       ATC form, Metropolis weights, step 1 / L
    -Red     5 local steps in the first 100 rounds, then 1
"""

import json
import math
from typing import Any, NamedTuple

from caden.curvature import descend
from caden.engine.run_directory import Record
from caden.engine.warmup import start_point
from caden.experiments.config import Experiment, experiment
from caden.experiments.store import RunStore, digest
from caden.experiments.tune import Tuned, tune

MEAN_DEGREE = 2 * 37 / 20

# Table 1 of the paper: rounds to 93 % (its communications / 74) and highest accuracy in 500 rounds.
PUBLISHED: dict[str, tuple[int | None, float]] = {
    "CADEN": (117, 0.9499),
    "CADEN-Red": (118, 0.9482),
    "ADAPD": (395, 0.9335),
    "CADEN-GD": (337, 0.9337),
    "CADEN-GD-Red": (456, 0.9304),
    "GT": (None, 0.9234),
}
METHODS = {"CADEN": "caden", "CADEN-GD": "caden_gd", "ADAPD": "adapd", "GT": "gt"}
RIVALS = {"Exact diffusion": "exact_diffusion", "LED": "led", "K-GT": "kgt", "GT-L-BFGS": "gt_lbfgs"}
LEVELS = (0.8, 0.5, 0.2)


class Scale(NamedTuple):
    """The size of the plan."""

    data: str = "mnist"
    other: str = "fashion_mnist"
    target: float = 0.93
    other_target: float = 0.83
    samples: int | None = None  # of the training set; None: all
    test_samples: int | None = None
    hidden: int = 128
    rounds: int = 500
    short: int = 100  # rounds of the runs beyond the paper; also the round after which "-Red" does less local work
    wanted: int = 117  # rounds to the target to which CADEN is fitted
    start: float = 0.5  # the first c to try
    trials: int = 18
    trial_rounds: int = 20
    trial_samples: int = 12_000
    validation: int = 3_000
    seeds: tuple[int, ...] = (1, 2)


FULL = Scale()
QUICK = Scale(  # a tenth of the data and of the rounds, a quarter of the hidden units, less tuning
    target=0.9,
    other_target=0.8,
    samples=6_000,
    test_samples=1_000,
    hidden=32,
    rounds=50,
    short=10,
    wanted=22,
    start=0.0166,
    trials=3,
    trial_rounds=3,
    trial_samples=2_000,
    validation=1_000,
    seeds=(1,),
)


class Plan:
    """The parts of the reproduction; each returns {name: record} and gets its runs from the store."""

    def __init__(self, store: RunStore, scale: Scale = FULL):
        self.store, self.scale = store, scale
        self._tuned: dict[str, Tuned] = {}

    @property
    def records(self) -> list[Record]:
        """All runs requested so far."""
        return list(self.store.seen.values())

    def problem_of(self, part: str) -> dict[str, Any]:
        """Return the problem settings that a part changes."""
        if part == "fashion":
            return {"data": self.scale.other}
        return {"partition": {"name": "dirichlet", "alpha": 0.3}} if part == "skewed" else {}

    def base(self, rounds: int, **settings: Any) -> Experiment:
        """Return the paper's problem, graph and start with `settings`, as in an experiment file."""
        size = {k: v for k in ("samples", "test_samples") if (v := getattr(self.scale, k)) is not None}
        size |= {} if self.scale.hidden == 128 else {"hidden": self.scale.hidden}
        problem = {"data": self.scale.data, **size, **settings.pop("problem", {})}
        table = experiment().model_dump(exclude_defaults=True)
        table["problem"] |= problem
        return Experiment.model_validate(
            {**table, "rounds": rounds, "local_steps": 5, "target": self.scale.target, "record_every": 5, **settings}
        )

    # As in the paper.

    def smoothness(self) -> dict[str, float]:
        """Estimate L along the local training: 20 steps of 0.1, then 10 of 1e-7, in float64 and in float32."""
        config = self.base(0)
        file = self.store.folder / f"smoothness-{digest(config)}.json"
        if not file.exists():
            estimates: dict[str, float] = {}
            for dtype in ("float64", "float32"):
                problem, _ = self.store.build(config.model_copy(update={"dtype": dtype}))
                _, ratios = descend(problem, start_point(problem), ((20, 0.1), (10, 1e-7)))
                coarse, fine = (float(ratio.max()) for ratio in ratios)
                estimates |= {f"20 steps of 0.1, {dtype}": coarse, f"10 steps of 1e-7, {dtype}": fine}
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(estimates, indent=1) + "\n")
        values: dict[str, float] = json.loads(file.read_text())
        return values

    def rules(self, c: float) -> dict[str, dict[str, Any]]:
        """Return the methods' parameters by the rules in the module's docstring."""
        L = max(v for k, v in self.smoothness().items() if "float64" in k)
        mu_z, descent = c * L, {"name": "gd", "curvature": L}
        return {
            "CADEN": {"name": "caden", "mu_z": mu_z, "solver": {"name": "lbfgs", "carry": False}},
            "CADEN-GD": {"name": "caden", "mu_z": mu_z, "solver": descent},
            "ADAPD": {"name": "adapd", "eta": 1 / (mu_z * MEAN_DEGREE), "solver": descent},
            "GT": {"name": "gt", "alpha": 1 / L},
        }

    def fit(self) -> tuple[float, dict[float, int | None]]:
        """Return the c that brings CADEN's rounds to the target nearest to `wanted`, and the rounds of each c tried."""
        wanted, c, tried = self.scale.wanted, self.scale.start, dict[float, int | None]()
        for _ in range(6):
            config = self.base(3 * wanted, method=self.rules(c)["CADEN"], stop_at_target=True)
            took = self.store.run("fit c:", {f"c = {c:g}": config})[f"c = {c:g}"].summary["rounds_to_target"]
            tried[c] = took
            if took is not None and abs(took - wanted) <= max(1, 0.03 * wanted):
                break
            c = float(f"{_next(tried, wanted):.3g}")
            if c in tried:
                break
        return min(tried, key=lambda c: abs(math.log((tried[c] or 3 * wanted) / wanted))), tried

    def fig1(self) -> dict[str, Record]:
        """Run Fig. 1 a and b: CADEN, CADEN-GD, ADAPD and GT."""
        c, _ = self.fit()
        rules = self.rules(c)
        return self.store.run("fig 1:", {n: self.base(self.scale.rounds, method=m) for n, m in rules.items()})

    def fig2a(self) -> dict[str, Record]:
        """Run Fig. 2 a: less local work after the first rounds, and just enough in all of them."""
        c, _ = self.fit()
        less = {"name": "switch", "first": 5, "then": 1, "at": self.scale.short}
        enough = {"name": "auto", "most": 5}
        plans = {}
        for name in ("CADEN", "CADEN-GD"):
            method = self.rules(c)[name]
            plans[name] = self.base(self.scale.rounds, method=method)
            plans[f"{name}-Red"] = self.base(self.scale.rounds, method=method, local_steps=less)
            plans[f"{name}, auto"] = self.base(self.scale.rounds, method=method, local_steps=enough)
        return self.store.run("fig 2a:", plans)

    def fig2b(self) -> dict[str, Record]:
        """Run Fig. 2 b: participation, with the exact and with the paper's dual rule."""
        c, _ = self.fit()
        method, rounds = self.rules(c)["CADEN"], self.scale.rounds
        plans = {"100 %": self.base(rounds, method=method)}
        for level in LEVELS:
            for dual in ("exact", "paper"):
                config = self.base(rounds, method={**method, "dual": dual}, participation=level)
                plans[f"{level:.0%}, {dual}".replace("%", " %")] = config
        return self.store.run("fig 2b:", plans)

    # Tuned.

    def tuned(self, method: str, **problem: Any) -> Tuned:
        """Tune a method with the common budget, on held-out training samples."""
        scale = self.scale
        target = scale.other_target if problem.get("data") == scale.other else scale.target
        size = {"samples": scale.trial_samples, "validation": scale.validation}
        config = self.base(scale.trial_rounds, problem={**problem, **size}, target=target)
        key = f"{method} {digest(config)}"
        if key not in self._tuned:
            self._tuned[key] = tune(self.store, config, method, scale.trials, scale.trial_rounds)
        return self._tuned[key]

    def with_tuned(
        self, names: dict[str, str], rounds: int, title: str, seed: int = 0, **problem: Any
    ) -> dict[str, Record]:
        """Run methods with their tuned parameters on the full problem."""
        target = self.scale.other_target if problem.get("data") == self.scale.other else self.scale.target
        plans = {}
        for name, method in names.items():
            table = {"name": method, **self.tuned(method, **problem).parameters}
            plans[name] = self.base(rounds, method=table, problem=problem, seed=seed, target=target)
        return self.store.run(title, plans)

    def compare(self) -> dict[str, Record]:
        """Run the paper's four methods, tuned, for as many rounds as in the paper."""
        return self.with_tuned(METHODS, self.scale.rounds, "tuned:")

    # Beyond the paper, all tuned.

    def seeds(self) -> dict[str, list[Record]]:
        """Run with other data splits, graphs and starts."""
        records: dict[str, list[Record]] = {name: [] for name in METHODS}
        for seed in self.scale.seeds:
            for name, record in self.with_tuned(METHODS, self.scale.short, f"seed {seed}:", seed).items():
                records[name].append(record)
        return records

    def fashion(self) -> dict[str, Record]:
        """Run on Fashion-MNIST."""
        return self.with_tuned(METHODS, self.scale.short, "fashion:", **self.problem_of("fashion"))

    def skewed(self) -> dict[str, Record]:
        """Run with classes spread unevenly: Dirichlet with parameter 0.3."""
        return self.with_tuned(METHODS, self.scale.short, "skewed:", **self.problem_of("skewed"))

    def rivals(self) -> dict[str, Record]:
        """Run methods that the paper does not compare with."""
        return self.with_tuned({"CADEN": "caden", **RIVALS}, self.scale.short, "rivals:")

    def ablations(self) -> dict[str, dict[str, Record]]:
        """Change one setting of tuned CADEN at a time."""
        best, short = {"name": "caden", **self.tuned("caden").parameters}, self.scale.short
        relax = {f"relax {r}": self.base(short, method={**best, "relax": r}) for r in (0.5, 0.7, 0.9)}
        fresh = {"name": "lbfgs", "carry": False}
        memory = {
            "pairs carried over rounds": self.base(short, method=best),
            "pairs dropped every round": self.base(short, method={**best, "solver": fresh}),
        }
        half = {
            f"50 %, {dual}": self.base(short, method={**best, "relax": 0.5, "dual": dual}, participation=0.5)
            for dual in ("exact", "paper")
        }
        return {
            "relax": self.store.run("relaxation:", relax),
            "memory": self.store.run("memory:", memory),
            "dual": self.store.run("dual rules:", half),
        }


def _next(tried: dict[float, int | None], wanted: int) -> float:
    """Return the next c to try: interpolated on a log scale if c on both sides have been tried, else extrapolated."""
    rounds = {c: took or 3 * wanted for c, took in tried.items()}
    below = [c for c, took in rounds.items() if took < wanted]
    above = [c for c, took in rounds.items() if took >= wanted]
    if below and above:
        a, b = max(below), min(above)
        share = math.log(wanted / rounds[a]) / math.log(rounds[b] / rounds[a])
        return float(a * (b / a) ** min(max(share, 0.1), 0.9))
    last = list(rounds)[-1]
    return last * min(max(wanted / rounds[last], 0.25), 4)
