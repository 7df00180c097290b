"""SpecGrammarBench: seven questions to a server that answers under grammars, with or without drafts.

Invariant: everything is asked through the server's public API, and judged by jsonschema and by the regular expressions
of Python. No engine needs to be installed here.
"""

from lockstep_bench.cases import DATA_VERSION

VERSION = "0.4.0"

__all__ = ["DATA_VERSION", "VERSION"]
