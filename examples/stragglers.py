"""How long will it take? 20 agents, four of them ten times slower, on links of 50 ms and 1 MB/s."""

import caden

graph = caden.graphs.erdos_renyi(20, 0.2, edges=37, seed=0)
train, test = caden.data.load("digits")
model = caden.problems.mlp(inputs=64, outputs=10, hidden=32)
problem = caden.problems.classification(model, train, test, agents=20)

methods = {
    "caden": caden.methods.caden(mu_z=0.05),
    "gt": caden.methods.gt(alpha=0.5),
    "adapd": caden.methods.adapd(eta=1.0),
}
modes = {"wait": {}, "deadline": {"deadline": {"quantile": 0.7}}, "free": {}}
slow_and_fast = [1.0] * 4 + [0.1] * 16  # seconds per gradient

for name, method in methods.items():
    for mode, limit in modes.items():
        if mode == "free" and name != "caden":
            continue  # these exchange more than one message over an arc
        clock = caden.Clock(slow_and_fast, latency=0.05, bandwidth=1e6, mode=mode, **limit)
        options = {"local_steps": 5, "target": 0.93, "stop_at_target": True, "progress": False}
        result = caden.simulate(method, problem, graph, rounds=100, clock=clock, **options)
        end, busy = result.rows[-1], result.agents["busy"]
        print(
            f"{name:5} {mode:8}: {end['accuracy']:.0%} after {end['time']:5.1f} s and {end['communications']:6,} "
            f"communications; slow agents computed {busy[:4].mean():4.0%} of the time, fast ones {busy[4:].mean():4.0%}"
        )
