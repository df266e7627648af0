"""Training loops of one's own for tests: what each agent runs, under torchrun or as a peer, and the same simulated."""

import atexit
import copy
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import caden

AGENTS, SEED = 3, 4


def network(data="digits"):
    """A CNN with dropout for images of 8 x 8 or 28 x 28 pixels."""
    return caden.problems.cnn(1, 8 if data == "digits" else 28, 10, hidden=16, dropout=0.2, seed=1)


def images(agents=AGENTS, data="digits"):
    """The same problem for the simulator: its draws are those of `train`."""
    (x, y), test = caden.data.load(data)
    size = 600 if data == "digits" else 6000
    options = {"agents": agents, "partition": "shards", "batch_size": 16, "seed": SEED}
    return caden.problems.classification(network(data), (x[:size], y[:size]), test, **options)


def simulated(method, rounds, steps, agents=AGENTS, data="digits", **options):
    """The models of all agents after some rounds in the simulator."""
    graph = caden.graphs.exponential(agents)
    options = {"local_steps": steps, "deterministic": True, "seed": SEED, **options}
    return caden.simulate(method, images(agents, data), graph, rounds, **options).x


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


def train(agent, model, optimizer, until, agents=AGENTS, after=None, data="digits", stop=lambda: False):
    """A loop of one's own: mini-batches and dropout masks by `caden.draws`, so that they can be repeated."""
    shard = images(agents, data).shards[agent.agent]
    while agent.steps < until and not agent.is_over and not stop():
        chosen = caden.draws.batch(SEED, agent.round, agent.step, agent.agent, shard.count, 16)
        inputs, targets = shard.read(chosen)
        with caden.draws.randomness(SEED, agent.round, agent.step, agent.agent):
            loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if after is not None:
            after(agent)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def digest(rows):
    return hashlib.sha1(rows.contiguous().numpy().tobytes()).hexdigest()


def gathered(agent):
    return agent._result.x


CASES = {
    "caden": ("caden", {"mu_z": 0.1}),
    "asleep": ("caden", {"mu_z": 0.1, "relax": 0.9, "participation": 0.5, "rounds": 5}),
    "radmm": ("radmm", {"rho": 0.1}),
    "adapd": ("adapd", {"eta": 5.0}),
    "dinno": ("dinno", {"rho": 0.1}),
    "fedadmm": ("fedadmm", {"rho": 0.1}),
    "dpsgd": ("dpsgd", {}),
    "bits": ("caden", {"mu_z": 0.1, "messages": {"bits": 4}}),
    "overlap": ("caden", {"mu_z": 0.1, "overlap": True}),
    "kgt": ("kgt", {"alpha": 0.05}),
    "led": ("led", {"alpha": 0.05}),
}


def networks():
    """{case: hash of all agents' models, rounds, whether every agent ends with their mean}."""
    found = {}
    for name, (method, options) in CASES.items():
        model = network()
        optimizer = sgd(model.parameters()) if name in ("kgt", "led") else adamw(model.parameters())
        agent = caden.Agent(model, optimizer, method, 3, deterministic=True, seed=SEED, **options)
        train(agent, model, optimizer, until=10**6 if "rounds" in options else 12)
        agent.finish()
        is_mean = torch.equal(flat(model), gathered(agent).mean(0))
        found[name] = [digest(gathered(agent)), int(agent.history["round"].iloc[-1]), is_mean]
    return found


def fashion():
    """A hash of the models of all ranks after some rounds on Fashion-MNIST."""
    model = network("fashion_mnist")
    optimizer = adamw(model.parameters())
    agent = caden.Agent(model, optimizer, "caden", 5, mu_z=0.1, rounds=6, deterministic=True, seed=SEED)
    train(agent, model, optimizer, until=10**6, data="fashion_mnist")
    agent.finish()
    return digest(gathered(agent))


