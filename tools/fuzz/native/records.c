/* What the grammar process reads that the engine wrote: a ring of records of any bytes, and chains of their rows.
 *
 * Invariant: whatever the ring holds, a record that is read has a slot, counts and tokens within the layout's bounds. Of
 * records with tokens of the vocabulary the rows are classified and published, whatever the matcher library wrote there,
 * and nothing outside the arrays is touched.
 */
#include "chains.h"
#include "input.h"

enum { WORDS_BYTES = 1024, MAX_SLOTS = 4, MAX_ROWS = 16, MAX_RECS = 3, MAX_WORDS = 3, SPECIAL = 2 };

struct records {
    int32_t *fields; /* [LS_FIELDS][count] */
    int32_t *tokens; /* [count][2 * num_rows] */
    int32_t count;
};

/* As GrammarEnd reads a post: arrays of the layout's size first, of which the records' own are copies. */
static struct records read_post(const struct ls_view *view, uint64_t seq) {
    const uint32_t S = view->num_slots, T = 2 * view->num_rows;
    int32_t *slots[LS_FIELDS];
    for (int f = 0; f < LS_FIELDS; f++) slots[f] = room(sizeof **slots * S);
    int32_t *tokens = room(sizeof *tokens * S * T);
    memset(tokens, 0, sizeof *tokens * S * T);
    struct ls_records_args a = {
        view,     slots[0], slots[1], slots[2], slots[3], slots[4], slots[5], (uint32_t *)slots[6],
        slots[7], tokens,   seq,      0,        0};
    ls_records(&a);
    REQUIRE(a.status == LS_OK || (a.status == LS_NOT_IN_RING && a.count == 0));
    REQUIRE(a.count >= 0 && (uint32_t)a.count <= S);
    struct records r = {room(sizeof *r.fields * LS_FIELDS * (size_t)a.count),
                        room(sizeof *tokens * (size_t)a.count * T), a.count};
    for (int f = 0; f < LS_FIELDS; f++) {
        memcpy(r.fields + (size_t)f * (size_t)a.count, slots[f], sizeof **slots * (size_t)a.count);
        free(slots[f]);
    }
    memcpy(r.tokens, tokens, sizeof *tokens * (size_t)a.count * T);
    free(tokens);
    for (int32_t k = 0; k < r.count; k++) {
        const int32_t *field = r.fields + k;
        REQUIRE((uint32_t)field[LS_FIELD_SLOT * r.count] < S);
        REQUIRE((uint32_t)field[LS_FIELD_N_COMMIT * r.count] <= view->num_rows);
        REQUIRE((uint32_t)field[LS_FIELD_N_DRAFT * r.count] < view->num_rows);
        REQUIRE(field[LS_FIELD_FIRST * r.count] >= -1 &&
                field[LS_FIELD_FIRST * r.count] <= field[LS_FIELD_N_DRAFT * r.count]);
    }
    return r;
}

