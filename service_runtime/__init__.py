"""What both processes share at run time: settings, log lines, usable cores, single flight.

Invariant: a leaf of the imports; nothing here imports another package of the project.
"""
