"""Train a network with CADEN over 20 agents; half of them sleep in each round."""

import caden

graph = caden.graphs.erdos_renyi(20, 0.2, edges=37, seed=0)
train, test = caden.data.load("digits")
model = caden.problems.mlp(inputs=64, outputs=10, hidden=32)
problem = caden.problems.classification(model, train, test, agents=20)

method = caden.methods.caden(relax=0.8)
result = caden.simulate(method, problem, graph, rounds=30, participation=0.5, local_steps=5, seed=0)

columns = ["round", "communications", "gradients", "accuracy", "consensus"]
print(result.history[columns].iloc[::6].to_string(index=False))
print(f"mean accuracy of the local models: {result.history.accuracy.iloc[-1]:.1%}")
