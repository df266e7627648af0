"""The commands of peers: `caden peer`, `caden fleet`, `caden fleet init`, `caden replay`."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from typer.core import TyperGroup

from caden.experiments.config import experiment
from caden.experiments.fleet_file import write_fleet
from caden.experiments.peer import run_peer
from caden.experiments.replay import replay
from caden.networks.peers.fleet import Fleet

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET.toml")]
Out = Annotated[Path | None, typer.Option(help="Directory of the fleet; by default runs/NAME.")]


class _RunByDefault(TyperGroup):
    """`caden fleet FLEET.toml` is `caden fleet run FLEET.toml`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


fleet_app = typer.Typer(
    cls=_RunByDefault, no_args_is_help=True, help="A fleet of peers: `caden fleet FLEET.toml`, `caden fleet init`."
)


def peer(
    file: FleetFile,
    agent: Annotated[int, typer.Option(help="Which agent of the fleet to be.")],
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON lines.")] = False,
) -> None:
    """Be one agent of a fleet; after a crash the same command goes on."""
    config = experiment(file)
    fleet, stop = Fleet.of(config), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    console = Console(stderr=True)
    said = 0.0

    def show(status: dict[str, Any]) -> None:
        nonlocal said
        if as_json:
            print(json.dumps(status), flush=True)
        elif status["state"] == "done" or time.monotonic() - said > 5:
            said = time.monotonic()
            console.print(_line(status), highlight=False)

    result = run_peer(config, agent, (out or Path("runs") / fleet.name) / f"agent-{agent}", stop, show, file.parent)
    if not as_json:
        Console().print(f"agent {agent}: {result.stopped} after {result.rows[-1]['round']} rounds; {result.directory}")


def _line(status: dict[str, Any]) -> str:
    down = f", no word from {status['down']}" if status["down"] else ""
    return f"agent {status['agent']}: round {status['round']}, loss {status['objective']:.6g}{down}"


@fleet_app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="[FLEET.toml]")] = Path("FLEET.toml"),
    agents: Annotated[int, typer.Option(help="How many agents.")] = 6,
    graph: Annotated[str, typer.Option(help="Name of a graph.")] = "ring",
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="Exact rounds instead of everyone at their pace.")
    ] = False,
    tls: Annotated[bool, typer.Option("--tls", help="Make a certificate authority and certificates.")] = False,
    hosts: Annotated[str, typer.Option(help="Where the agents are, separated by commas.")] = "127.0.0.1",
) -> None:
    """Write the file of a fleet: the digits, relaxed ADMM with L-BFGS, everyone on this machine."""
    names, mode = [host.strip() for host in hosts.split(",")], "lockstep" if lockstep else "free"
    folder = write_fleet(file, agents, graph, mode, names, tls)
    keys = f"; give each machine only its own key of {folder}" if folder else ""
    Console().print(f"{file}: {agents} agents{keys}", soft_wrap=True)


@fleet_app.command("run")
def run_fleet(file: FleetFile, out: Out = None) -> None:
    """Start all agents of a fleet on this machine; Ctrl-C ends them in an orderly way."""
    config = experiment(file)
    fleet = Fleet.of(config)
    _, _, graph = config.build(lambda graph: fleet.hosted_agents(graph, 0))
    out = out or Path("runs") / fleet.name
    command = [sys.executable, "-m", "caden", "peer", str(file), "--out", str(out), "--json", "--agent"]
    agents = range(graph.agents)
    crew = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in agents]
    states: list[dict[str, Any]] = [{} for _ in agents]

    def listen(agent: int) -> None:
        for line in crew[agent].stdout or ():
            states[agent] = json.loads(line)

    readers = [threading.Thread(target=listen, args=(i,), daemon=True) for i in agents]
    for reader in readers:
        reader.start()
    console, stop = Console(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            while any(member.poll() is None for member in crew) and not stop.is_set():
                if console.is_terminal:
                    live.update(_table(fleet.name, states, crew))
                stop.wait(0.1)
    finally:
        _end(crew)
        for reader in readers:
            reader.join(2)
    console.print(_table(fleet.name, states, crew))
    console.print(f"directory: {out}", soft_wrap=True)
    code = max((abs(member.returncode) for member in crew), default=0)
    if code:
        raise typer.Exit(min(code, 2))


def _end(crew: list[subprocess.Popen[str]]) -> None:
    """Ask the processes to end, and end those that do not."""
    end = time.monotonic() + 20
    for member in crew:
        member.terminate()
    for member in crew:
        try:
            member.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            member.kill()


def _table(title: str, states: list[dict[str, Any]], crew: list[subprocess.Popen[str]]) -> Table:
    table = Table(title=title, padding=0)
    for name in ("agent", "state", "round", "loss", "accuracy", "up", "down", "stale s", "MB sent", "refused"):
        table.add_column(name, justify="right")
    for agent, (status, process) in enumerate(zip(states, crew)):
        ended = process.poll()
        if not status:
            table.add_row(str(agent), "starts" if ended is None else f"exit {ended}")
            continue
        state = status["state"] if ended is None or status["state"] == "done" else f"exit {ended}"
        row = (
            f"{status['round']}",
            f"{status['objective']:.3g}",
            "" if status["accuracy"] is None else f"{status['accuracy']:.1%}",
            " ".join(map(str, status["up"])),
            " ".join(map(str, status["down"])),
            f"{status['stale']:.1f}",
            f"{status['wire_bytes'] / 1e6:.1f}",
            f"{status['refused']}",
        )
        table.add_row(str(agent), state, *row)
    return table


def replay_fleet(folder: Annotated[Path, typer.Argument(metavar="RUN")]) -> None:
    """Run a free-running fleet again from its logs, in this process, and compare to the bit."""
    found = replay(folder)
    for agent, steps, _, same in found:
        print(f"agent {agent}: {steps} steps, {'the same bits' if same else 'DIFFERENT from what it left'}")
    if not all(result.same for result in found):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(peer)
    app.command("replay")(replay_fleet)
    app.add_typer(fleet_app, name="fleet")
