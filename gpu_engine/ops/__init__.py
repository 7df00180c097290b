"""Operating the engine: where it runs on a machine, and what it logs, counts and traces.

Below front, sidecar and core, above api.
"""
