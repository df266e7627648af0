"""Peers: one agent on one machine, links along the graph's edges, no server. Needs the extra `caden-opt[peers]`."""

from caden.peers._fleet import Fleet, certify
from caden.peers._peer import take_part
from caden.peers._replay import Replayed, replay

__all__ = ["Fleet", "Replayed", "certify", "replay", "take_part"]