def crash():
    """Die after some steps, or continue from what was saved then; a hash if it comes to the end."""
    directory = Path(sys.argv[3])
    model = network()
    optimizer = adamw(model.parameters())
    options = {"mu_z": 0.1, "deterministic": True, "seed": SEED, "directory": directory, "checkpoint_every": 3}
    agent = caden.Agent(model, optimizer, "caden", 3, **options)
    began = agent.steps

    def die(agent):
        if began == 0 and agent.steps == 11:
            os.kill(os.getpid(), signal.SIGKILL)

    train(agent, model, optimizer, until=12, agents=agent.agents, after=die)
    agent.finish()
    return {"began": began, "model": digest(gathered(agent))}


def saved(mu_z, at):
    """The states of agent, model and optimizer are saved after `at` steps, and loaded into new ones."""
    found = {}
    for name in ("whole", "half"):

        def begun():
            model = network()
            optimizer = adamw(model.parameters())
            return caden.Agent(model, optimizer, "caden", 3, mu_z=mu_z, deterministic=True, seed=SEED), model, optimizer

        agent, model, optimizer = begun()
        if name == "half":
            train(agent, model, optimizer, until=at)
            kept = copy.deepcopy((agent.state_dict(), model.state_dict(), optimizer.state_dict()))
            train(agent, model, optimizer, until=at + 1)
            agent.finish()
            agent, model, optimizer = begun()
            found["from"] = agent.round
            model.load_state_dict(kept[1])
            optimizer.load_state_dict(kept[2])
            agent.load_state_dict(kept[0])
            found["at"] = [agent.round, agent.step, agent.steps]
        train(agent, model, optimizer, until=12)
        agent.finish()
        found[name] = digest(gathered(agent))
    return found


def three_ranks():
    """What needs three ranks."""
    return {"networks": networks(), "saved": saved(0.1, 7), "saved, auto": saved("auto", 7)}


def two_ranks():
    """What two ranks can show."""
    found = {"full gradients": full_gradients(), "models": odd_models(), "mistakes": mistakes()}
    return {**found, "forgotten": forgotten()}


# Least squares: full gradients, and a minimiser that is known.


def squares(agents):
    """(inputs, targets) of each agent, and the minimiser of the mean of all."""
    rng = np.random.default_rng(0)
    inputs = torch.tensor(rng.normal(size=(agents, 12, 4)))
    targets = torch.tensor(rng.normal(size=(agents, 12, 1)))
    # minimise sum_i |X_i w - y_i|^2
    solution = torch.linalg.lstsq(inputs.flatten(0, 1), targets.flatten(0, 1)).solution
    return inputs, targets, solution.flatten()


def fit(agent, model, optimizer, data, until, backward=None):
    """Full gradients of the mean squared error."""
    inputs, targets = data
    while agent.steps < until and not agent.is_over:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets) / 2
        loss.backward() if backward is None else backward(loss)
        optimizer.step()


