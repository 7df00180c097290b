"""The parser of a harness's flags.

Not responsible for: the flags (see each harness), the list of harnesses (see benchmarks/__main__.py).
"""

from __future__ import annotations

import argparse


def harness_parser(doc: str, examples: str) -> argparse.ArgumentParser:
    """Return a parser for a harness whose module begins with "`COMMAND`: DESCRIPTION". `examples` end its help."""
    command, _, description = doc.partition("\n\n")[0].partition("`: ")
    return argparse.ArgumentParser(
        prog=command.removeprefix("`").partition(" --")[0],
        description=description[:1].upper() + description[1:],
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
