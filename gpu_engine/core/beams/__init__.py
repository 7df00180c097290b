"""Beam search: the pure decision, and the groups of running sequences that carry it out.

`search.py` decides which beams go on. `edits.py` says what a request's bans, biases and penalties make of
log-probabilities. `groups.py` owns the groups: each beam is a running sequence with its own slot, pages and
matcher, and takes part in the batch like any other; a step gives it candidates in place of tokens.

Not responsible for: computing candidates (see kernels/logprobs.py), slots and pages (see scheduler.py), matchers
(see grammar_slots.py).
"""
