"""Planning by simulated time, and measuring machines and links for it."""

import json
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from caden import CadenError, Clock
from caden.experiments import calibrate
from caden.experiments import plan as plans
from caden.experiments.config import experiment
from caden.experiments.plan import Variant, plan
from caden.experiments.store import RunStore
from test_cli import call  # noqa: F401  (a fixture)

CONVEX = [
    *("problem.name=quadratic", "problem.agents=6", "problem.dim=4", "graph.name=ring", "warmup.steps=0", "rounds=600"),
    *("target=0.5", "tolerance=1e-3", "method.mu_z=0.5", "compare.gt.alpha=0.1", "clock.compute=0.1"),
    *("clock.latency=0.01", "clock.bandwidth=2000.0"),
]


def convex(*settings):
    config = experiment(None, [*CONVEX, *settings])
    return config.model_copy(update={"target": None})


def test_a_plan_predicts_the_time_at_other_bandwidths(tmp_path):
    store, config = RunStore(tmp_path, progress=False), convex()
    found = plan(config, store, ["caden", "gt"], ["wait"], ["auto", 4], [{}, {"bits": 8}])
    assert [v.time for v in found.variants] == sorted(v.time for v in found.variants)
    assert all(v.reached for v in found.variants) and not found.skipped
    for variant in (found.variants[0], found.variants[-1]):
        steps = {} if variant.local_steps == "" else {"local_steps": variant.local_steps}
        messages = {"messages": {"bits": 8}} if variant.messages else {}
        for factor in (1.0, 0.3):
            clock = {**config.clock, "bandwidth": 2000.0 * factor}
            table = {"name": variant.method, **({"mu_z": 0.5} if variant.method == "caden" else {"alpha": 0.1})}
            same = config.model_copy(update={"clock": clock, "method": table, **steps, **messages})
            end = same.run(progress=False).rows[-1]
            assert end["time"] == pytest.approx(variant.time_at(factor), rel=1e-9)
            assert end["gradients"] == variant.gradients and end["bytes"] == 6 * variant.bytes_per_agent
    runs = sorted(path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json"))
    assert plan(config, RunStore(tmp_path, progress=False), ["caden", "gt"], ["wait"], ["auto", 4], [{}, {"bits": 8}])
    assert runs == sorted(path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json"))  # none was run again
    assert found.picture.exists()


def test_what_a_method_does_not_allow_is_listed(tmp_path):
    store = RunStore(tmp_path, progress=False)
    found = plan(convex("rounds=2"), store, ["caden", "gt", "newton_tracking"], plans.MODES, [3])
    assert found.skipped["gt, free"] == "needs a single exchange over arcs"
    assert "caden, free, bits 4" not in found.skipped
    late = plan(convex("rounds=2", "messages.delay=1"), store, ["caden"], ["wait", "free"], [3])
    assert late.skipped["caden, free, bits 4"] == "the mode has delays of its own"
    assert not any(v.reached for v in found.variants) and found.best_from == []
    flaky = plan(convex("rounds=2", "links=0.5"), store, ["caden"], ["wait"], [3])
    assert flaky.skipped == {"caden, wait, bits 4": "short messages need links that stay"}
    lossy = plan(convex("rounds=2", "messages.loss=0.1"), store, ["gt"], ["wait"], [3])
    assert lossy.skipped == {"gt, wait, bits 4": "short broadcasts must all arrive"}
    with pytest.raises(CadenError, match="no `\\[clock\\]`"):
        plan(experiment(None, ["target=0.5"]), store)
    with pytest.raises(CadenError, match="needs a `target`"):
        plan(convex().model_copy(update={"tolerance": None}), store)


def test_the_fastest_by_bandwidth_is_the_smallest_of_all():
    def variant(name, fixed, sending):
        times = tuple(fixed + sending / factor for factor in plans.FACTORS)
        return Variant(name, 5, "wait", "", True, fixed + sending, 1.0, 1, 1, times)

    variants = [variant("a", 1.0, 9.0), variant("b", 4.0, 2.0), variant("c", 9.0, 0.5), variant("d", 10.0, 8.0)]
    best = plans._envelope(variants)
    edges = [factor for factor, _ in best] + [10.0]
    for (low, label), high in zip(best, edges[1:]):
        for factor in (low * 1.001, (low * high) ** 0.5, high * 0.999):
            assert min(variants, key=lambda v: v.time_at(factor)).label == label
    assert [label[0] for _, label in best] == ["c", "b", "a"]
    assert edges[1:3] == pytest.approx([1.5 / 5, 7 / 3])


def test_deadlines_and_participation_are_tried_side_by_side(tmp_path):
    store, config = RunStore(tmp_path, progress=False), convex()
    found = plan(config, store, ["caden"], ["wait", "deadline"], [4], [{}], [0.5, 1.0], [1.0, 0.5])
    expected = {
        f"caden, {mode}, {share} awake, 4 steps" for mode in ("deadline 0.5", "deadline 1") for share in (1, 0.5)
    }
    assert {v.label for v in found.variants} == expected | {
        "caden, wait, 1 awake, 4 steps",
        "caden, wait, 0.5 awake, 4 steps",
    }
    for variant in found.variants:
        mode, _, quantile = variant.mode.partition(" ")
        limit = {"deadline": {"quantile": float(quantile)}} if quantile else {}
        changed = {"clock": {**config.clock, "mode": mode, **limit}, "participation": float(variant.awake.split()[0])}
        end = config.model_copy(update={**changed, "local_steps": 4}).run(progress=False).rows[-1]
        assert end["time"] == variant.time


def test_the_command_prints_a_plan_to_a_tolerance(call, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    settings = [word for text in CONVEX if not text.startswith("target") for word in ("--set", text)]
    command = [
        "plan",
        *settings,
        "--methods",
        "caden,gt",
        "--modes",
        "wait",
        "--steps",
        "4",
        "--bits",
        "",
        "--jobs",
        "1",
    ]
    code, out, _ = call(*command)
    assert code == 0 and "a relative error of 0.001" in out and "in MB/s" in out and "*" in out
    code, out, _ = call(*command, "--json")
    found = json.loads(out)
    times = {v["label"]: v["time"] for v in found["variants"]}
    assert code == 0 and found["best"] == min(times, key=times.get) and all(times.values())
    assert found["tolerance"] == 0.001 and Path(found["picture"]).is_file()
    assert found["best_from"][0]["bandwidth"] == pytest.approx(2000 * found["best_from"][0]["bandwidth_factor"])


# Calibration.


def test_a_machine_is_measured_by_its_gradients_and_the_rest_of_a_step(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time, caden\n"
        "def problem(agents=4, hosted=None):\n"
        "    whole = caden.problems.quadratic(agents=agents, dim=3)\n"
        "    class Slow(type(whole)):\n"
        "        def value_and_grad(self, x, rows=None):\n"
        "            time.sleep(0.02)\n"
        "            return super().value_and_grad(x, rows)\n"
        "    part = whole if hosted is None else whole.take(hosted)\n"
        "    part.__class__ = Slow\n"
        "    return part\n"
    )
    name = f"problem.name={tmp_path / 'slow.py'}:problem"
    config = experiment(None, [name, "problem.agents=4", "graph.name=ring", "local_steps=3", "method.mu_z=0.5"])
    machine = calibrate.measure_machine(config, agent=2, steps=4)
    assert 0.02 <= machine.compute < 0.06
    assert 0 < machine.overhead < 1.0 and 0 <= machine.serve < 1.0
    with pytest.raises(CadenError, match="got 4"):
        calibrate.measure_machine(config, agent=4)


def test_a_link_is_measured_one_way():
    """The other side answers 20 ms late, and sends 4 MB/s."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        line, _ = server.accept()
        with line:
            while request := line.recv(8, socket.MSG_WAITALL):
                left = int.from_bytes(request, "big")
                time.sleep(0.02)
                while left:
                    line.sendall(bytes(min(left, 40_000)))
                    left -= min(left, 40_000)
                    time.sleep(0.01 if left else 0)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    found = calibrate.measure_link(f"127.0.0.1:{server.getsockname()[1]}")
    thread.join(10)
    server.close()
    assert 0.01 <= found.latency < 0.02
    assert 1e6 < found.bandwidth <= 4.2e6
    clock = calibrate.as_clock(calibrate.Machine(0.12345, 0.01, 0.002), found, "free")
    assert clock["compute"] == 0.123 and clock["serve"] == 0.002 and clock["pull"] and clock["mode"] == "free"
    assert clock["up"] == pytest.approx(found.bandwidth, rel=0.01) and Clock.from_spec(clock)


@pytest.mark.parametrize("mode", ["lockstep", "free"])
def test_the_default_method_is_measured_in_a_fleet(call, tmp_path, mode):  # noqa: F811
    """Its agents agree on a penalty by maxima, which are shorter than models."""
    pytest.importorskip("zenoh")
    words = ["problem.name=quadratic", "problem.agents=4", "graph.name=ring", "local_steps=3", "rounds=5"]
    ends = [f"tcp/127.0.0.1:{port}" for port in (1, 2, 3, 4)]  # the command takes free ones
    words += [f"fleet.endpoints={ends}", "fleet.format=1", "fleet.name=m", f"fleet.mode={mode}"]
    settings = [word for text in words for word in ("--set", text)]
    code, out, errors = call("clock", "measure", *settings, "--steps", "3", "--json")
    assert code == 0, errors
    clock = json.loads(out)["clock"]
    assert clock["compute"] > 0 and clock.get("mode") == ("free" if mode == "free" else None)


def test_answering_ends_by_itself(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    served = []
    thread = threading.Thread(target=lambda: served.append(calibrate.answer("127.0.0.1", port, 1.5)))
    thread.start()
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.02)
    line = calibrate.measure_link(f"127.0.0.1:{port}")
    assert 0 < line.latency < 0.5 and line.bandwidth > 1e6
    with socket.create_connection(("127.0.0.1", port), 1) as greedy:
        greedy.sendall((1 << 40).to_bytes(8, "big"))  # more than one may ask for
        assert greedy.recv(1) == b""
    thread.join(10)
    assert served == [3]


def test_the_fastest_at_a_bandwidth_is_so_when_it_is_run_there(tmp_path):
    """One agent computes slowly and the others send slowly, so that the time is not one line in 1 / bandwidth."""
    words = ["problem.name=quadratic", "problem.agents=6", "problem.dim=20", "graph.name=ring", "method.mu_z=0.5"]
    words += ["clock.compute=[1.0,0.1,0.1,0.1,0.1,0.1]", "clock.up=[1e9,200.0,200.0,200.0,200.0,200.0]"]
    config = experiment(None, [*words, "warmup.steps=0", "rounds=600", "tolerance=1e-3"])
    config = config.model_copy(update={"target": None})
    found = plan(config, RunStore(tmp_path, progress=False), ["caden"], ["wait"], [3], [{}, {"bits": 4}])
    for variant in found.variants:
        messages = {"bits": 4} if variant.messages else {}
        for factor in (0.1, 10.0):
            up = [value * factor for value in config.clock["up"]]
            same = config.model_copy(update={"clock": {**config.clock, "up": up}, "messages": messages})
            end = same.model_copy(update={"local_steps": 3}).run(progress=False).rows[-1]
            assert end["time"] == pytest.approx(variant.time_at(factor), rel=1e-9)


def test_a_variant_that_is_refused_does_not_end_the_plan(tmp_path):
    (tmp_path / "own.py").write_text("from caden.methods import gt\n\ndef mine(alpha=0.1):\n    return gt(alpha)\n")
    store, name = RunStore(tmp_path / "plan", progress=False), f"{tmp_path / 'own.py'}:mine"
    found = plan(convex(), store, [name, "caden"], ["wait", "free"], [4], [{}])
    assert {v.mode for v in found.variants if v.method == name} == {"wait"}
    assert any("single exchange over arcs" in why for why in found.skipped.values())
    with pytest.raises(CadenError, match="local_steps"):
        plan(convex(), RunStore(tmp_path / "other", progress=False), ["caden"], ["free"], [0], [{}])


def test_a_run_that_cannot_be_free_leaves_no_directory(call, tmp_path):  # noqa: F811
    words = ["problem.name=quadratic", "clock.mode=free", "method.name=gt", "warmup.steps=0"]
    out = tmp_path / "g"
    for _ in range(2):
        code, _, errors = call("run", *(w for text in words for w in ("--set", text)), "--out", str(out))
        assert code == 2 and "single exchange" in errors and len(errors.splitlines()) == 1 and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--set", "problem.name=quadratic", "--set", "clock.compute=0.1"], "set `tolerance` instead"),
        (["plan"], "no `[clock]`"),
        (["plan", "--set", "clock.compute=0.1", "--modes", "fast"], "mode"),
        (["plan", "--set", "clock.compute=0.1", "--steps", "few"], "`--steps` takes numbers"),
        (["plan", "--set", "clock.compute=0.1", "--methods", "cadan"], "did you mean 'caden'"),
        (["plan", "--set", "clock.speed=0.1"], "clock.speed"),
        (["clock", "measure", "--agent", "99"], "must lie in 0..19"),
        (["clock", "measure", "--steps", "1", "--link", "nowhere"], "HOST:PORT"),
        (["clock", "answer", "--seconds", "-1"], "positive"),
        (["clock", "answer", "--port", "70000"], "1..65535"),
        (["plan", "--set", "clock.compute=0.1", "--methods", ""], "at least one method"),
        (["plan", "--set", "clock.compute=0.1", "--deadlines", "half"], "`--deadlines` takes numbers"),
        (["plan", "--set", "clock.compute=0.1", "--participation", "1.5"], "participation"),
        (["plan", "--set", "clock.compute=0.1", "--bits", "x"], "`--bits` takes numbers"),
        (["plan", "--set", "clock.compute=0.1", "--modes", "free", "--methods", "gt"], "No variant can run: gt"),
        (["run", "--set", "clock.mode=free", "--set", "clock.compute=0.0"], "clock.compute"),
        (["run", "--set", "clock.compute={name='lognormal', mean=1.0, spread=40.0}"], "(0, 10]"),
    ],
)
def test_wrong_input_gets_one_line(call, arguments, message):  # noqa: F811
    code, _, errors = call(*arguments)
    assert code == 2 and message in errors and len(errors.splitlines()) == 1


@pytest.mark.slow
def test_a_fleet_takes_as_long_as_predicted():
    """Six hosts in namespaces, one slow, in lockstep and free: within 15 % (see the script)."""
    script = Path(__file__).parents[1] / "benchmarks" / "fleet_time.py"
    if lacks := runpy.run_path(str(script))["missing"]():
        pytest.skip(lacks)
    done = subprocess.run(
        [sys.executable, script, "--modes", "lockstep", "free"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    found = re.search(r"largest deviation: ([\d.]+|inf)%", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) < 15, done.stdout
