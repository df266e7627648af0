"""What every registered method must fulfil; one that is added is found here by itself."""

import inspect
import re
import sys

import numpy as np
import pytest
import torch

import caden
from caden.errors import CadenError
from caden.experiments.method_check import SETTINGS, distance, verdict
from caden.experiments.tune import points, space_of
from caden.methods import CARDS, CONDITIONS, METHODS
from conftest import masks, scheduled

# A run under each condition, as a user would ask for it.
UNDER = {
    "sleep": {"participation": 0.5},
    "links": {"links": 0.5},
    "loss": {"messages": {"loss": 0.2}},
    "delay": {"messages": {"delay": 2}},
    "compression": {"messages": {"top": 0.5}},
}
MEASURED = {"sleep": ("half awake", "a fifth awake"), "links": ("half the links",), "loss": ("20 % lost",)}
MEASURED |= {"delay": ("2 rounds late",), "compression": ("half the entries",)}


@pytest.fixture(scope="module")
def setting():
    return caden.problems.quadratic(agents=8, dim=4, seed=1), caden.graphs.erdos_renyi(8, edges=12, seed=2)


def method(name):
    return METHODS[name](**CARDS[name].unit_parameters)


@pytest.mark.parametrize("name", METHODS)
def test_the_file_tells_the_paper_and_what_becomes_of_sleepers(name):
    text = sys.modules[METHODS[name].__module__].__doc__
    assert re.search(r"\b(19|20)\d\d\b", text), "authors, title, venue, year"
    assert "Sleeping agents:" in " ".join(text.split())


@pytest.mark.parametrize("name", METHODS)
def test_the_factory_is_documented(name):
    doc = inspect.getdoc(METHODS[name])
    assert re.match(r"\S.*\.\n", doc), "one line first"
    arguments = doc.partition("Args:\n")[2].partition("\n\n")[0]
    for parameter in inspect.signature(METHODS[name]).parameters:
        assert re.search(rf"^\s*([\w, ]*, )?{parameter}(, [\w, ]*)?:", arguments, re.MULTILINE), parameter
    assert "Reference: " in doc
    assert ">>> " in doc  # run by --doctest-modules


@pytest.mark.parametrize("name", METHODS)
def test_it_improves_on_its_start_and_says_its_name(setting, name):
    problem, graph = setting
    result = caden.simulate(method(name), problem, graph, 60, local_steps=3)
    start, end = torch.zeros(8, 4, dtype=torch.float64), result.mean.expand(8, 4)
    assert problem.value_and_grad(end)[0].sum() < problem.value_and_grad(start)[0].sum()  # also where it is biased
    assert method(name).name == name


@pytest.mark.parametrize("name", METHODS)
def test_sleepers_keep_their_model_to_the_bit_or_the_method_refuses(setting, name):
    problem, graph = setting
    awake, seen = masks(8, 12, 0.4, seed=5), []
    options = {"participation": scheduled(awake), "callbacks": [lambda row, state: seen.append(state.x.clone())]}
    if "everyone awake" in inspect.getdoc(METHODS[name]):
        with pytest.raises(CadenError, match="everyone awake"):
            caden.simulate(method(name), problem, graph, 12, local_steps=3, **options)
        assert "sleep" not in CARDS[name].survives
        return
    caden.simulate(method(name), problem, graph, 12, local_steps=3, **options)
    for mask, before, after in zip(awake[1:], seen, seen[1:], strict=False):
        asleep = torch.as_tensor(~np.asarray(mask))
        assert torch.equal(before[asleep], after[asleep])


@pytest.mark.parametrize("name", METHODS)
def test_what_it_survives_it_runs_under(setting, name):
    for condition in CARDS[name].survives:
        rows = caden.simulate(method(name), *setting, 8, local_steps=3, **UNDER[condition]).rows
        assert np.isfinite(rows[-1]["relative_error"])


CHOOSE_EDGES = ("noloco", "relay_sgd")  # by the numbers of the agents; see tests/test_rivals.py


@pytest.mark.parametrize("name", [name for name in METHODS if name not in CHOOSE_EDGES])
def test_relabelling_agents_permutes_the_models(setting, name):
    problem, graph = setting
    order = np.random.default_rng(3).permutation(8)
    place = np.argsort(order)  # agent order[i] becomes agent i
    other = caden.graphs.from_edges(place[graph.edges].tolist(), 8)
    x = caden.simulate(method(name), problem, graph, 6, local_steps=3).x
    y = caden.simulate(method(name), problem.take(order.tolist()), other, 6, local_steps=3).x
    torch.testing.assert_close(y, x[order], atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", METHODS)
def test_it_has_a_search_space(name):
    """One range, of about three decades, and at most three choices of the others."""
    space = CARDS[name].space
    ranges = [entry for entry in space.values() if isinstance(entry, dict)]
    assert space
    assert len(ranges) == 1
    assert all(100 <= entry["high"] / entry["low"] <= 10_000 for entry in ranges)
    assert all(len(entry) <= 3 for entry in space.values() if isinstance(entry, list))


@pytest.mark.parametrize("name", METHODS)
def test_points_of_its_search_space_are_parameters_that_it_takes(name):
    for point in points(space_of(name), 6, curvature=1.0):
        METHODS[name](**{**CARDS[name].unit_parameters, **point})


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_it_survives_just_what_it_says(name):
    """As measured by `caden list methods --check`."""
    if not verdict(distance(name)).startswith("exact"):
        assert not CARDS[name].survives  # biased by design
        return
    for condition in CONDITIONS:
        rounds = {"a fifth awake": 8000}
        exact = [
            verdict(distance(name, rounds.get(setting, 2000), **SETTINGS[setting])).startswith("exact")
            for setting in MEASURED[condition]
        ]
        assert all(exact) == (condition in CARDS[name].survives), condition
