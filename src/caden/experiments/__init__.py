"""What a TOML file says, and what is made of many runs: comparisons, tuning, estimates, benchmarks, fleets."""
