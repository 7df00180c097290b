"""The grammar process (the sidecar): it compiles grammars, owns every matcher, and fills mask rows in shared memory.

Invariant: nothing here imports the engine, and with the `llguidance` backend nothing loads torch.
"""
