from __future__ import annotations

import numpy as np
import pytest

from caden import CadenError
from caden.draws import Draw
from caden.schedules import Participation, Workload, between, from_spec, switch


def test_draws_are_pure_functions_of_seed_label_round_and_agent():
    draw = Draw(5, 8)
    row = draw.uniform("a", 3)
    assert np.array_equal(row, Draw(5, 8).uniform("a", 3))
    assert np.array_equal(row[:4], Draw(5, 4).uniform("a", 3))  # agent i's number does not depend on m
    for other in (Draw(6, 8).uniform("a", 3), draw.uniform("b", 3), draw.uniform("a", 4)):
        assert not np.array_equal(row, other)
    sample = np.concatenate([draw.uniform("a", t) for t in range(2000)])
    assert abs(sample.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(sample[:-8], sample[8:])[0, 1]) < 0.03  # neither rounds
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.03  # nor agents are correlated


def test_participation_frequencies_follow_the_probabilities():
    p = [0.05, 0.5, 1.0]
    awake = Participation(p, Draw(0, 3))
    share = np.mean([awake(t).numpy() for t in range(4000)], axis=0)
    np.testing.assert_allclose(share, p, atol=0.03)
    assert awake.may_sleep


def test_everyone_awake_is_known_beforehand():
    assert not Participation(1, Draw(0, 3)).may_sleep
    assert not Participation([1.0, 1, 1], Draw(0, 3)).may_sleep
    assert Participation(lambda round, draw: 1.0, Draw(0, 3)).may_sleep  # a schedule may change its mind


def test_schedules_of_probabilities_and_of_masks():
    late = Participation(switch(1.0, 0.5, at=3), Draw(1, 50))
    assert [bool(late(t).all()) for t in range(5)] == [True, True, True, False, False]
    turns = Participation(lambda round, draw: np.arange(4) == round % 4, Draw(0, 4))
    assert turns(6).tolist() == [False, False, True, False]


def test_workloads():
    draw = Draw(2, 4)
    assert Workload(5, draw)(7).tolist() == [5, 5, 5, 5]
    assert Workload([1, 2, 3, 0], draw)(7).tolist() == [1, 2, 3, 0]
    red = Workload(switch(5, 1, at=100), draw)  # the paper's "-Red"
    assert (red(99).tolist(), red(100).tolist()) == ([5] * 4, [1] * 4)
    drawn = np.array([Workload(between(2, 4), draw)(t).tolist() for t in range(200)])
    assert set(drawn.ravel()) == {2, 3, 4}
    assert from_spec({"name": "switch", "first": 5, "then": 1, "at": 2})(2, draw) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: Participation(0, d), r"\(0, 1\]"),
        (lambda d: Participation(1.2, d), r"\(0, 1\]"),
        (lambda d: Participation([0.5, 0.5], d), r"one value per agent \(4\), got 2"),
        (lambda d: Participation("half", d), "numbers"),
        (lambda d: Workload(-1, d), "at least 0"),
        (lambda d: Workload(1.5, d), "whole numbers"),
        (lambda d: from_spec({"name": "swich"}), "did you mean 'switch'"),
        (lambda d: from_spec({"name": "switch", "first": 1}), "missing"),
        (lambda d: between(3, 1), "low <= high"),
    ],
)
def test_bad_schedules(make, message):
    with pytest.raises(CadenError, match=message):
        make(Draw(0, 4))