def line(bias=False):
    model = nn.Linear(4, 1, bias=bias, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def full_gradients():
    """Rows after some rounds, without the deterministic mode, for several lengths of a round."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    inputs, targets, _ = squares(world)
    found = {}
    for name, every, options in (
        ("steps", 4, {"start": "anchor"}),
        ("own", 4, {"start": "own"}),
        ("auto", "auto", {}),
        ("overlap", 4, {"overlap": True, "start": "own"}),
    ):
        model = line()
        optimizer = sgd(model.parameters())
        agent = caden.Agent(model, optimizer, "caden", every, mu_z=0.3, rounds=5, **options)
        fit(agent, model, optimizer, (inputs[rank], targets[rank]), 10**6)
        agent.finish()
        found[name] = [gathered(agent).tolist(), agent.steps]
    found["seconds"] = by_seconds((inputs[rank], targets[rank]))
    return found


def by_seconds(data):
    model = line()
    optimizer = sgd(model.parameters())
    agent = caden.Agent(model, optimizer, "caden", "0.05s", mu_z=0.3)
    fit(agent, model, optimizer, data, 2000)
    agent.finish()
    rows = agent.history
    return [int(rows["round"].iloc[-1]), int(rows["gradients"].iloc[-1]), agent.waited]


def odd_models():
    """Kinds of parameters and loops, each on full gradients until it has converged: distances to the minimiser."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    inputs, targets, solution = squares(world)
    data, found = (inputs[rank], targets[rank]), {}

    class Two(nn.Module):
        """A frozen part, tied weights, and a parameter that the loss does not use."""

        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(4, dtype=torch.float64))
            self.b = self.a
            self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)
            self.unused = nn.Parameter(torch.full((2,), float(rank), dtype=torch.float64))
            self.register_buffer("mean", torch.full((1,), float(rank)))

        def forward(self, x):
            return (x @ (self.a + self.b) * self.frozen / 2).unsqueeze(1)

    model = Two()
    optimizer = torch.optim.SGD([{"params": [model.a], "lr": 0.3}, {"params": [model.unused], "lr": 0.1}], momentum=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they begin with different parameters on purpose
        agent = caden.Agent(model, optimizer, "caden", 4, mu_z=0.5)
    fit(agent, model, optimizer, data, 400)
    agent.finish()
    found["kinds"] = float((model.a.detach() - solution).abs().max())
    found["unused"] = float(
        (model.unused.detach() - (world - 1) / 2).abs().max()
    )  # f does not depend on it: the mean remains
    found["buffer"] = float(model.mean)

    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    agent = caden.Agent(model, optimizer, "caden", 4, mu_z=0.5)
    for _ in range(400):  # two parts of a batch, scaled, then unscaled and clipped
        optimizer.zero_grad()
        for half in (slice(0, 6), slice(6, 12)):
            loss = nn.functional.mse_loss(model(data[0][half]), data[1][half]) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        scaler.step(optimizer)
        scaler.update()
    agent.finish()
    found["scaled"] = float((flat(model) - solution).abs().max())

    model = line().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    agent = caden.Agent(model, optimizer, "caden", 4, mu_z=0.5)
    fit(agent, model, optimizer, (data[0].bfloat16(), data[1].bfloat16()), 200)
    agent.finish()
    found["bfloat16"] = float((gathered(agent).mean(0) - solution).abs().max())
    found["row"] = str(gathered(agent).dtype)

    return found | odd_loops(data, solution)


def odd_loops(data, solution):
    found, rank = {}, int(os.environ["RANK"])
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    agent = caden.Agent(model, optimizer, "caden", 4)  # mu_z = "auto"
    found["measured"] = agent.round
    fit(agent, model, optimizer, data, 800)
    agent.finish()
    found["auto"] = float((flat(model) - solution).abs().max())

    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    agent = caden.Agent(model, optimizer, "caden", 4, mu_z=0.5)
    for _ in range(150):  # rank 0 ends its rounds early
        fit(agent, model, optimizer, data, agent.steps + 2)
        if rank == 0:
            agent.skip()
        else:
            fit(agent, model, optimizer, data, agent.steps + 2)
    agent.finish()
    found["skipped"] = float((flat(model) - solution).abs().max())

    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    agent = caden.Agent(model, optimizer, "caden", 4, mu_z=0.5, hooks=False)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data[0]), data[1]) / 2
        loss.backward()
        agent.before_step()
        return loss

    for _ in range(400):
        optimizer.step(closure)
        agent.after_step()
    agent.finish()
    found["closure"] = float((flat(model) - solution).abs().max())
    return found


def frozen_bias():
    model = line(bias=True)
    model.bias.requires_grad_(False)
    return model


