"""A callback for the Trainer of Hugging Face: `callbacks=[AgentCallback(fleet="FLEET.toml", agent=3)]`."""

from __future__ import annotations

from typing import Any

from caden.errors import CadenError
from caden.own_loop._agent import Agent

try:
    from transformers import TrainerCallback
except ImportError:
    raise CadenError('This needs the extra "transformers": pip install "caden-opt[transformers]".') from None


class AgentCallback(TrainerCallback):
    """Make a Trainer one agent of a network; the arguments are those of `caden.Agent`.

    The Trainer must train alone: under torchrun it would average gradients, so agents are peers of a fleet.
    """

    def __init__(self, *arguments: Any, **options: Any):
        self._arguments, self._options = arguments, options
        self.agent: Agent | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if args.world_size > 1:
            raise CadenError("The Trainer averages the gradients of several processes: use a fleet (`fleet`, `agent`).")
        optimizer = objects["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # inside what Accelerate wraps around it
        self.agent = Agent(objects["model"], optimizer, *self._arguments, **self._options)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self.agent is not None:
            self.agent.finish()
