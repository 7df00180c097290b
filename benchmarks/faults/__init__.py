"""Behaviour under attack: hostile grammars, random input, and a grammar process that is killed repeatedly."""
