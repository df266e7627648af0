"""Section 3 of the paper as code, and corrected results where it does not hold; derivations: docs/theory.md."""

from caden.core import Verdict as Verdict
from caden.curvature import curvature_bound as curvature_bound
from caden.curvature import hessians as hessians
from caden.curvature import paper_estimate as paper_estimate
from caden.curvature import smoothness as smoothness
from caden.theory._doctor import examine as examine
from caden.theory._paper import Constants as Constants
from caden.theory._paper import Facts as Facts
from caden.theory._paper import constants as constants
from caden.theory._paper import convex_bound as convex_bound
from caden.theory._paper import corollary1 as corollary1
from caden.theory._paper import lemma1 as lemma1
from caden.theory._paper import theorem1 as theorem1
from caden.theory._rate import local_rate as local_rate
from caden.theory._report import report as report
from caden.theory._stability import Choice as Choice
from caden.theory._stability import best_parameters as best_parameters
from caden.theory._stability import curvature_margin as curvature_margin
from caden.theory._stability import dual_limit as dual_limit
from caden.theory._stability import margins as margins
from caden.theory._stability import sampled_radius as sampled_radius
from caden.theory._stability import spectral_radius as spectral_radius