def mistakes():
    """What an agent says if it is used wrongly, each in one line."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    inputs, targets, _ = squares(world)
    data, found = (inputs[rank], targets[rank]), {}

    def attempt(name, action, model=None, make=sgd, **options):
        model = line() if model is None else model
        optimizer = make(model.parameters())
        try:
            agent = caden.Agent(model, optimizer, options.pop("method", "caden"), options.pop("every", 2), **options)
            action(agent, model, optimizer)
            found[name] = "nothing"
        except (caden.CadenError, caden.RunError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    def broken(agent, model, optimizer):
        fit(agent, model, optimizer, (data[0] * torch.nan, data[1]), 4)

    def scaled(agent, model, optimizer):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(data[0]).sum()).backward()
        scaler.step(optimizer)

    attempt("nan", broken, mu_z=0.5)
    attempt("closure", lambda a, m, o: o.step(lambda: None), mu_z=0.5)
    attempt(
        "added", lambda a, m, o: (o.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}), o.step()), mu_z=1.0
    )
    attempt("late hook", lambda a, m, o: (o.register_step_pre_hook(lambda *_: None), o.step()), mu_z=0.5)
    attempt("fused", scaled, make=lambda p: torch.optim.SGD(p, lr=0.05, fused=True), mu_z=0.5)
    attempt("models", lambda *_: None, model=line(bias=rank == 1), mu_z=0.5)
    attempt("graph", lambda *_: None, mu_z=0.5, graph=caden.graphs.ring(5))
    attempt("gradients", lambda *_: None, method="gt")
    attempt("momentum", lambda *_: None, method="kgt", make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    attempt("unequal", lambda *_: None, method="led", every="1s", alpha=0.05)
    attempt("every", lambda *_: None, every="soon")
    attempt("overlap", lambda *_: None, method="adapd", overlap=True, eta=1.0)
    attempt("parameter", lambda *_: None, mu=0.5)
    attempt("short", lambda a, m, o: a.finish(), every=20)
    attempt("thawed", lambda a, m, o: (m.bias.requires_grad_(True), o.step()), model=frozen_bias(), mu_z=0.5)
    attempt("copies", lambda *_: None, overlap=True, messages={"bits": 4}, mu_z=0.5)
    attempt("sleep", lambda *_: None, method="kgt", participation=0.5, alpha=0.05)
    attempt("state", lambda a, m, o: a.state_dict())
    attempt("scheduler", lambda a, m, o: (o.param_groups[0].update(lr=0.01), o.step()), method="kgt", alpha=0.05)
    attempt("skip", lambda a, m, o: a.skip(), method="led", alpha=0.05)
    return found


def forgotten():
    """What is said at exit if `finish` was not called; nothing may come after this."""
    model = line()
    optimizer = sgd(model.parameters())
    agent = caden.Agent(model, optimizer, "caden", 2, mu_z=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        atexit._run_exitfuncs()
    return [str(warning.message) for warning in caught if agent.agent == 0 and "finish" in str(warning.message)]


def peer():
    """A peer with a loop of its own; if it was killed, it continues."""
    folder, number, kind, steps = Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
    model = line() if kind == "squares" else network()
    make = (lambda p: torch.optim.SGD(p, lr=0.3)) if kind == "squares" else adamw
    optimizer = make(model.parameters())
    agent = caden.Agent(model, optimizer, fleet=folder / "FLEET.toml", agent=number, directory=folder / str(number))
    found = {"began": agent.steps}
    if kind == "squares":
        inputs, targets, solution = squares(6)
        while agent.steps < steps and not agent.is_over:  # all agents agree on when
            fit(agent, model, optimizer, (inputs[number], targets[number]), agent.steps + 1)
            time.sleep(0.002)
        agent.finish()
        found["error"] = float((flat(model) - solution).abs().max())
    elif kind == "lockstep":
        train(agent, model, optimizer, steps, after=lambda agent: time.sleep(0.02))
        agent.finish()
        found["row"] = digest(agent._recorder.run.state.x)
    else:
        train(agent, model, optimizer, steps, agents=6, stop=(folder / "stop").exists)
        agent.finish()
        inputs, targets = caden.data.load("digits")[1]
        found["accuracy"] = float((model.eval()(inputs).argmax(1) == targets).double().mean())
    return found


if __name__ == "__main__":
    found = globals()[sys.argv[1]]()
    sys.stdout.flush()
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(found))
    os._exit(0)
