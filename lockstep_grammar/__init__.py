"""The grammar process for other engines: masks of a grammar, computed in a process that may die.

`client.Grammars` starts the process, compiles grammars and makes matchers. `vllm` and `transformers` adapt it to these
engines. Invariant: no module imports torch or a host engine before an adapter is used, and none imports `gpu_engine`.
"""

from lockstep_grammar.client import Compiled, Grammars, Kind, Limits, Matcher
from lockstep_grammar.errors import GrammarError, InvalidGrammar, LimitExceeded, MatcherFailed, Unavailable

__all__ = [
    "Compiled",
    "GrammarError",
    "Grammars",
    "InvalidGrammar",
    "Kind",
    "LimitExceeded",
    "Limits",
    "Matcher",
    "MatcherFailed",
    "Unavailable",
]
