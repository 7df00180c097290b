"""The votes of kernels/native/suffix.c are those of a plain search, and a ring keeps the newest tokens."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field

import pytest
import torch

from kernels.suffix import MIN_CAPACITY, SEPARATOR, BareWords, SuffixLanes, SuffixRing, SuffixSlots, SuffixVotes

SLOTS, ROWS, LENGTH = 4, 8, 160
MAX_WORD = 8
Spellings = dict[int, tuple[int, ...]]
BASE, WRITTEN, UNKNOWN, WORTH, MAX_RING_PLACES, MAX_SEARCHES = 4.0, 16.0, 32.0, 0.1, 64, 2


def ints(*shape: int, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32)


@dataclass
class Bench:
    """The arrays of one engine, and its votes."""

    min_run: int = 1
    max_run: int = 4
    words: BareWords | None = None
    lanes: SuffixLanes = field(init=False)
    slots: SuffixSlots = field(init=False)
    votes: SuffixVotes = field(init=False)

    def __post_init__(self) -> None:
        self.lanes = SuffixLanes(
            slots_B=torch.arange(SLOTS, dtype=torch.int32),
            num_emitted_B=ints(SLOTS, value=1),
            num_jump_forward_B=ints(SLOTS),
            num_verified_B=ints(SLOTS),
            num_accepted_B=ints(SLOTS),
        )
        self.slots = SuffixSlots(
            history_SL=ints(SLOTS, LENGTH + ROWS, value=77),
            length_S=ints(SLOTS, value=1),
            prompt_length_S=ints(SLOTS, value=1),
            draft_limit_S=ints(SLOTS, value=ROWS - 1),
            max_length_S=ints(SLOTS, value=LENGTH),
            rings_S=torch.zeros(SLOTS, dtype=torch.int64),
            drafts_SR=ints(SLOTS, ROWS),
            num_drafts_S=ints(SLOTS, value=-7),
            from_ring_S=ints(SLOTS),
        )
        self.votes = SuffixVotes(self.lanes, self.slots, self.min_run, self.max_run, self.words)

    def write(self, slot: int, prompt: list[int], answer: list[int], forced: tuple[int, ...] = ()) -> None:
        history = [*prompt, *answer, *forced]
        self.slots.history_SL[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)
        self.slots.length_S[slot], self.slots.prompt_length_S[slot] = len(prompt) + len(answer), len(prompt)
        self.lanes.num_jump_forward_B[slot] = len(forced)
        self.slots.drafts_SR[slot, : len(forced)] = torch.tensor(forced, dtype=torch.int32)

    def draft(self, slot: int, *, num_lanes: int = SLOTS, max_drafts: int = ROWS - 1) -> list[int]:
        self.votes.draft(num_lanes, max_drafts, jump_forward=True)
        return self.slots.drafts_SR[slot, : int(self.slots.num_drafts_S[slot])].tolist()


def ring_of(*texts: list[int], capacity: int = MIN_CAPACITY) -> SuffixRing:
    ring = SuffixRing(capacity)
    for text in texts:
        ring.add(text)
    return ring


def run_at(text: list[int], end: int, context: list[int], most: int) -> int:
    """Return how many tokens before `end` equal the end of the context, at most `most`."""
    run = 0
    while run < min(most, end, len(context)) and text[end - 1 - run] == context[-1 - run]:
        run += 1
    return run


def word_of(context: list[int], quotes: Set[int]) -> tuple[int, ...]:
    """Return the tokens after the last quote; none if they are too many, or there is no quote."""
    at = next((i for i in range(len(context) - 1, -1, -1) if context[i] in quotes), None)
    word = () if at is None else tuple(context[at + 1 :])
    return word if len(word) <= MAX_WORD else ()


def places_of(
    prompt: list[int],
    answer: list[int],
    texts: list[list[int]],
    runs: tuple[int, int],
    spellings: Spellings,
    quotes: Set[int],
) -> list[tuple[list[int], int, float]]:
    """Return (text, position of the next token, weight) of every place, the ring's first, the newest first."""
    least, most = runs
    context, stream = prompt + answer, [token for text in texts for token in (*text, SEPARATOR)]
    found = []
    for end in range(len(stream), 1, -1):
        if (run := run_at(stream, end, context, max(most, 2))) >= max(least, 2):
            found.append((stream, end, BASE ** (run - 1) * WRITTEN))
    found = found[:MAX_RING_PLACES]
    word = word_of(context, quotes)
    for end in range(len(context) - 1, 0, -1):
        run, rest = run_at(context, end, context, most), ()
        if run:
            before = word_of(context[: len(context) - run], quotes)
            if end > run and before and spellings.get(context[end - 1 - run]) == before:
                run += len(before) + 1
        else:
            spelling = spellings.get(context[end - 1], ())
            if word and spelling[: len(word)] == word:
                run, rest = len(word) + 1, spelling[len(word) :]
        if run >= least:
            weight = BASE ** (min(run, most) - 1) * (WRITTEN if end >= len(prompt) else 1.0)
            found.append(([*rest, *context[end:]], 0, weight))
    return found


