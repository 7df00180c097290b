"""SpecGrammarBench: seven questions to a server that answers under grammars, with or without drafts.

Invariant: every question goes through the server's public API, and jsonschema and Python's regular expressions judge
the answers. The benchmark needs no installed engine.
"""

from lockstep_bench.cases import DATA_VERSION

VERSION = "0.4.0"

__all__ = ["DATA_VERSION", "VERSION"]
