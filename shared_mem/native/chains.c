/* Publishes rows of many slots that a matcher library has written: one pass in C instead of a call from Python for each.
 *
 * Invariant: an answer is published only when the words alone determine each of its rows. A chain is left to the slot-by-slot
 * path when its row allows a draft and the library has written no row after it, or the other way round (an empty row after
 * an illegal draft does not count as written), or when a row has a stop token and the answer is not known to be complete
 * there. Rows are copied before ls_put_answer stores the sequence with release, and the bell rings after the last answer;
 * all of that ordering is in flags.c. One thread at a time publishes for a slot.
 *
 * Shared bytes that this file writes: MASK rows, only in ls_publish_chains, of slots that the calling thread holds. ANS and
 * the doorbell are written in flags.c for it. It reads nothing of REC: ls_records has copied the records.
 */
#include "chains.h"

#include <string.h>

static uint32_t *row_of(const struct ls_chains_args *a, int32_t i, uint32_t r) {
    return a->rows + ((uint64_t)i * a->view->num_rows + r) * a->words;
}

static uint32_t rows_of(const struct ls_chains_args *a, int32_t i) {
    return (uint32_t)(a->n_draft[i] - a->first[i]) + 1;
}

void ls_plain_records(const struct ls_record_arrays *b, const uint8_t *plain, int32_t vocab_size, uint8_t *out) {
    for (int32_t k = 0; k < b->count; k++) {
        const int32_t *tokens = b->tokens + (int64_t)k * b->token_stride;
        /* The candidates of a proposal are no tokens yet. */
        const int32_t drafts =
            b->fields[LS_FIELD_STAGE * b->count + k] == LS_PROPOSE ? 0 : b->fields[LS_FIELD_N_DRAFT * b->count + k];
        const int32_t n = b->fields[LS_FIELD_N_COMMIT * b->count + k] + drafts;
        int32_t t = 0;
        while (t < n && (uint32_t)tokens[t] < (uint32_t)vocab_size && plain[tokens[t]]) t++;
        out[k] = t == n;
    }
}

void ls_take_chains(const struct ls_chains_args *a, const struct ls_record_arrays *b) {
    const size_t mark_bytes = a->words > 1 ? 8 : 4;
    const uint32_t R = a->view->num_rows;
    for (int32_t i = 0; i < a->count; i++) {
        const int32_t k = a->which[i], *field = b->fields + k;
        a->slots[i] = field[LS_FIELD_SLOT * b->count];
        a->slot_gens[i] = field[LS_FIELD_SLOT_GEN * b->count];
        a->n_draft[i] = field[LS_FIELD_N_DRAFT * b->count];
        a->first[i] = field[LS_FIELD_FIRST * b->count];
        a->states[i] = LS_CHAIN_DONE;
        const int32_t behind = field[LS_FIELD_N_COMMIT * b->count] + a->first[i];
        memcpy(a->drafts + (uint64_t)i * R, b->tokens + (int64_t)k * b->token_stride + behind,
               (size_t)(a->n_draft[i] - a->first[i]) * sizeof *a->drafts);
        for (uint32_t r = 0; r < rows_of(a, i); r++) memcpy(row_of(a, i, r), &a->mark, mark_bytes);
    }
}

static int is_written(const struct ls_chains_args *a, const uint32_t *row) {
    return memcmp(row, &a->mark, a->words > 1 ? 8 : 4) != 0;
}

static int is_empty(const struct ls_chains_args *a, const uint32_t *row) {
    uint32_t w = 0;
    while (w < a->words && !row[w]) w++;
    return w == a->words;
}

/* Takes special tokens out; 1 when the row had a stop token. */
static int keep_text(const struct ls_chains_args *a, uint32_t *row, int accepting) {
    uint32_t stops = 0;
    for (int32_t s = 0; s < a->num_special; s++) {
        uint32_t *word = row + a->special_at[s];
        stops |= *word & a->special_stops[s];
        *word &= a->special_keep[s] | (accepting ? a->special_stops[s] : 0);
    }
    return stops != 0;
}

static int is_full(const struct ls_chains_args *a, const uint32_t *row) {
    const uint32_t whole = a->vocab_size / 32, tail = a->vocab_size % 32;
    for (uint32_t w = 0; w < whole; w++)
        if (row[w] != 0xffffffffu) return 0;
    return !tail || row[whole] == (1u << tail) - 1;
}

