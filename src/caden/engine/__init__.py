"""How a run goes: one loop, what it measures, what it writes."""

from caden.engine import log as log
