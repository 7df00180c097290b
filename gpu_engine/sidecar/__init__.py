"""The engine's side of the grammar process, on the event loop: the child process, the connection, compilations, slots.

`process.GrammarProcess` assembles the parts. The engine reaches them through `api.ports.GrammarPort`, and they report
to the engine through `api.ports.GrammarEvents`.
"""
