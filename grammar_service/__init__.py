"""The grammar process (the sidecar): it compiles grammars, owns every matcher, and fills mask rows in shared memory.

Rooms, each of which imports only those below it: `server`, `servicer` and `metrics` (two sockets, RPCs); `compile`
(grammar text to compiled grammar) and `fill` (records to mask rows); `completion` (ends answers in time); `backends`
(the matcher libraries); `grammar` (values and text); `errors`.

Invariant: nothing here imports the engine, and with the `llguidance` backend nothing loads torch.
"""
