"""The arena: every method in every cell of problem x graph x condition, tuned with equal budgets, to fixed goals."""

from caden.arena._files import data_profiles as data_profiles
from caden.arena._files import document as document
from caden.arena._files import pairs as pairs
from caden.arena._files import profiles as profiles
from caden.arena._files import winners as winners
from caden.arena._files import write as write
from caden.arena._outcomes import Outcome as Outcome
from caden.arena._outcomes import Outcomes as Outcomes
from caden.arena._page import subject_of as subject_of
from caden.arena._statistics import data_profile as data_profile
from caden.arena._statistics import paired as paired
from caden.arena._statistics import profile as profile
from caden.arena._suite import Cell as Cell
from caden.arena._suite import Suite as Suite
from caden.arena._suite import chosen as chosen
from caden.arena._suite import load_suite as load_suite
from caden.arena._tournament import Entry as Entry
from caden.arena._tournament import Standings as Standings
from caden.arena._tournament import estimate as estimate
from caden.arena._tournament import hold as hold
from caden.arena._tournament import missing as missing
from caden.arena._tournament import unheard as unheard