/* The rows of the records that take the way of chains, as grammar_service/fill chooses them. */
static void publish(struct input *in, const struct ls_view *view, const struct records *r, uint64_t seq) {
    const uint32_t R = view->num_rows, words = 1 + take8(in) % MAX_WORDS, S = view->num_slots;
    const uint32_t vocab = 32 * (words - 1) + 1 + take8(in) % 32, stride = aligned(4 * words, 64);
    const size_t n = (size_t)r->count, rows = n * R;
    uint8_t *plain = room(vocab), *is_plain = room(n);
    for (uint32_t v = 0; v < vocab; v++) plain[v] = take8(in) % 8 != 0;
    const struct ls_record_arrays arrays = {r->fields, r->tokens, r->count, (int32_t)(2 * R)};
    ls_plain_records(&arrays, plain, (int32_t)vocab, is_plain);
    int32_t *which = room(sizeof *which * n), at[SPECIAL] = {0, (int32_t)words - 1};
    uint32_t keep[SPECIAL], stops[SPECIAL];
    struct ls_chains_args a = {.view = view,
                               .row_stride = stride,
                               .words = words,
                               .vocab_size = vocab,
                               .seq = seq,
                               .special_at = at,
                               .special_keep = keep,
                               .special_stops = stops,
                               .num_special = SPECIAL,
                               .mark = take64(in),
                               .publishes = take8(in) & 1,
                               .which = which};
    for (int s = 0; s < SPECIAL; s++) {
        stops[s] = (uint32_t)take64(in);
        keep[s] = (uint32_t)take64(in) & ~stops[s];
    }
    for (int32_t k = 0; k < r->count; k++)
        if (is_plain[k] && r->fields[LS_FIELD_FIRST * r->count + k] >= 0 &&
            r->fields[LS_FIELD_STAGE * r->count + k] != LS_PROPOSE)
            which[a.count++] = k;
    a.rows = room(sizeof *a.rows * rows * words);
    memset(a.rows, 0, sizeof *a.rows * rows * words);
    a.slots = room(4 * n), a.slot_gens = room(4 * n), a.first = room(4 * n), a.n_draft = room(4 * n);
    a.accepting = room(n), a.states = room(n), a.drafts = room(4 * rows), a.kinds = room(rows),
    a.forced = room(4 * rows);
    a.masks = room((size_t)S * R * stride);
    a.tallies = room(sizeof *a.tallies * S * LS_KINDS), a.published = room(sizeof *a.published * 2 * S);
    memset(a.tallies, 0, sizeof *a.tallies * S * LS_KINDS);
    memset(a.published, 0, sizeof *a.published * 2 * S);
    take(in, a.accepting, n);
    ls_take_chains(&a, &arrays);
    const uint32_t tail = vocab % 32;
    for (size_t i = 0; i < rows; i++) /* the library writes some rows, without bits of no token */
        if (take8(in) & 1) {
            take(in, a.rows + i * words, sizeof *a.rows * words);
            if (tail) a.rows[i * words + words - 1] &= (1u << tail) - 1;
        }
    ls_publish_chains(&a);
    REQUIRE(a.answered <= a.count && a.num_rows >= 0 && (size_t)a.num_rows <= rows);
    for (size_t k = 0; k < (size_t)a.count * R; k++) {
        REQUIRE(a.kinds[k] < LS_KINDS);
        REQUIRE(a.kinds[k] != LS_KIND_FORCED || (a.forced[k] >= 0 && (uint32_t)a.forced[k] < vocab));
    }
    ls_publish_answers(&a);
    void *all[] = {plain,       is_plain, which,    a.rows,  a.slots,  a.slot_gens, a.first,   a.n_draft,
                   a.accepting, a.states, a.drafts, a.kinds, a.forced, a.masks,     a.tallies, a.published};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) free(all[k]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, size};
    struct ls_view view = {.num_slots = 1 + take8(&in) % MAX_SLOTS,
                           .num_rows = 1 + take8(&in) % MAX_ROWS,
                           .num_recs = 1 + take8(&in) % MAX_RECS};
    view.rec_head_bytes = aligned(16 + 2 * view.num_slots, 64);
    view.rec_stride = aligned(24 + 4 * (2 * view.num_rows - 1), 64);
    view.rec_entry_stride = aligned(view.rec_head_bytes + view.num_slots * view.rec_stride, 128);
    view.ans_forced = 12 + aligned(view.num_rows, 4);
    view.ans_late = aligned(view.ans_forced + 4 * view.num_rows, 8);
    view.ans_stride = aligned(view.ans_late + 8, 128);
    const size_t ring = (size_t)(view.num_recs * view.rec_entry_stride),
                 answers = (size_t)view.num_slots * view.ans_stride;
    view.words = room(WORDS_BYTES), view.rec = room(ring), view.ans = room(answers);
    memset(view.words, 0, WORDS_BYTES);
    const uint8_t what = take8(&in);
    uint64_t seq = take64(&in);
    take(&in, view.rec, ring);
    take(&in, view.ans, what & 2 ? answers : 0);
    if (!(what & 2)) memset(view.ans, 0, answers);
    if (what & 1) { /* an entry whose sequences are the one that is asked for: its counts and tokens decide */
        uint8_t *entry = view.rec + seq % view.num_recs * view.rec_entry_stride;
        memcpy(entry, &seq, sizeof seq);
        for (uint32_t s = 0; s < view.num_slots; s++)
            memcpy(entry + view.rec_head_bytes + s * view.rec_stride, &seq, sizeof seq);
        if (what & 4) entry[8] %= view.num_slots + 1, entry[9] = entry[10] = entry[11] = 0;
    }
    const struct records records = read_post(&view, seq);
    if (records.count) publish(&in, &view, &records, seq);
    free(records.fields);
    free(records.tokens);
    free(view.words);
    free(view.rec);
    free(view.ans);
    return 0;
}
