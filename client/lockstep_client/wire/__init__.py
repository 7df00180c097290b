"""The messages of `lockstep.engine.v1`, generated: `python -m tools.client_wire --write` in the project's checkout."""