/* The classification of grammar_service.grammar.mask_rows.Classifier; bits beyond the vocabulary are 0. */
static uint8_t kind_of(const struct ls_chains_args *a, const uint32_t *row, int32_t *forced) {
    uint32_t w = 0;
    while (w < a->words && !row[w]) w++;
    if (w == a->words) return LS_KIND_DEAD_END;
    /* A vocabulary of one token: its row is a single bit, and that comes first. */
    const uint32_t only = row[w];
    if (only & (only - 1)) return w == 0 && is_full(a, row) ? LS_KIND_ALL : LS_KIND_APPLY;
    for (uint32_t v = w + 1; v < a->words; v++)
        if (row[v]) return LS_KIND_APPLY;
    *forced = (int32_t)(w * 32) + __builtin_ctz(only);
    return LS_KIND_FORCED;
}

/* Number of rows that are written, or 0: the words do not determine the chain. */
static uint32_t classify(const struct ls_chains_args *a, int32_t i, uint8_t *kinds, int32_t *forced) {
    const int32_t *drafts = a->drafts + (uint64_t)i * a->view->num_rows;
    const uint32_t count = rows_of(a, i), first = (uint32_t)a->first[i];
    for (uint32_t r = 0; r < count; r++) {
        uint32_t *row = row_of(a, i, r);
        const int written = is_written(a, row);
        if (r) {
            const uint32_t token = (uint32_t)drafts[r - 1];
            const int legal = row_of(a, i, r - 1)[token / 32] >> token % 32 & 1;
            /* xgrammar clears the row after an illegal draft, llguidance leaves it alone. */
            if (!legal) return written && !is_empty(a, row) ? 0 : r;
            if (!written) return 0;
        } else if (!written) {
            return 0;
        }
        if (keep_text(a, row, !r && a->accepting[i]) && r) return 0;
        kinds[first + r] = kind_of(a, row, forced + first + r);
    }
    return count;
}

/* Publishes the answer of one chain; the bell is the caller's. */
static void put_answer(const struct ls_chains_args *a, int32_t i) {
    const uint32_t R = a->view->num_rows;
    const struct ls_publish_args answer = {
        .view = a->view,
        .kinds = a->kinds + (uint64_t)i * R,
        .forced = a->forced + (uint64_t)i * R,
        .seq = a->seq,
        .slot = a->slots[i],
        .slot_gen = a->slot_gens[i],
    };
    const int32_t stale = ls_put_answer(&answer);
    if (stale) a->states[i] = LS_CHAIN_STALE;
    a->published[(uint32_t)stale * a->view->num_slots + (uint32_t)a->slots[i]]++;
}

void ls_publish_answers(const struct ls_chains_args *a) {
    for (int32_t i = 0; i < a->count; i++) put_answer(a, i);
    if (a->count) ls_ring(a->view);
}

void ls_publish_chains(struct ls_chains_args *a) {
    const uint32_t R = a->view->num_rows;
    a->answered = a->num_rows = 0;
    for (int32_t i = 0; i < a->count; i++) {
        const uint32_t slot = (uint32_t)a->slots[i];
        uint8_t *kinds = a->kinds + (uint64_t)i * R;
        int32_t *forced = a->forced + (uint64_t)i * R;
        memset(kinds, LS_KIND_DEFER, R);
        memset(forced, 0xff, R * sizeof *forced);
        if (a->states[i] == LS_CHAIN_SLOW) continue;
        const uint32_t written = classify(a, i, kinds, forced);
        if (!written) {
            memset(kinds, LS_KIND_DEFER, R);
            a->states[i] = LS_CHAIN_SLOW;
            continue;
        }
        uint8_t *place = a->masks + ((uint64_t)slot * R + (uint32_t)a->first[i]) * a->row_stride;
        for (uint32_t r = 0; r < written; r++) {
            const uint8_t kind = kinds[(uint32_t)a->first[i] + r];
            if (kind == LS_KIND_APPLY || kind == LS_KIND_FORCED)
                memcpy(place + (uint64_t)r * a->row_stride, row_of(a, i, r), a->words * sizeof(uint32_t));
        }
        for (int32_t r = 0; r <= a->n_draft[i]; r++) a->tallies[slot * LS_KINDS + kinds[r]]++;
        a->states[i] = LS_CHAIN_DONE;
        a->answered++;
        a->num_rows += (int32_t)written;
        if (a->publishes) put_answer(a, i);
    }
    if (a->publishes && a->count) ls_ring(a->view);
}
