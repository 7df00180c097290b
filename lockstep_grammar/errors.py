"""Errors of the grammar client, one small tree. Each ends one answer; the host engine goes on.

GrammarError
|- InvalidGrammar      the grammar is wrong, or a keyword cannot be enforced; the message names the place
|- LimitExceeded       a stated limit of the compilation; the message names its setting
|- Unavailable         no grammar process answers within `wait_s`
`- MatcherFailed       the answer cannot go on: no legal token, a row that takes too long, a library that crashes
"""

from __future__ import annotations


class GrammarError(Exception):
    """Base of every error that `lockstep_grammar` raises on purpose."""


class InvalidGrammar(GrammarError, ValueError):
    """The grammar is wrong, or it has a part that cannot be enforced."""


class LimitExceeded(GrammarError):
    """The compilation needs more than a limit allows."""


class Unavailable(GrammarError):
    """The grammar process does not answer in time."""


class MatcherFailed(GrammarError):
    """The answer cannot go on under its grammar."""
