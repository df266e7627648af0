"""The commands for peers: `caden peer`, `caden fleet`, `caden fleet init`, `caden replay`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from caden.cli.arguments import NoCode
from caden.cli.code import OutsideCode, outside_code

if TYPE_CHECKING:
    from rich.table import Table

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET.toml", help="Fleet file.")]
Out = Annotated[Path | None, typer.Option(help="Fleet directory; by default runs/NAME.")]


class _RunByDefault(TyperGroup):
    """`caden fleet FLEET.toml` is `caden fleet run FLEET.toml`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


fleet_app = typer.Typer(cls=_RunByDefault, no_args_is_help=True, help="Set up, check or start a fleet of peers.")


def peer(
    file: FleetFile,
    agent: Annotated[int, typer.Option(help="Number of the agent to run.")],
    out: Out = None,
    no_code: NoCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON lines.")] = False,
) -> None:
    """Run one agent of a fleet. After a crash, the same command resumes it."""
    from rich.console import Console

    from caden.experiments.config import experiment
    from caden.experiments.peer import run_peer
    from caden.networks.peers.fleet import Fleet

    with outside_code(no_code):
        config = experiment(file)
    fleet, stop = Fleet.of(config), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    console = Console(stderr=True)
    shown = 0.0

    def show(status: dict[str, Any]) -> None:
        nonlocal shown
        if as_json:
            print(json.dumps(status), flush=True)
        elif status["state"] == "done" or time.monotonic() - shown > 5:
            shown = time.monotonic()
            console.print(_status_line(status), highlight=False)

    folder = (out or Path("runs") / fleet.name) / f"agent-{agent}"
    with outside_code(no_code):
        result = run_peer(config, agent, folder, stop, show, file.parent)
    if not as_json:
        Console().print(f"agent {agent}: {result.stopped} after {result.rows[-1]['round']} rounds; {result.directory}")


def _status_line(status: dict[str, Any]) -> str:
    causes = [f"agent {j}: {status['causes'].get(str(j), 'silent')}" for j in status["down"]]
    down = f" ({'; '.join(causes)})" if causes else ""
    return f"agent {status['agent']}: round {status['round']}, loss {status['objective'] or 0:.6g}{down}"


@fleet_app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FLEET.toml", help="File to write.")] = Path("FLEET.toml"),
    agents: Annotated[int, typer.Option(help="Number of agents.")] = 6,
    graph: Annotated[str, typer.Option(help="Name of a graph.")] = "ring",
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="Run exact rounds instead of each agent at its own pace.")
    ] = False,
    tls: Annotated[bool, typer.Option("--tls", help="Create a certificate authority and certificates.")] = False,
    hosts: Annotated[str, typer.Option(help="Hosts of the agents, separated by commas.")] = "127.0.0.1",
) -> None:
    """Write a fleet file: CADEN on the digits, all agents on this machine by default."""
    from rich.console import Console

    from caden.experiments.fleet_file import write_fleet

    names, mode = [host.strip() for host in hosts.split(",")], "lockstep" if lockstep else "free"
    folder = write_fleet(file, agents, graph, mode, names, tls)
    keys = f"; give each machine only its own key of {folder}" if folder else ""
    Console().print(f"{file}: {agents} agents{keys}", soft_wrap=True)


@fleet_app.command()
def renew(file: FleetFile) -> None:
    """Create new certificates for all agents of a fleet. The old ones are kept next to them."""
    from caden.experiments.config import read_toml
    from caden.experiments.fleet_file import renew_certificates
    from caden.networks.peers.fleet import Fleet

    folder, old = renew_certificates(file, Fleet.from_table(read_toml(file).get("fleet")))
    print(f"{folder}: give each machine ca.pem and its own pair of files, then restart all peers (old ones: {old})")


