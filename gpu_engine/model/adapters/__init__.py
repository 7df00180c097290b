"""Adapters: their files, their places in a model, and their matrices while they are loaded.

`pool.AdapterPool` belongs to a loaded model, and `registry.AdapterRegistry` to an engine.
"""
