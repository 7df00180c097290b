"""Writes the verdicts as a section of docs/grammars.md.

Invariant: the section is a function of only the verdicts and the versions, so equal behaviour gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.enforced.formats import FORMATS
from tools.enforced.measure import KEYWORDS, Outcome, Verdict

_HEAD = """## What each backend enforces

`python -m tools.enforced --write` writes this section from the behaviour of the libraries, and a test fails when they
differ. Versions: {versions}. The sections above describe what holds for both backends.

Every case has texts that satisfy its schema and texts that violate it. No text that violates it is accepted silently.

- **yes**: the grammar accepts every text that satisfies the schema, and no other.
- **stricter**: no text that violates the schema is accepted, and some that satisfy it are rejected, as in the example.
- **verified**: refused as the next row says. With `unenforced = UNENFORCED_VERIFY` no text that
  violates the schema is accepted, because the answer is [checked](#verified-answers).
- **refused**: `INVALID_ARGUMENT` names the keyword and its place. With `allow_unenforced` the grammar is accepted
  without the keyword, and a warning in the response names it.
- **annotation**: the keyword has no effect, as JSON Schema says of formats that are not known, and a warning in the
  response names it. With the setting `strict_formats` of the grammar process it is refused.
- **no**: refused with `allow_unenforced` too. The library cannot read the schema, or no answer could satisfy it.

The backend `auto` chooses the first backend that enforces the whole grammar.

{counts}
### Enforced keywords

{keywords}

### Enforced formats

Both backends read the same patterns; [formats](#formats) says from which documents. The last two columns show texts of
the right form that a strict validator rejects and the backend accepts. Texts of another form are rejected.

{formats}
"""

_WORD = {
    Outcome.ENFORCED: "yes",
    Outcome.STRICTER: "stricter",
    Outcome.VERIFIED: "verified",
    Outcome.REFUSED: "refused",
    Outcome.ANNOTATION: "annotation",
    Outcome.IMPOSSIBLE: "no",
    Outcome.SILENT: "**silently accepts**",
}


def section(verdicts: Mapping[str, Sequence[Verdict]], versions: Mapping[str, str]) -> str:
    """Return the section for the verdicts of each backend, in the order of the cases."""
    names = list(verdicts)
    keywords = [["keyword", "use", *names]]
    formats = [["format", *names, *(f"{name} accepts" for name in names)]]
    for row in zip(*verdicts.values(), strict=True):
        case = row[0].case
        cells = [_cell(verdict) for verdict in row]
        if case in FORMATS:
            formats.append([case.use, *cells, *(_code(verdict.beyond) for verdict in row)])
        else:
            keywords.append([f"`{case.keyword}`", _escaped(case.use), *cells])
    return _HEAD.format(
        versions=", ".join(f"{name} {versions[name]}" for name in names),
        counts=_counts(verdicts),
        keywords=_table(keywords),
        formats=_table(formats),
    )


def _counts(verdicts: Mapping[str, Sequence[Verdict]]) -> str:
    rows = [
        ["of " + str(len(KEYWORDS) + len(FORMATS)) + " cases", *(_WORD[o] for o in Outcome if o is not Outcome.SILENT)]
    ]
    for name, each in verdicts.items():
        found = [str(sum(v.outcome is o for v in each)) for o in Outcome if o is not Outcome.SILENT]
        rows.append([name, *found])
    return _table(rows) + "\n"


def _cell(verdict: Verdict) -> str:
    word = _WORD[verdict.outcome]
    if verdict.outcome in (Outcome.STRICTER, Outcome.SILENT) and verdict.texts:
        return f"{word}: {_code(verdict.texts[:1])}"
    return word


def _code(texts: Sequence[str]) -> str:
    # Control characters and characters beyond ASCII are shown as escapes.
    shown = ["".join(c if " " <= c < "\x7f" else f"\\u{ord(c):04x}" for c in text) for text in texts]
    return ", ".join("`" + (text if len(text) < 40 else text[:36] + "...") + "`" for text in map(_escaped, shown))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