def reference(
    prompt: list[int],
    answer: list[int],
    texts: list[list[int]],
    room: int,
    runs: tuple[int, int],
    spellings: Spellings | None = None,
    quotes: Set[int] = frozenset(),
) -> list[int]:
    """Return the drafts, by lists and a dictionary."""
    drafts: list[int] = []
    worth = 1.0
    for _ in range(MAX_SEARCHES):
        places = places_of(prompt, answer + drafts, texts, runs, spellings or {}, quotes)
        before = len(drafts)
        while len(drafts) < room:
            votes: dict[int, float] = defaultdict(float)
            won, most = SEPARATOR, 0.0
            for text, at, weight in places:
                if at < len(text) and text[at] != SEPARATOR:
                    votes[text[at]] += weight
                    if votes[text[at]] > most:
                        won, most = text[at], votes[text[at]]
            if won == SEPARATOR:
                break
            worth *= most / (sum(votes.values()) + UNKNOWN)
            if worth < WORTH:
                return drafts
            drafts.append(won)
            places = [(text, at + 1, weight) for text, at, weight in places if at < len(text) and text[at] == won]
        if len(drafts) == before:
            break
    return drafts


def made_text(draw: random.Random, pattern: list[int], letters: int, size: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < size:
        tokens += pattern if draw.random() < 0.7 else [draw.randrange(letters)]
    return tokens[:size]


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 4), (2, 4), (3, 8)])
def test_drafts_equal_those_of_a_plain_search(least: int, most: int) -> None:
    bench, draw = Bench(least, most), random.Random(least * 10 + most)
    lengths = []
    for _ in range(200):
        letters = draw.randint(2, 9)
        pattern = [draw.randrange(letters) for _ in range(draw.randint(3, 12))]
        prompt, answer = (made_text(draw, pattern, letters, draw.randint(1, 40)) for _ in range(2))
        texts = [made_text(draw, pattern, letters, draw.randint(1, 30)) for _ in range(draw.randint(0, 4))]
        ring, slot, limit = ring_of(*texts), draw.randrange(SLOTS), draw.randint(0, ROWS - 1)
        bench.slots.rings_S[:] = 0
        bench.slots.rings_S[slot] = ring.address
        bench.slots.draft_limit_S[slot] = limit
        bench.write(slot, prompt, answer)
        assert bench.draft(slot) == reference(prompt, answer, texts, limit, (least, most))
        lengths.append(int(bench.slots.num_drafts_S[slot]))
    assert sum(map(bool, lengths)) > 60
    assert sum(length > 2 for length in lengths) > 20


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 4), (2, 4), (3, 8)])
def test_drafts_with_words_after_quotes_equal_those_of_a_plain_search(least: int, most: int) -> None:
    draw = random.Random(least * 100 + most)
    found = 0
    for _ in range(300):
        letters = draw.randint(4, 12)
        spellings = {
            token: tuple(draw.randrange(2, letters) for _ in range(draw.randint(1, 3)))
            for token in range(letters // 2, letters)
        }
        quotes = {0, 1}
        bench = Bench(least, most, BareWords.of(spellings, quotes, letters))
        pattern = [draw.randrange(letters) for _ in range(draw.randint(3, 12))]
        prompt, answer = (made_text(draw, pattern, letters, draw.randint(1, 40)) for _ in range(2))
        answer += [0, *draw.choice([*spellings.values()])[: draw.randint(1, 3)]]
        answer += [draw.choice(pattern)] * draw.randint(0, 1)
        texts = [made_text(draw, pattern, letters, 20)] if draw.random() < 0.5 else []
        ring = ring_of(*texts)
        bench.slots.rings_S[0] = ring.address
        bench.write(0, prompt, answer)
        expected = reference(prompt, answer, texts, ROWS - 1, (least, most), spellings, quotes)
        assert bench.draft(0) == expected
        found += expected != reference(prompt, answer, texts, ROWS - 1, (least, most))
    assert found > (20 if most > 1 else 0), "words must matter"


MARIA, KELLER, VIENNA, QUOTE, BARE_MARIA, VI, ENNA = 10, 11, 12, 20, 21, 22, 23
WORDS = BareWords.of({MARIA: (BARE_MARIA,), VIENNA: (VI, ENNA)}, [QUOTE], 99)


@pytest.mark.parametrize(
    ("prompt", "answer", "drafts"),
    [
        ([50, MARIA, KELLER, 51], [QUOTE, BARE_MARIA], [KELLER]),
        ([50, VIENNA, 51], [QUOTE, VI], [ENNA]),
        ([50, VIENNA, 51, 52], [QUOTE, VI, ENNA], [51, 52]),
        ([50, MARIA, KELLER, 51, 52], [QUOTE, BARE_MARIA, KELLER], [51, 52]),
        ([50, MARIA, KELLER, 51], [60, BARE_MARIA], []),
        ([50, MARIA, KELLER, 51], [QUOTE, 60, BARE_MARIA], []),
        ([50, MARIA, KELLER, 51], [QUOTE], []),
        ([50, MARIA, KELLER, KELLER, 51], [QUOTE, 60, KELLER], []),
    ],
    ids=["one token", "begin of two", "two tokens", "a longer run", "no quote", "another word", "a quote", "no run"],
)
def test_a_word_after_a_quote_is_found_after_a_space(prompt: list[int], answer: list[int], drafts: list[int]) -> None:
    bench = Bench(words=WORDS)
    bench.write(0, prompt, answer)
    assert bench.draft(0) == drafts
    without = Bench()
    without.write(0, prompt, answer)
    assert without.draft(0) == []


VIRTUAL = 99
"""The first id beyond the vocabulary of `WORDS`."""


@pytest.mark.parametrize(
    ("prompt", "answer", "drafts"),
    [
        ([VIRTUAL, MARIA, KELLER, VIRTUAL + 40_000_000], [QUOTE, BARE_MARIA], [KELLER]),
        ([VIRTUAL, 50, KELLER, 51], [QUOTE, BARE_MARIA, KELLER], []),
        ([50, VIRTUAL, KELLER, 51], [QUOTE, BARE_MARIA, KELLER], []),
        ([50, MARIA, KELLER], [QUOTE, VIRTUAL], []),
        ([50, MARIA, KELLER], [VIRTUAL, BARE_MARIA], []),
        ([50, MARIA, KELLER], [QUOTE, -1, BARE_MARIA], []),
        ([50, MARIA, KELLER], [-1, BARE_MARIA], []),
    ],
)
def test_ids_beyond_the_vocabulary_are_no_words(prompt: list[int], answer: list[int], drafts: list[int]) -> None:
    """An adapter's virtual tokens have such ids. What lies after the arrays would make them a quote, and a word."""
    start_V, quotes_V = torch.zeros(200, dtype=torch.int32), torch.ones(200, dtype=torch.uint8)
    start_V[1 : 1 + len(WORDS.start_V)], quotes_V[1 : 1 + VIRTUAL] = WORDS.start_V, WORDS.quotes_V
    start_V[VIRTUAL + 2 :] = len(WORDS.tokens) - 2
    bench = Bench(words=BareWords(start_V[1 : VIRTUAL + 2], WORDS.tokens, quotes_V[1 : VIRTUAL + 1]))
    bench.write(0, prompt, answer)
    assert bench.draft(0) == drafts


def test_no_word_is_found_before_a_history() -> None:
    bench = Bench(words=WORDS)
    bench.slots.history_SL[0, -1] = MARIA
    bench.write(1, [KELLER, 51], [QUOTE, BARE_MARIA, KELLER])
    assert bench.draft(1) == []


def test_a_word_of_too_many_tokens_is_not_looked_up() -> None:
    spelling = tuple(range(30, 30 + MAX_WORD + 1))
    bench = Bench(words=BareWords.of({MARIA: spelling}, [QUOTE], 99))
    for size, drafted in ((MAX_WORD, True), (MAX_WORD + 1, False)):
        bench.write(0, [50, MARIA, KELLER], [QUOTE, *spelling[:size]])
        assert bool(bench.draft(0)) is drafted


@pytest.mark.parametrize(
    ("texts", "prompt", "answer", "first"),
    [
        ([[1, 2, 3, 4, 5, 6]], [9, 8], [1, 2], [3, 4]),
        ([], [9, 8], [1, 2], []),
        # The prompt says 5 after (3, 4), and the target wrote 6 there: prompt lookup would draft 5 for ever.
        ([], [3, 4, 5, 5, 5], [3, 4, 6, 7, 7, 3, 4], [6]),
        ([[1, 2, 3, 4]] * 5 + [[1, 2, 9, 9]], [50], [1, 2], [3, 4]),
        # A full ring keeps the newest tokens.
        ([[1, 2, 3, 4]] * 100 + [[5, 6, 7, 8]] * 100, [50], [1, 2], []),
        ([[1, 2, 3, 4]] * 100 + [[5, 6, 7, 8]] * 100, [50], [5, 6], [7, 8]),
        # A text longer than the ring leaves its end.
        ([[*range(1000, 1000 + 3 * MIN_CAPACITY)]], [50], [1000, 1001], []),
        ([[*range(1000, 1000 + 3 * MIN_CAPACITY)]], [50], [996 + 3 * MIN_CAPACITY, 997 + 3 * MIN_CAPACITY],
         [998 + 3 * MIN_CAPACITY]),
    ],
    ids=["ring", "no ring", "rejected before", "majority", "old tokens", "new tokens", "begin", "end"],
)  # fmt: skip
def test_the_first_drafts(texts: list[list[int]], prompt: list[int], answer: list[int], first: list[int]) -> None:
    bench, ring = Bench(), ring_of(*texts)
    if texts:
        bench.slots.rings_S[0] = ring.address
    bench.write(0, prompt, answer)
    assert bench.draft(0)[: len(first) or None] == first
    count = int(bench.slots.num_drafts_S[0])
    assert int(bench.slots.from_ring_S[0]) == ((1 << count) - 1 if texts else 0)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({"draft_limit": 2}, 2), ({"max_length": 8}, 3), ({"max_drafts": 1}, 1), ({"max_length": 4}, 0)],
)
def test_drafts_keep_every_limit(limits: dict[str, int], expected: int) -> None:
    bench, ring = Bench(), ring_of(*[[1, 2, 3, 4, 5, 6, 7, 8, 9]] * 10)
    bench.slots.rings_S[0] = ring.address
    bench.write(0, [50, 51], [1, 2])
    bench.slots.draft_limit_S[0] = limits.get("draft_limit", ROWS - 1)
    bench.slots.max_length_S[0] = limits.get("max_length", LENGTH)
    assert len(bench.draft(0, max_drafts=limits.get("max_drafts", ROWS - 1))) == expected


