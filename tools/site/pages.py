"""From a file of the checkout to a page of the site.

Links of the sources lead to files of the checkout. On the site a link to another page is relative to it. A link to any
other file leads to the repository, or is plain text where no address of one is known.

Not responsible for: whether a link's target exists (tests/docs/test_snippets.py, `make docs`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "SECURITY.md": "security.md",
    "SUPPORT.md": "support.md",
    "client/README.md": "client.md",
    "lockstep_grammar/README.md": "other_engines.md",
    "specgrammarbench/README.md": "bench/how.md",
}
"""Sources outside of `docs/`, and the page of each."""
_FENCE = re.compile(r"^(```+)([^\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<shown>!?\[[^\]]*\])\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")


def sources(root: Path) -> dict[str, str]:
    """Return the page of each source, both as paths: the source's in the checkout, the page's on the site."""
    in_docs = [path.relative_to(root) for path in (root / "docs").rglob("*") if path.is_file()]
    return {str(path): str(path.relative_to("docs")) for path in sorted(in_docs)} | ELSEWHERE


def converted(text: str, source: str, pages: dict[str, str], repository: str) -> str:
    """Return the Markdown of a page.

    Args:
        text: the Markdown of the source.
        source: its path in the checkout.
        pages: what `sources` returned.
        repository: address of the files of the checkout, such as `https://github.com/a/b/blob/main`; "" if unknown.
    """
    parts, end = [], 0
    for found in _FENCE.finditer(text):
        language = found[2].split(maxsplit=1)[0] if found[2].strip() else "text"
        prose = text[end : found.start()]
        parts += [_prose(prose, source, pages, repository), f"{found[1]}{language}\n{found[3]}{found[1]}"]
        end = found.end()
    # The log is for maintainers, and longer than all other pages together.
    front = "---\nsearch:\n  exclude: true\n---\n\n" if source.startswith("docs/log/") else ""
    return "".join([front, *parts, _prose(text[end:], source, pages, repository)])


def _prose(text: str, source: str, pages: dict[str, str], repository: str) -> str:
    def moved(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        path = os.path.normpath(PurePosixPath(source).parent / target)
        if path in pages:
            target = os.path.relpath(pages[path], PurePosixPath(pages[source]).parent)
            return f"{link['shown']}({target}{anchor})"
        return f"{link['shown']}({repository}/{path})" if repository else link["shown"][1:-1]

    return _LINK.sub(moved, text)
