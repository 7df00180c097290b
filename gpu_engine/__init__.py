"""The engine process of Lockstep: it serves requests over gRPC and runs the model; the grammar is in another process.

Rooms, from the top: cli; server; front, sidecar and core; drafters and ops; step; model; api. Each imports the rooms
below it alone (pyproject.toml checks that).
"""
