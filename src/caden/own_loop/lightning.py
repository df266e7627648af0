"""A Lightning callback: `Trainer(callbacks=[AgentCallback(fleet="FLEET.toml", agent=3)])`."""

from __future__ import annotations

from typing import Any

from caden.errors import CadenError
from caden.own_loop._agent import Agent

try:
    from lightning.pytorch import Callback
except ImportError:
    raise CadenError('This needs the extra "lightning": pip install "caden-opt[lightning]".') from None


class AgentCallback(Callback):
    """Make a Lightning training one agent of a network; the arguments are those of `caden.Agent`.

    The Trainer must train alone (`devices=1`). The method's part is added to the gradients before Lightning clips
    them.
    """

    def __init__(self, *arguments: Any, **options: Any):
        self._arguments, self._options = arguments, options
        self.agent: Agent | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size > 1:
            raise CadenError("Lightning averages the gradients of several devices: use `devices=1` for an agent.")
        if len(trainer.optimizers) != 1:
            raise CadenError(f"An agent needs exactly one optimizer, got {len(trainer.optimizers)}.")
        optimizer = trainer.optimizers[0]
        self.agent = Agent(pl_module, optimizer, *self._arguments, hooks=False, **self._options)
        self._handle = optimizer.register_step_post_hook(self._after)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.agent is not None:
            self.agent.before_step()

    def _after(self, *_: Any) -> None:
        if self.agent is not None:
            self.agent.after_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.agent is not None:
            self._handle.remove()
            self.agent.finish()
