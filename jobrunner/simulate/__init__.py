"""The engine's own scheduler and loop in virtual time, with a cost for each step."""
