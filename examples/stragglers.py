"""How long will it take? 20 agents, four of them ten times slower, on links of 50 ms and 1 MB/s, in three modes."""

import caden

graph = caden.graphs.erdos_renyi(20, 0.2, edges=37, seed=0)
train, test = caden.data.load("digits")
model = caden.problems.mlp(inputs=64, outputs=10, hidden=32)
problem = caden.problems.classification(model, train, test, agents=20)

slow_and_fast = [1.0] * 4 + [0.1] * 16  # seconds per gradient
clocks = {
    "wait": caden.Clock(slow_and_fast, latency=0.05, bandwidth=1e6),
    "deadline": caden.Clock(slow_and_fast, latency=0.05, bandwidth=1e6, mode="deadline", deadline={"quantile": 0.7}),
    "free": caden.Clock(slow_and_fast, latency=0.05, bandwidth=1e6, mode="free"),
}
for mode, clock in clocks.items():
    method = caden.methods.caden(mu_z=0.05)
    options = {"local_steps": 5, "target": 0.93, "stop_at_target": True, "progress": False}
    result = caden.simulate(method, problem, graph, rounds=60, clock=clock, **options)
    end, agents = result.rows[-1], result.agents
    print(
        f"{mode:8}: 93 % after {end['time']:.1f} s and {end['communications']:,} communications; "
        f"slow agents computed {agents['busy'][:4].mean():.0%} of the time, fast ones {agents['busy'][4:].mean():.0%}"
    )
