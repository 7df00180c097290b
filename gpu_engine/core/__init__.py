"""The engine's thread: its loop, the scheduler and the KV cache's pages, guided slots, and the execution of steps.

`engine.Engine` is the only module that other threads use. `loop.EngineLoop.run_iteration` is the outline of the work.
"""
