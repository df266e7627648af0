"""The paper's experiments as one command, and more: a plan of runs, and the page about them."""

from caden.reproduce._page import PARTS, build, estimate
from caden.reproduce._plan import FULL, PUBLISHED, QUICK, Plan, Scale

__all__ = ["FULL", "PARTS", "PUBLISHED", "QUICK", "Plan", "Scale", "build", "estimate"]
