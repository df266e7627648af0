"""A training loop of the user's own joins a network: `Agent`."""

from caden.own_loop._agent import Agent as Agent
