"""What both processes start with: settings, log lines, and the number of usable cores.

A leaf: it imports no other package of this project.
"""
