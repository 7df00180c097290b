"""What the processes share at run time: settings, log lines, usable cores, threads and clocks, single flight, watched
files, bearer tokens, processes that die with their parent.

Invariant: a leaf of the imports; nothing here imports another package of the project.
"""
