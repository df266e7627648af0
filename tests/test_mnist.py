"""The figures that the README gives for the full MNIST; long, so only `make test-all` runs them."""

from __future__ import annotations

import pytest
import torch

import caden
from caden.experiments.config import experiment


def rounds_to_target(*settings, file=None):
    try:
        caden.data.fetch_data("mnist")
    except caden.CadenError as error:
        pytest.skip(str(error))
    config = experiment(file, ["problem.data=mnist", "stop_at_target=true", *settings])
    torch.set_num_threads(2)
    try:
        return config.run().summary()["rounds_to_target"]
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_well_chosen_parameters_need_at_most_8_rounds():
    assert rounds_to_target("method.mu_z=0.07", "method.relax=0.9", "rounds=8") is not None


@pytest.mark.slow
def test_mu_z_of_a_tenth_needs_at_most_15_rounds():
    assert rounds_to_target("method.mu_z=0.1", "rounds=15") is not None


@pytest.mark.slow
def test_the_automatic_mu_z_needs_at_most_20_rounds():
    assert rounds_to_target("rounds=20") is not None


def test_the_default_run_on_the_digits():
    """Few rounds to 93 %, and the sum of the duals at float32 rounding."""
    summary = experiment(settings=["rounds=8"]).run().summary()
    assert summary["rounds_to_target"] <= 5
    assert summary["dual_sum"] < 1e-5
