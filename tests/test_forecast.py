"""What a run will take, against what it takes."""

import subprocess
import sys

import pytest

from caden import forecast
from caden.config import experiment
from caden.errors import CadenError

LARGE = ["problem.name=logistic", "problem.agents=6", "problem.samples=2", "graph.name=ring", "warmup.steps=0"]
LARGE += ["method.mu_z=1.0", "method.solver.name=lbfgs", "dtype=float32", "rounds=4"]

RUN = """
import sys
from caden import forecast
from caden.config import experiment
from caden.forecast import largest
small, large = (experiment(None, [*sys.argv[1:], f"problem.dim={dim}"]) for dim in (10, 1_000_000))
small.run()
before = largest()
large.run()
print(largest() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["method.solver.memory=3"], ["participation=0.5"]])
def test_the_peak_is_foretold(more):
    found = forecast.forecast(experiment(None, [*LARGE, *more, "problem.dim=1000000"]))
    done = subprocess.run([sys.executable, "-c", RUN, *LARGE, *more], capture_output=True, text=True, check=True)
    assert 0.7 < (found.state + found.problem) / int(done.stdout) < 1.4


def test_what_cannot_fit_is_refused_with_what_would():
    config = experiment(None, [*LARGE, "method.solver.memory=12"])
    one = 10**9  # bytes of a vector of all agents
    base = forecast.Forecast(44, 44 * one, 2 * one, 60 * one, 1.0)
    forecast.refuse(base, config)
    with pytest.raises(CadenError, match=r"method\.solver\.memory = 9"):
        forecast.refuse(base._replace(available=41 * one), config)
    with pytest.raises(CadenError, match="spread the agents"):
        forecast.refuse(base._replace(available=10 * one), config)
