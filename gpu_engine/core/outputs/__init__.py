"""The tensors that running sequences return: which rows are computed next, and the tokens that wait for their rows.

Exports: `OutputStreams`, which the loop runs once an iteration while a request asks for tensors.
"""
