"""The paper's experiments and more in one command: a plan of runs, and the page about them."""

from caden.reproduce._page import PARTS as PARTS
from caden.reproduce._page import build as build
from caden.reproduce._page import estimate as estimate
from caden.reproduce._plan import FULL as FULL
from caden.reproduce._plan import PUBLISHED as PUBLISHED
from caden.reproduce._plan import QUICK as QUICK
from caden.reproduce._plan import Plan as Plan
from caden.reproduce._plan import Scale as Scale
