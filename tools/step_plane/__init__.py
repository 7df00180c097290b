"""Checks the protocol of the step plane: the model of shared_mem/model in all interleavings, and seeded faults.

Invariant: a fault is one change of one place, by a name that the model, the copy of the C code and the tables share.
For developers: nothing here runs in a server.
"""
