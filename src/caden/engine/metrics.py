"""The metrics of recorded rounds. The clock stops while they are computed, and their evaluations are not counted."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from caden.engine.columns import RESERVED
from caden.engine.run import Run
from caden.errors import CadenError

Gather = Callable[[Tensor], Tensor]


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64) ** 2)


def relative_error(x: Tensor, gradient: Tensor) -> float:
    """Return the paper's |sum_i grad f_i(x_i)|^2 + sum_{i<m} |x_i - x_{i+1}|^2."""
    return _square(gradient.sum(0, dtype=torch.float64)) + _square(x[1:] - x[:-1])


def consensus(x: Tensor) -> float:
    """Return the root mean square distance of the local models from their mean."""
    return math.sqrt(_square(x - x.mean(0, dtype=torch.float64).to(x.dtype)) / len(x))


def lyapunov(x: Tensor, gradient: Tensor, phi: Tensor, first: Tensor, second: Tensor) -> float:
    """Return the paper's V, eq. (7), in agent variables: sum_i |grad f_i + phi_i|^2 + 1/4 sum_i sum_j |x_i - x_j|^2."""
    apart = sum(_square(x[first[a : a + 256]] - x[second[a : a + 256]]) for a in range(0, len(first), 256))
    return _square(gradient + phi) + apart / 2  # each edge occurs twice in the double sum


def _local_steps(steps: Tensor | None, gather: Gather) -> dict[str, float | None]:
    """Return the mean, least and most local steps of the agents that worked in the last round."""
    names = ("local_steps", "local_steps_least", "local_steps_most")
    taken = None if steps is None else gather(steps)
    taken = None if taken is None else taken[taken > 0].double()
    if taken is None or not len(taken):
        return dict.fromkeys(names)
    return dict(zip(names, (float(taken.mean()), float(taken.min()), float(taken.max()))))


def measure(run: Run, exact: bool = True, last: bool = True) -> dict[str, float | None]:
    """Return one row of the history, without counters; a method without duals has no `lyapunov` and no `dual_sum`.

    Without `exact`, nothing is computed on all samples: the loss is that of the batches seen, and the metrics of the
    test set are those of a fixed sample, in as many rounds as `Run.tested` allows; all of it in the last row.
    """
    state, problem, gather = run.state, run.problem.whole, run.network.transport.gather
    value, gradient = run.info.value, run.info.gradient
    if exact and (value is None or gradient is None or run.problem.stochastic):  # those of a mini-batch
        value, gradient = (part.detach() for part in problem.value_and_grad(state.x))
    x, phi = gather(state.x), gather(state.phi) if "phi" in state._fields else None
    row: dict[str, float | None] = dict.fromkeys(("objective", "relative_error", "consensus", "lyapunov", "dual_sum"))
    row["consensus"] = consensus(x)
    if phi is not None:
        row["dual_sum"] = float(torch.linalg.vector_norm(phi.sum(0, dtype=torch.float64)))
    if exact and value is not None and gradient is not None:
        value, gradient = gather(value), gather(gradient)
        row["objective"] = float(value.sum(dtype=torch.float64))
        row["relative_error"] = relative_error(x, gradient)
        if phi is not None:
            row["lyapunov"] = lyapunov(x, gradient, phi, *run.network.layout.ends)
    if run.counts_steps:
        row |= _local_steps(run.info.steps, gather)
    if run.problem.stochastic:
        row["batch_loss"] = batch_loss(run.info.seen, gather)
    return row | on_test_data(run, exact or last, gather)


def batch_loss(losses: Tensor | None, gather: Gather | None = None) -> float | None:
    """Return the mean loss of the batches that the agents saw in the last round."""
    seen = losses if losses is None or gather is None else gather(losses)
    seen = None if seen is None else seen[~seen.isnan()].double()
    return None if seen is None or not len(seen) else float(seen.mean())


def on_test_data(run: Run, everything: bool, gather: Gather | None = None) -> dict[str, float | None]:
    """Return the mean metrics of the test data; None in rounds that do not measure them.

    With mini-batches, `test_samples` says how many samples they are of.
    """
    problem, x = run.problem.whole, run.state.x
    samples = problem.tests[0 if everything else 1] if everything or run.tested else 0
    known: dict[str, float | None] = {"test_samples": samples} if run.problem.stochastic and problem.tests[0] else {}
    if everything:
        metrics = problem.evaluate(x)
    elif run.tested:
        metrics = problem.glance(x)
    else:
        return dict.fromkeys(problem.metric_names) | known
    if clash := RESERVED & metrics.keys():
        raise CadenError(f"A metric cannot be named `{min(clash)}`, which is a column of the history: rename it.")
    gathered = {name: values if gather is None else gather(values) for name, values in metrics.items()}
    return {name: float(values.mean()) for name, values in gathered.items()} | known
