"""Bytes and communications to an accuracy, for compressed and triggered messages, all defaults otherwise.

    python benchmarks/messages.py mnist 0.93
    python benchmarks/messages.py mnist 0.96 --mu 0.04 --rounds 60 --only trigger

Each line is one run; `bytes` and `communications` are relative to the first line, which sends everything.
"""

from __future__ import annotations

import argparse
from typing import Any

import caden
from caden.experiments.config import experiment

WARMUP = {"steps": 20, "step_size": 0.1}
DECAYING: dict[str, Any] = {"trigger": {"first": 2.0, "decay": 0.97}}
MODELS: dict[str, dict[str, Any]] = {
    "everything": {},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "2 bits": {"bits": 2},
    "1 bit": {"bits": 1},
    "top 1 %": {"top": 0.01},
    "top 10 %, 2 bits": {"top": 0.1, "bits": 2},
    "top 20 %, 1 bit": {"top": 0.2, "bits": 1},
    "trigger": DECAYING,
    "trigger, 8 bits": {**DECAYING, "bits": 8},
    "trigger, top 20 %, 1 bit": {**DECAYING, "top": 0.2, "bits": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=["mnist", "fashion_mnist", "digits"])
    parser.add_argument("target", type=float)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--relax", type=float, default=0.5)
    parser.add_argument("--mu", type=float, help="mu_z, by default automatic; triggers need a number")
    parser.add_argument("--first", type=float, default=2.0, help="first threshold of the trigger")
    parser.add_argument("--decay", type=float, default=0.97, help="its factor per round")
    parser.add_argument("--only", nargs="*", help="words of the lines to run, besides the first")
    parser.add_argument("--set", action="append", default=[], help="settings of the experiment, as for `caden run`")
    options = parser.parse_args()
    DECAYING["trigger"].update(first=options.first, decay=options.decay)
    config = experiment(None, [f"problem.data={options.data}", *options.set])
    _, problem, graph = config.build()
    print("| messages | rounds | communications | bytes |\n|---|---|---|---|")
    plain = None
    for name, messages in MODELS.items():
        skipped = options.only and not any(word in name for word in options.only)
        if plain is not None and (skipped or ("trigger" in messages and options.mu is None)):
            continue
        result = caden.simulate(
            caden.methods.caden(options.mu or "auto", relax=options.relax),
            problem,
            graph,
            options.rounds,
            local_steps="auto",
            warmup=WARMUP,
            messages=messages,
            target=options.target,
            stop_at_target=True,
        )
        last = result.rows[-1]
        plain = plain or last
        if result.stopped != "target":
            print(f"| {name} | not reached in {options.rounds} rounds ({last['accuracy']:.2%}) | - | - |", flush=True)
            continue
        relative = [f"{last[key] / plain[key]:.3f}" for key in ("communications", "bytes")]
        print(f"| {name} | {last['round']} | {relative[0]} | {relative[1]} |", flush=True)


if __name__ == "__main__":
    main()
