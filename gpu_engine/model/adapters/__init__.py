"""Adapters: their files, their places in a model, and their matrices while they are loaded.

`pool.AdapterPool` belongs to a loaded model on a CPU, `device_pool.DeviceAdapterPool` to one on a GPU, and
`registry.AdapterRegistry` to an engine.
"""
