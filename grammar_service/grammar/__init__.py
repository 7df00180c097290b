"""The room of the grammar as a value: what a grammar, a vocabulary and a mask row are, before any library is involved.

It imports no matcher library and no other room of the grammar process.
"""