@fleet_app.command()
def check(
    file: FleetFile,
    agent: Annotated[int, typer.Option(help="Number of the agent that this machine runs.")],
    no_code: NoCode = False,
) -> None:
    """Show which links of an agent are up. Name the cause for each one that is not."""
    from caden.experiments.config import experiment
    from caden.networks.peers.certificates import link_errors
    from caden.networks.peers.fleet import Fleet

    with outside_code(no_code):
        config = experiment(file)
        fleet = Fleet.of(config)
        graph = config.build(lambda graph: fleet.hosted_agents(graph, agent))[2]
    errors = link_errors(fleet, graph, agent, file.parent)
    for neighbour, error in errors.items():
        print(f"agent {agent} - agent {neighbour} ({fleet.endpoints[neighbour]}): {error or 'up'}")
    if any(errors.values()):
        raise typer.Exit(1)


@fleet_app.command("run")
def run_fleet(file: FleetFile, out: Out = None, no_code: NoCode = False) -> None:
    """Start all agents of a fleet on this machine. Ctrl-C stops them cleanly."""
    from rich.console import Console
    from rich.live import Live

    from caden.experiments.config import experiment, read_toml
    from caden.networks.peers.fleet import Fleet

    fleet = Fleet.from_table(read_toml(file).get("fleet"))
    try:
        with outside_code(refuse=True):  # only the peers run code that the file names
            config = experiment(file)
            config.build(lambda graph: Fleet.of(config).hosted_agents(graph, 0))
    except OutsideCode as outside:
        if no_code:
            raise
        print(f"caden: the peers will run {outside.name!r}, which is code outside caden", file=sys.stderr)
    out = out or Path("runs") / fleet.name
    command = [sys.executable, "-m", "caden", "peer", str(file), "--out", str(out), "--json"]
    command += [*(["--no-code"] if no_code else []), "--agent"]
    agents = range(len(fleet.endpoints))
    processes = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in agents]
    states: list[dict[str, Any]] = [{} for _ in agents]

    def listen(agent: int) -> None:
        for line in processes[agent].stdout or ():
            states[agent] = json.loads(line)

    readers = [threading.Thread(target=listen, args=(i,), daemon=True) for i in agents]
    for reader in readers:
        reader.start()
    console, stop = Console(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            while any(process.poll() is None for process in processes) and not stop.is_set():
                if console.is_terminal:
                    live.update(_table(fleet.name, states, processes))
                stop.wait(0.1)
    finally:
        _stop(processes)
        for reader in readers:
            reader.join(2)
    console.print(_table(fleet.name, states, processes))
    console.print(f"directory: {out}", soft_wrap=True)
    code = max((abs(process.returncode) for process in processes), default=0)
    if code:
        raise typer.Exit(min(code, 2))


def _stop(processes: list[subprocess.Popen[str]]) -> None:
    """Terminate the processes, and kill those that do not end in time."""
    deadline = time.monotonic() + 20
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _table(title: str, states: list[dict[str, Any]], processes: list[subprocess.Popen[str]]) -> Table:
    from rich.table import Table

    table = Table(title=title, padding=0)
    for name in ("agent", "state", "round", "loss", "accuracy", "up", "down", "stale s", "MB sent", "refused"):
        table.add_column(name, justify="right")
    for agent, (status, process) in enumerate(zip(states, processes)):
        ended = process.poll()
        if not status:
            table.add_row(str(agent), "starts" if ended is None else f"exit {ended}")
            continue
        state = status["state"] if ended is None or status["state"] == "done" else f"exit {ended}"
        row = (
            f"{status['round']}",
            "" if status["objective"] is None else f"{status['objective']:.3g}",
            "" if status["accuracy"] is None else f"{status['accuracy']:.1%}",
            " ".join(map(str, status["up"])),
            " ".join(map(str, status["down"])),
            f"{status['stale']:.1f}",
            f"{status['wire_bytes'] / 1e6:.1f}",
            f"{status['refused']}",
        )
        table.add_row(str(agent), state, *row)
    return table


def replay_fleet(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Fleet directory.")], no_code: NoCode = False
) -> None:
    """Repeat a free-running fleet from its logs. Run it in this process and compare the bits."""
    from caden.experiments.replay import replay

    with outside_code(no_code):
        results = replay(folder)
    for agent, steps, _, same in results:
        print(f"agent {agent}: {steps} steps, {'the same bits' if same else 'DIFFERENT from what it wrote'}")
    if not all(result.same for result in results):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(peer)
    app.command("replay")(replay_fleet)
    app.add_typer(fleet_app, name="fleet")
