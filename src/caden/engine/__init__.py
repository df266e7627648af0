"""How a run goes: one loop, what it measures, what it leaves behind."""
