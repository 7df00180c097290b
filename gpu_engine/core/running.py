"""The engine's state of a running sequence, and the writer of its numbers into the static buffers.

Invariant: the memory that a slot's `rules_S` points to is alive while the slot is held. Not responsible for: the
choice of sequences (see scheduler.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gpu_engine.api.request import Request, Telemetry, TokenEvent
from gpu_engine.core.draft_budget import DraftRecord
from gpu_engine.core.exact_sampling import ExactSampler
from gpu_engine.core.scheduler import Sequence
from gpu_engine.step.buffers import SlotBuffers
from kernels.accept import pack_rules
from kernels.step_tensors import MASKED_LOGPROBS


@dataclass(slots=True, eq=False, kw_only=True)
class RunningSequence(Sequence):
    """One sequence of the engine: its request, its answer so far, and what happened to it."""

    request: Request
    telemetry: Telemetry = field(default_factory=Telemetry)
    """The beams of a search share one."""
    answer: list[int] = field(default_factory=list)
    """Tokens emitted so far."""
    deferred_seq: int = 0
    """Sequence number of the post whose rows are missing; meaningful while the sequence is deferred."""
    advanced: bool = False
    """The sequence used the rows of that post that had arrived: the missing ones are for an earlier matcher state."""
    deferred_since_s: float = 0.0
    """`time.monotonic()` of the first of the deferrals in a row; 0.0: the last step had all of its rows."""
    empty_answers: int = 0
    """Answers in a row that arrived in time and deferred every row."""
    crash_count: int = 0
    """Grammar processes that ended while the sequence waited for rows or a matcher, since its last token."""
    ends_while_open: int = 0
    """Grammar processes that ended while the sequence had an open matcher, tokens or not."""
    trials: int = 0
    """Times that the sequence was opened in quarantine (see crash_attribution.py, also for the two counts before)."""
    bound: tuple[int, int] | None = None
    """(slot, slot_gen) of the matcher that was requested; it must be closed."""
    num_jump_forward: int = 0
    """Jump-forward tokens among the drafts that its next step verifies."""
    drafts: DraftRecord = field(default_factory=DraftRecord)
    """How many of its drafts were accepted lately."""
    repeats: bool = False
    """The answer repeats itself, as `SamplingParams.repetition` says."""
    verified: bool = False
    """The grammar process checks the answer against its schema."""
    unsent: TokenEvent | None = None
    """The last tokens of the answer, which the client has not got yet."""
    backtracking: bool = False
    """No token is legal after the answer: the grammar process looks for a way back."""
    dead_texts: tuple[bytes, ...] = ()
    """Texts that the answer avoids since it went back; only the grammar process reads them."""
    exact: ExactSampler | None = None
    """The tries of an exact answer; None: each token is masked, and kept."""
    pages_written: int = 0
    """Entries of the page table that are written."""

    @property
    def num_sent(self) -> int:
        """Tokens of the answer that were sent to the client."""
        return len(self.answer) - (len(self.unsent.token_ids) if self.unsent is not None else 0)

    def __repr__(self) -> str:
        state = "waiting" if self.slot < 0 else f"slot {self.slot} gen {self.slot_gen} pages {len(self.pages)}"
        progress = f"{self.grammar_state.name} {self.prefilled}/{self.length}"
        return f"<RunningSequence {self.request.key} +{len(self.answer)} {state} {progress}>"


class SlotWriter:
    """Writes the slot buffers. Used by the engine thread, between steps.

    `slot` is written here, in memory of the host, and `buffers` is read by the steps; on a CPU both are the same.
    """

    def __init__(
        self,
        slot: SlotBuffers,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        num_drafts: int,
        adapters: bool = False,
    ) -> None:
        """Args: see below.

        slot: the buffers.
        max_model_len: the model's longest sequence, in tokens.
        eos_token_ids: the model's end-of-sequence tokens.
        num_drafts: K.
        adapters: the model takes adapters, and each slot has the number of its adapter.
        """
        self.slot = self.buffers = slot
        self._page_table_SN = slot.page_table_SN.numpy()
        """The same memory as an array: an operation of torch takes some microseconds, of which a step has few."""
        self._adapters = adapters
        self._num_drafts = num_drafts
        self._max_model_len, self._eos = max_model_len, eos_token_ids
        self._rules: list[torch.Tensor | None] = [None] * len(slot.length_S)
        self.processed: dict[int, Request] = {}
        """The requests with logits processors, by slot."""
        self.adapted: set[int] = set()
        """Slots of sequences with a LoRA adapter."""

    def assign(self, sequence: RunningSequence) -> None:
        """Write the history and parameters of a sequence that just got its slot."""
        s, slot, request = sequence.slot, self.slot, sequence.request
        sampling, logprobs = request.sampling, request.outputs.num_logprobs
        tokens = request.prompt_ids + sequence.answer
        rules = self._rules_of(request, sampling.logit_bias)
        self._rules[s] = rules
        if request.logits_processors:
            self.processed[s] = request
        elif self.processed:
            self.processed.pop(s, None)
        slot.history_SL[s, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        slot.length_S[s] = len(tokens)
        slot.num_drafts_S[s] = 0
        slot.done_S[s] = False
        slot.draft_limit_S[s] = min(request.speculation.num_draft_tokens, self._num_drafts)
        slot.jump_forward_limit_S[s] = min(request.speculation.max_jump_forward, slot.drafts_SR.shape[1] - 1)
        slot.posted_S[s] = len(sequence.answer)
        if self._adapters:
            slot.adapter_S[s] = 0 if request.lora is None else request.lora.number
            (self.adapted.discard if request.lora is None else self.adapted.add)(s)
        p = slot.params
        p.prompt_length_S[s] = len(request.prompt_ids)
        p.max_length_S[s] = min(len(request.prompt_ids) + sampling.max_tokens, self._max_model_len)
        p.min_tokens_S[s] = sampling.min_tokens
        p.temperature_S[s] = sampling.temperature
        p.top_p_S[s], p.top_k_S[s], p.min_p_S[s] = sampling.top_p, sampling.top_k, sampling.min_p
        p.repetition_S[s] = sampling.repetition_penalty
        p.presence_S[s], p.frequency_S[s] = sampling.presence_penalty, sampling.frequency_penalty
        self.write_draws(sequence)
        among_legal = MASKED_LOGPROBS if request.outputs.masked_logprobs else 0
        p.num_logprobs_S[s] = -1 if logprobs is None else logprobs + among_legal
        p.rules_S[s] = rules.data_ptr()
        sequence.pages_written = sequence.num_jump_forward = 0

    def write_draws(self, sequence: RunningSequence) -> None:
        """Write what the draws read: the seed, and where the masses of an exact answer are, which only a CPU makes."""
        s, p, exact = sequence.slot, self.slot.params, sequence.exact
        seed = sequence.request.sampling.seed if exact is None else exact.seed
        p.seed_S[s] = seed - (1 << 64) if seed >= 1 << 63 else seed
        p.prefixes_S[s] = 0 if exact is None else exact.masses.address

    def release(self, sequence: RunningSequence) -> None:
        """Forget a sequence that ends, if it has a slot."""
        self.processed.pop(sequence.slot, None)

    def bind(self, sequence: RunningSequence, *, drafts: bool = True) -> None:
        """Set the number of answer tokens that the sequence's new matcher has consumed: later posts carry the tokens
        after them.

        `drafts` False: the sequence loses its drafts, and gets none while it holds the slot.
        """
        self.slot.posted_S[sequence.slot] = len(sequence.answer)
        if not drafts:
            for limit_S in (self.slot.num_drafts_S, self.slot.draft_limit_S, self.slot.jump_forward_limit_S):
                limit_S[sequence.slot] = 0

    def extend(self, sequence: RunningSequence, token: int) -> None:
        """Write the last token of a beam, which the engine chose; `sequence.length` counts it."""
        self._extend(sequence.slot, sequence.length, token)

    def fork(self, source: RunningSequence, target: RunningSequence) -> None:
        """Copy the history of `source`'s slot into the slot of `target`, another beam, which has had tokens before.

        As many tokens are posted of both. The page table follows with `write_pages`.
        """
        self._fork(source.slot, target.slot, source.length)
        target.pages_written = 0

    def _extend(self, slot: int, length: int, token: int) -> None:
        self.buffers.history_SL[slot, length - 1].fill_(token)
        self.buffers.length_S[slot].fill_(length)

    def _fork(self, source: int, target: int, length: int) -> None:
        slot = self.buffers
        slot.history_SL[target, :length].copy_(slot.history_SL[source, :length])
        slot.length_S[target].fill_(length)
        slot.posted_S[target].copy_(slot.posted_S[source])
        slot.done_S[target].fill_(False)
        if self._adapters:
            slot.adapter_S[target].copy_(slot.adapter_S[source])

    def check(self, request: Request) -> None:
        """Raise InvalidRequest when a slot cannot hold the request's stop and banned tokens. Any thread; called before
        the request has a slot."""

    def write_pages(self, sequence: RunningSequence) -> None:
        """Bring the slot's row of the page table up to date."""
        self._write_pages(sequence)

    def _write_pages(self, sequence: RunningSequence) -> int:
        """Bring the slot's row of the page table up to date; return how many entries are new, at its end."""
        new, at = sequence.pages[sequence.pages_written :], sequence.pages_written
        if new:
            self._page_table_SN[sequence.slot, at : at + len(new)] = new
            sequence.pages_written += len(new)
        return len(new)

    def _rules_of(self, request: Request, biases: tuple[tuple[int, float], ...] = ()) -> torch.Tensor:
        """Return the packed rules of the sequence's stops and bans, and of the biases."""
        sampling = request.sampling
        stop = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self._eos)
        return pack_rules(stop, sampling.bad_token_ids, sampling.bad_words, biases)