def test_drafts_go_on_after_jump_forward_tokens() -> None:
    bench, ring = Bench(), ring_of(*[[1, 2, 3, 4, 5, 6]] * 9)
    bench.slots.rings_S[:2] = ring.address
    bench.write(0, [50], [1], forced=(2, 3))
    assert bench.draft(0) == [2, 3, 4, 5, 6]
    assert int(bench.slots.from_ring_S[0]) == 0b11100
    bench.slots.draft_limit_S[0] = 2
    assert bench.draft(0) == [2, 3], "jump-forward tokens may exceed the limit of the others"


def test_a_lane_that_emitted_nothing_keeps_its_drafts() -> None:
    bench, ring = Bench(), ring_of(*[[1, 2, 3]] * 9)
    bench.slots.rings_S[:] = ring.address
    for slot in range(SLOTS):
        bench.write(slot, [50], [1, 2])
    bench.lanes.num_emitted_B[0] = 0
    bench.lanes.num_jump_forward_B[1] = -1
    bench.lanes.slots_B[2] = -1
    bench.votes.draft(3, ROWS - 1, jump_forward=True)
    assert bench.slots.num_drafts_S.tolist() == [-7] * 4


def test_the_drafts_of_rings_are_counted_by_their_bits() -> None:
    bench = Bench()
    bench.slots.from_ring_S[:] = torch.tensor([0b1101, 0b1111, 0b11, 0b1])
    bench.lanes.num_verified_B[:] = torch.tensor([4, 2, 2, 1])
    bench.lanes.num_accepted_B[:] = torch.tensor([3, 0, 2, 1])
    bench.lanes.num_emitted_B[2] = 0
    bench.votes.count(3)
    assert (bench.votes.num_verified, bench.votes.num_accepted) == (3 + 2, 2 + 0)


def test_a_grown_ring_has_the_same_texts() -> None:
    bench, ring = Bench(), ring_of(*[[1, 2, 3, 4]] * 3)
    larger = ring.grown(4 * MIN_CAPACITY)
    assert (larger.num_tokens, larger.num_bytes) == (ring.num_tokens, 4 * ring.num_bytes)
    larger.add([1, 2, 3, 4])
    bench.slots.rings_S[0] = larger.address
    bench.write(0, [50], [1, 2])
    assert bench.draft(0) == [3, 4]
