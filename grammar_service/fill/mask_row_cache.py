"""The rows of one slot that stand in the mask memory, and behind which tokens each of them stands.

A row stays where it was written, in the half of the memory that its sequence names, until another one of the slot is
written there. So a row that came too late for its step, or for a draft, serves the record that asks for it again. The
invariant: a row is found only behind the same tokens of the same owner, and only where its words still are. Touched by
whoever has the slot's lane. Not here: who fills rows and copies words (worker.py).

A path is the drafts in front of a row: the tokens between the end of what the newest record committed and the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared_mem.grammar_end import Record
from shared_mem.layout import RowKind

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """One row: where its words are, and its answer."""

    half: int
    row: int
    kind: int
    forced: int


class Noted(NamedTuple):
    """The rows of one answer, not yet looked at one by one."""

    half: int
    drafts: Path
    first: int
    """The first row that was wanted; all behind it were."""
    kinds: list[int]
    forced: list[int]


class MaskRowCache:
    """See above. A slot's matcher made anew begins with none."""

    def __init__(self) -> None:
        self._gen, self._end = -1, 0
        self._rows: dict[Path, Standing] = {}
        self._paths: dict[tuple[int, int], Path] = {}
        """(half, row) -> what stands there."""
        self._filled: set[Path] = set()
        """Rows that were filled, whether or not they stand still."""
        self._noted: Noted | None = None
        """All that there is, when it is set: most answers are never asked for again, and cost no entries."""

    def is_clean(self, record: Record) -> bool:
        """Do what `follow` does, and say whether nothing is left: no row would be found, or computed again."""
        if self._noted is not None:
            known = self._end - record.commit_pos
            new = record.committed[known:] if known >= 0 and record.slot_gen == self._gen else ()
            if new and self._noted.drafts[: len(new)] != new:
                self._noted, self._end = None, record.commit_pos + len(record.committed)
                return True
        self.follow(record)
        return not self._rows and not self._filled

    def note(self, noted: Noted) -> None:
        """Note the rows of a whole answer, which were computed. Only when `is_clean` has just said so."""
        self._noted = noted

    def _settle(self) -> None:
        noted, self._noted = self._noted, None
        if noted is None:
            return
        for row in range(noted.first, len(noted.drafts) + 1):
            if noted.kinds[row] != RowKind.DEFER:
                self._filled.add(noted.drafts[:row])
                at = Standing(noted.half, row, noted.kinds[row], noted.forced[row])
                self.put(noted.drafts[:row], at)

    def follow(self, record: Record) -> None:
        """Go to the end of what the record commits; rows that other tokens led to are forgotten."""
        self._settle()
        known = self._end - record.commit_pos
        if record.slot_gen != self._gen or not 0 <= known <= len(record.committed):
            self._gen, new = record.slot_gen, None
        else:
            new = record.committed[known:]
        self._end = record.commit_pos + len(record.committed)
        if new is None:
            self._rows, self._filled = {}, set()
        elif new:
            count = len(new)
            self._rows = {path[count:]: rows for path, rows in self._rows.items() if path[:count] == new}
            self._filled = {path[count:] for path in self._filled if path[:count] == new}
        else:
            return
        self._paths = {(standing.half, standing.row): path for path, standing in self._rows.items()}

    def find(self, path: Path) -> Standing | None:
        """Return the row behind these tokens."""
        return self._rows.get(path)

    def clear(self, half: int, rows: int) -> None:
        """Words of other rows are written there from now on; `rows` is a set of bits."""
        self._settle()
        for row in range(rows.bit_length()):
            if rows >> row & 1:
                self._evict(half, row)

    def put(self, path: Path, standing: Standing) -> None:
        """Note a row whose words are there; one behind the same tokens elsewhere is not needed any more."""
        self._evict(standing.half, standing.row)
        before = self._rows.get(path)
        if before is not None:
            del self._paths[before.half, before.row]
        self._rows[path] = standing
        self._paths[standing.half, standing.row] = path

    def fill(self, path: Path) -> bool:
        """Note that the row behind these tokens was computed; True when it had been computed before."""
        again = path in self._filled
        self._filled.add(path)
        return again

    def _evict(self, half: int, row: int) -> None:
        path = self._paths.pop((half, row), None)
        if path is not None:
            del self._rows[path]

    def __repr__(self) -> str:
        return f"<StandingRows {len(self._rows)} behind {self._end} tokens of owner {self._gen}>"
