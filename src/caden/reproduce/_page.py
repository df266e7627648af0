"""The page of the reproduction: three findings, one table of the methods, and the sections of the parts."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import pandas as pd

from caden.engine.figures import Figure
from caden.engine.run_directory import Record
from caden.engine.statistics import median
from caden.engine.warmup import start_point
from caden.report import Report, Section, Table, graph_of, parameters, provenance, results, running_mean, setting
from caden.reproduce._plan import METHODS, PUBLISHED, RIVALS, Plan

PARTS = {
    "fig1": "as in the paper: relative error and accuracy of CADEN, CADEN-GD, ADAPD and GT",
    "fig2": "as in the paper: less local work (a), participation (b)",
    "table1": "the cost of 93 %, beside the published numbers; as in the paper and tuned",
    "tuned": "the same four methods after tuning with equal budgets",
    "seeds": "tuned, more seeds",
    "fashion": "tuned, on Fashion-MNIST",
    "skewed": "tuned, with classes spread unevenly",
    "rivals": "tuned, methods that the paper does not compare with",
    "ablations": "over-relaxation, carried memory, the two dual rules",
}


_NEEDS = {
    "fig1": ("fit", "four"),
    "fig2": ("fit", "red", "levels"),
    "table1": ("fit", "four", "red", "tuning", "tuned"),
    "tuned": ("tuning", "tuned"),
    "seeds": ("tuning", "tuned", "seeds"),
    "fashion": ("tuning fashion", "short fashion"),
    "skewed": ("tuning skewed", "short skewed"),
    "rivals": ("tuning", "tuning rivals", "short rivals"),
    "ablations": ("tuning", "ablations"),
}
_EFFORTS = {"rounds": "rounds", "communications": "communications", "gradients": "gradient evaluations"}


def _needs(parts: Sequence[str]) -> list[str]:
    """Return the groups of runs that some parts need, each once."""
    return list(dict.fromkeys(need for part in parts for need in _NEEDS[part]))


def estimate(plan: Plan, parts: Sequence[str]) -> float:
    """Estimate the seconds that the parts take from scratch, from the time of one gradient on this machine.

    Vector work and measuring add about 0.7 times the time of a gradient. A run adds 21 gradients of training before
    round 0 and half a second of files. Trials run about half of their rounds before they reach the target.
    """
    scale = plan.scale
    share = scale.trial_samples / (scale.samples or 60_000)
    four, four_short = (4, 16 * scale.rounds), (4, 16 * scale.short)
    costs = {  # runs and their gradients
        "fit": (2, 2 * 5 * scale.wanted),
        "four": four,
        "red": (2, 2 * (5 * scale.short + scale.rounds)),
        "levels": (6, 2 * 1.5 * 5 * scale.rounds),
        "tuned": four,
        "seeds": (4 * len(scale.seeds), 16 * scale.short * len(scale.seeds)),
        "ablations": (7, 5 * 6 * scale.short),
    }
    tuning = (6 * scale.trials * share, 4 * 4 * 0.5 * 3 * scale.trials * scale.trial_rounds * share)
    needed = [costs.get(need, tuning if need.startswith("tuning") else four_short) for need in _needs(parts)]
    problem, _ = plan.store.build(plan.base(0))
    x = start_point(problem)
    problem.value_and_grad(x)
    began = time.perf_counter()
    problem.value_and_grad(x)
    gradient = time.perf_counter() - began
    return sum(1.7 * gradient * (gradients + 21 * runs) + 0.5 * runs for runs, gradients in needed)


def build(plan: Plan, parts: Sequence[str], command: str) -> Report:
    """Run the missing experiments and return the page about all of them."""
    sections = [section for part in parts for section in _SECTIONS[part](plan)]
    lead, findings = _at_a_glance(plan, parts), _findings(plan, parts)
    records, title = plan.records, "CADEN: the paper's experiments and more"
    graph = graph_of(records[0])
    return Report(title, findings, [*lead, *sections], setting(records, graph), graph, provenance(records, command))


def _at_a_glance(plan: Plan, parts: Sequence[str]) -> list[Section]:
    """Return the table of the methods: tuned with equal budgets if that was run, else as in the paper."""
    needs, target = _needs(parts), plan.scale.target
    if "tuned" in needs:
        runs, setting = plan.compare(), "Tuned with equal budgets"
    elif "four" in needs:
        runs, setting = plan.fig1(), "As in the paper"
    else:
        return []
    rows = []
    for name in sorted(runs, key=lambda n: _took(runs[n])):
        row = {"method": name}
        row |= {f"{effort} to {target:.0%}": _words(_took(runs[name], key)) for key, effort in _EFFORTS.items()}
        rows.append({**row, "highest accuracy": f"{runs[name].summary['best_accuracy']:.2%}"})
    note = (
        f"A communication is one model sent over one directed edge; GT makes two per directed edge and round. Gradient "
        f"evaluations are of one agent each and include those of the local training. The highest mean test accuracy "
        f"is that within {plan.scale.rounds} rounds."
    )
    return [Section("At a glance", [], [], [Table("glance", setting, pd.DataFrame(rows), note)])]


def _findings(plan: Plan, parts: Sequence[str]) -> list[str]:
    """Return the three main findings, as far as the parts cover them: tuned, as in the paper, participation."""
    needs, scale = _needs(parts), plan.scale
    findings = []
    if "tuned" in needs:
        findings.append(_verdict(plan.compare(), scale.target)[0])
    if "four" in needs:
        first, values = _ranking(plan.fig1(), "rounds")
        claim = _fewest(first, "rounds", scale.target)
        findings.append(f"In the paper's setting, as far as it is known, {claim} ({values}).")
    if "levels" in needs:
        runs = plan.fig2b()
        exact, paper = (runs[f"50 %, {dual}"].summary["accuracy"] for dual in ("exact", "paper"))
        findings.append(
            f"With half of the agents awake, accuracy after {scale.rounds} rounds is {exact:.2%} with the exact dual "
            f"rule and {paper:.2%} with the paper's, which does not converge to a stationary point."
        )
    return findings


def _command(plan: Plan, part: str) -> str:
    return f"caden reproduce {part}" + ("" if plan.scale.samples is None else " --quick")


def _lines(runs: Mapping[str, Record]) -> dict[str, list[pd.DataFrame]]:
    return {name: [record.history] for name, record in runs.items()}


def _two(
    plan: Plan, name: str, title: str, lines: dict[str, list[pd.DataFrame]], part: str, target: float
) -> list[Figure]:
    """Return the figures of relative error and accuracy of the same runs."""
    command = _command(plan, part)
    return [
        Figure(f"{name}a", f"{title}: relative error", "relative_error", lines, command=command),
        Figure(f"{name}b", f"{title}: accuracy", "accuracy", lines, target=target, command=command),
    ]


def _took(record: Record, key: str = "rounds") -> float:
    value = record.summary.get(f"{key}_to_target")
    return math.inf if value is None else float(value)


def _fig1(plan: Plan) -> list[Section]:
    runs, (c, tried), L = plan.fig1(), plan.fit(), plan.smoothness()
    text = [
        f"One number was fitted: c in mu_z = c L. With c = {c:g}, CADEN takes about {plan.scale.wanted} rounds to "
        f"{plan.scale.target:.0%} (rounds for each c tried: "
        + ", ".join(f"c = {k:g}: {_words(v)}" for k, v in tried.items())
        + "). Everything else follows from L by rules that were fixed before the runs: mu_y = mu_z; CADEN-GD takes 5 "
        "steps of 1 / (L + mu_z d_i); ADAPD has 1 / eta = mu_z times the mean degree and 5 steps of 1 / (L + 1 / eta); "
        "GT is in ATC form with step 1 / L; mixing by Metropolis weights; L-BFGS is restarted in every round. "
        "The fit uses the test accuracy, as the published number does.",
        "L is the largest |change of gradient| / |change of x| along the local training, in float64. Estimates: "
        + "; ".join(f"{k}: {v:.4g}" for k, v in L.items())
        + ". Steps of 1e-7 are below the resolution of float32, where the same formula measures rounding.",
    ]
    own = running_mean(runs["CADEN"].history)
    bound = own.assign(mean_lyapunov=own["mean_lyapunov"].iloc[0] / own["round"].clip(lower=1))
    mean = Figure(
        "fig-v",
        "Theorem 1: the running mean of V against 1 / T",
        "mean_lyapunov",
        {"CADEN, as in the paper": [own], "the slope of 1 / T": [bound]},
        log_x=True,
        command=_command(plan, "fig1"),
    )
    figures = _two(plan, "fig1", "Fig. 1, as in the paper", _lines(runs), "fig1", plan.scale.target)
    return [Section("Fig. 1, as in the paper", text, [*figures, mean], [_parameters("fig1-parameters", runs)])]


def _fig2(plan: Plan) -> list[Section]:
    less, part = plan.fig2a(), plan.fig2b()
    command = _command(plan, "fig2")
    target = plan.scale.target
    floor = (
        "By the paper's rule, an edge with one end awake moves the dual of that end only. The sum of the duals then "
        "leaves zero, and the limit solves sum grad f = -sum phi: a floor. The exact rule moves both ends of an edge "
        "by the half step of whichever end is awake."
    )
    return [
        Section(
            "Fig. 2a: less local work",
            [f"-Red: 5 local steps in the first {plan.scale.short} rounds, then 1. auto: at most 5, as many as help."],
            _two(plan, "fig2a-", "Fig. 2a", _lines(less), "fig2", target),
            [_results("fig2a-results", less)],
        ),
        Section(
            "Fig. 2b: participation",
            [floor],
            [
                *_two(plan, "fig2b-", "Fig. 2b", _lines(part), "fig2", target),
                Figure("fig2b-dual", "|sum phi|: zero with the exact rule", "dual_sum", _lines(part), command=command),
            ],
            [_results("fig2b-results", part)],
        ),
    ]


def _table1(plan: Plan) -> list[Section]:
    ours = {**plan.fig1(), **plan.fig2a()}
    tuned = plan.compare()
    rows = []
    for name, (rounds, best) in PUBLISHED.items():
        row = {"method": name, "paper: rounds": _words(rounds)}
        row["paper: communications"] = "-" if rounds is None else f"{74 * rounds:,}"
        row["paper: highest"] = f"{best:.2%}"
        for title, runs in (("as in the paper", ours), ("tuned", tuned)):
            end = runs[name].summary if name in runs else {}
            for key in _EFFORTS:
                value = end.get(f"{key}_to_target")
                row[f"{title}: {key}"] = "-" if value is None else f"{value:,}"
            row[f"{title}: highest"] = f"{end['best_accuracy']:.2%}" if end else "-"
        rows.append(row)
    note = (
        f"Rounds, communications and gradient evaluations (of one agent each, including the local training) to "
        f"{plan.scale.target:.0%} mean test accuracy, and the highest accuracy within {plan.scale.rounds} rounds. GT "
        f"makes two communications per directed edge and round. -Red was not run with tuned parameters: it differs "
        f"only after round {plan.scale.short}."
    )
    pairs = _pairs(ours, tuned)
    held = [sum(v == "confirmed" for v in pairs[column]) for column in ("as in the paper", "tuned")]
    asked = [sum(v != "" for v in pairs[column]) for column in ("as in the paper", "tuned")]
    text = (
        f"Of the paper's {asked[0]} pairwise orders of rounds to the target, {held[0]} hold in its own setting. Of the "
        f"{asked[1]} among the tuned methods, {held[1]} hold."
    )
    tables = [
        Table("table1", "Table 1", pd.DataFrame(rows), note),
        Table("pairs", "The paper's order, pair by pair (rounds to the target)", pairs),
    ]
    return [Section("Table 1", [text], [], tables)]


def _pairs(ours: Mapping[str, Record], tuned: Mapping[str, Record]) -> pd.DataFrame:
    """Return each pair of the published order, and whether our runs confirm it."""
    order = sorted(PUBLISHED, key=lambda n: PUBLISHED[n][0] or math.inf)

    def tie(a: float, b: float) -> bool:
        return a == b or (max(a, b) < math.inf and abs(a - b) <= 0.02 * max(a, b))

    def verdict(runs: Mapping[str, Record], a: str, b: str) -> str:
        if a not in runs or b not in runs:
            return ""
        first, second = _took(runs[a]), _took(runs[b])
        claimed = tie(*(PUBLISHED[n][0] or math.inf for n in (a, b)))
        if first == second == math.inf:
            return "neither reaches it"
        if tie(first, second):
            return "confirmed" if claimed else "equal within 2 %"
        return "confirmed" if first < second else "reversed"

    rows = []
    for a, b in combinations(order, 2):
        claim = f"{a} ({_words(PUBLISHED[a][0])}) before {b} ({_words(PUBLISHED[b][0])})"
        rows.append({"paper": claim, "as in the paper": verdict(ours, a, b), "tuned": verdict(tuned, a, b)})
    return pd.DataFrame(rows)


def _tuned(plan: Plan) -> list[Section]:
    runs, scale = plan.compare(), plan.scale
    text = [
        " ".join(_verdict(runs, scale.target)[1:]),
        f"Every method had {scale.trials} points of its search space for {scale.trial_rounds} rounds each, the best "
        f"third of them for {3 * scale.trial_rounds}, the best ninth for {9 * scale.trial_rounds}. A trial ends when "
        f"it reaches the target. Trials train on {scale.trial_samples:,} samples and measure on {scale.validation:,} "
        "others held out from the training set. Only the runs below use the test set.",
    ]
    tables = [_results("tuned-results", runs), _parameters("tuned-parameters", runs)]
    tables += [_trials(plan, name, method) for name, method in METHODS.items()]
    return [Section("Tuned", text, _two(plan, "tuned-", "Tuned", _lines(runs), "tuned", scale.target), tables)]


def _verdict(runs: Mapping[str, Record], target: float) -> list[str]:
    """Return the finding about tuned runs (who needs the fewest of what, and by how much), then the details."""
    winners: dict[tuple[str, ...], list[str]] = {}
    details = []
    for key, effort in _EFFORTS.items():
        first, values = _ranking(runs, key)
        winners.setdefault(tuple(first), []).append(effort)
        details.append(f"Fewest {effort} to {target:.0%}: {' and '.join(first) or 'no method reaches it'} ({values}).")
    claims = "; ".join(_fewest(first, _enumeration(efforts), target) for first, efforts in winners.items())
    finding = f"Tuned with equal budgets, {claims}."
    own = _took(runs["CADEN"], "communications")
    rival = min((n for n in runs if n != "CADEN"), key=lambda n: _took(runs[n], "communications"))
    ratio = own / _took(runs[rival], "communications")
    if 0 < ratio < math.inf:
        finding += f" CADEN needs {ratio:.2f} times the communications of the best of the other three, {rival}."
    best_first = sorted(runs, key=lambda n: -float(runs[n].summary["best_accuracy"]))
    highest = ", ".join(f"{n} {runs[n].summary['best_accuracy']:.2%}" for n in best_first)
    rounds = f"{_words(_took(runs['CADEN']))} tuned, {PUBLISHED['CADEN'][0]} in the paper"
    return [finding, *details, f"Rounds of CADEN to the target: {rounds}.", f"Highest accuracy: {highest}."]


def _ranking(runs: Mapping[str, Record], key: str) -> tuple[list[str], str]:
    """Return the runs that reach the target with the least effort, if any does, and the efforts of all as text."""
    took = {n: _took(r, key) for n, r in sorted(runs.items(), key=lambda item: _took(item[1], key))}
    least = min(took.values())
    first = [n for n, v in took.items() if v == least < math.inf]
    return first, ", ".join(f"{n} {_words(v)}" for n, v in took.items())


def _fewest(names: Sequence[str], efforts: str, target: float) -> str:
    """Return the clause that these runs need the fewest of some efforts."""
    if not names:
        return f"no method reaches {target:.0%}"
    return f"{_enumeration(names)} {'needs' if len(names) == 1 else 'need'} the fewest {efforts} to {target:.0%}"


def _enumeration(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _seeds(plan: Plan) -> list[Section]:
    others, first = plan.seeds(), plan.compare()
    short = plan.scale.short
    lines = {
        name: [h[h["round"] <= short] for h in (first[name].history, *(r.history for r in records))]
        for name, records in others.items()
    }
    groups = {name: [first[name], *records] for name, records in others.items()}
    took = {name: [t if t <= short else math.inf for t in map(_took, group)] for name, group in groups.items()}
    spread = ", ".join(f"{n} {' / '.join(map(_words, t))}" for n, t in took.items())
    rows = [
        {"method": n, **{f"seed {s}": _words(v) for s, v in enumerate(t)}, "median": median(t).text(), "n": len(t)}
        for n, t in took.items()
    ]
    text = [
        f"Rounds (of at most {short}) to {plan.scale.target:.0%} over {1 + len(plan.scale.seeds)} seeds: {spread}.",
        "Other data splits, graphs and starting weights; parameters as tuned on seed 0. Lines are medians, "
        "bands their 95 % bootstrap intervals.",
    ]
    table = Table("seeds", f"Rounds to {plan.scale.target:.0%}", pd.DataFrame(rows))
    return [Section("More seeds", text, _two(plan, "seeds-", "Seeds", lines, "seeds", plan.scale.target), [table])]


def _another(part: str, title: str, text: str) -> Callable[[Plan], list[Section]]:
    """Return the function that builds the section of a part with its own tuning."""

    def sections(plan: Plan) -> list[Section]:
        runs = getattr(plan, part)()
        target = next(iter(runs.values())).summary["target"]
        order = sorted(runs, key=lambda n: _took(runs[n], "communications"))
        took = ", ".join(f"{n} {_words(runs[n].summary['communications_to_target'])}" for n in order)
        result = f"Communications to {target:.0%}: {took}."
        names = {**METHODS, **RIVALS}
        tables = [_results(f"{part}-results", runs), _parameters(f"{part}-parameters", runs)]
        tables += [_trials(plan, name, names[name], part) for name in runs]
        return [Section(title, [result, text], _two(plan, f"{part}-", title, _lines(runs), part, target), tables)]

    return sections


def _ablations(plan: Plan) -> list[Section]:
    ablations, command = plan.ablations(), _command(plan, "ablations")
    titles = {
        "relax": ("Over-relaxation", "relax = 0.5 is the paper's value; all else is as tuned."),
        "memory": ("The memory of L-BFGS", "Pairs stay valid from round to round, because only grad f is stored."),
        "dual": ("The two dual rules, tuned, half of the agents awake", "relax = 0.5 in both."),
    }
    sections = []
    for name, runs in ablations.items():
        title, text = titles[name]
        figures = _two(plan, f"{name}-", title, _lines(runs), "ablations", plan.scale.target)
        if name == "dual":
            figures.append(Figure("dual-sum", "|sum phi|", "dual_sum", _lines(runs), command=command))
        took = ", ".join(f"{_words(r.summary['rounds_to_target'])} ({n})" for n, r in runs.items())
        ends = ", ".join(f"{r.summary['accuracy']:.2%} ({n})" for n, r in runs.items())
        result = f"Rounds to the target: {took}. Accuracy after {plan.scale.short} rounds: {ends}."
        sections.append(Section(title, [result, text], figures, [_results(f"{name}-results", runs)]))
    return sections


def _words(rounds: float | None) -> str:
    return "never" if rounds is None or rounds == math.inf else f"{rounds:,.0f}"


def _results(name: str, runs: Mapping[str, Record]) -> Table:
    return results(name, "Results", {n: [r] for n, r in runs.items()})


def _parameters(name: str, runs: Mapping[str, Record]) -> Table:
    return parameters({n: [r] for n, r in runs.items()}, name)


def _trials(plan: Plan, name: str, method: str, part: str = "tuned") -> Table:
    tuned = plan.tuned(method, **plan.problem_of(part))
    cells = tuned.trials.drop(columns=["relative_error"], errors="ignore").copy()
    cells["rounds_to_target"] = [_words(None if pd.isna(v) else v) for v in cells["rounds_to_target"]]
    cells["best_accuracy"] = [f"{v:.2%}" for v in cells["best_accuracy"]]
    cells["seconds"] = [f"{v:.1f}" for v in cells["seconds"]]
    return Table(f"{part}-trials-{method}", f"All trials of {name}", cells, f"Chosen: {tuned.parameters}")


_SECTIONS: dict[str, Callable[[Plan], list[Section]]] = {
    "fig1": _fig1,
    "fig2": _fig2,
    "table1": _table1,
    "tuned": _tuned,
    "seeds": _seeds,
    "fashion": _another("fashion", "Fashion-MNIST", "Tuned again on this data set, with the same budget."),
    "skewed": _another(
        "skewed", "Dirichlet 0.3", "Each class is spread over the agents by a Dirichlet draw. Tuned again."
    ),
    "rivals": _another("rivals", "Other methods", "Tuned with the same budget. GT-L-BFGS uses curvature."),
    "ablations": _ablations,
}
