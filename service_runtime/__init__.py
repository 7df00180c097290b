"""What the processes share at run time: settings, log lines, usable cores, threads and clocks, tasks with an owner,
single flight, watched files, bearer tokens, processes that die with their parent, and when an answer repeats itself.

Invariant: a leaf of the imports; nothing here imports another package of the project.
"""
