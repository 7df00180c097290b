/* The output product of a forward after the grammar's rows: the logits that these leave, and no others.
 *
 * A guided row that stands between two values allows some tens of tokens, and a forced one a single token, so most of the
 * product would be thrown away by the mask. 32 outputs are a group of the product and a word of the mask. A row with many
 * groups is computed whole, together with the others of its kind, which share the loads of the weights; of any other row
 * only the groups that have a legal token. Invariant: a logit that a row of `accept` may read has the bits that the
 * whole product gives. All others are left as they are. Not responsible for: the mask itself, and what becomes of the
 * logits (see accept.h).
 */
#ifndef LOCKSTEP_MASKED_HEAD_H
#define LOCKSTEP_MASKED_HEAD_H

#include "accept.h"
#include "forward.h"

#define WHOLE_SHARE                                                                                                    \
    4 /* a row is computed whole from a quarter of its groups on: a group of one row costs as much as of four */
#define HEAD_CHUNK 16 /* groups: parts of rows lie unevenly */

static struct head_row head_row_of(const struct forward_args *a, const struct accept_args *rows,
                                   const struct forward_work *w, int64_t r) {
    const int64_t b = w->place[r] / rows->num_rows, j = w->place[r] % rows->num_rows, at = b * rows->row_stride + j;
    const int32_t slot = rows->slots[b], forced = rows->forced[at];
    struct head_row row = {.mask = 0, .only = NO_GROUP, .place = w->place[r]};
    const int is_unmasked = rows->num_logprobs[slot] >= 0 || rows->prefixes[slot];
    if (rows->kinds[at] == KIND_ALL || (is_unmasked && rows->kinds[at] < KIND_DEFER)) {
        row.only = EVERY_GROUP; /* log-probabilities and the masses of exact requests are those without a mask */
    } else if (rows->kinds[at] == KIND_FORCED) {
        row.only = forced >= 0 && forced < a->head.outputs ? forced / GROUP : NO_GROUP;
    } else if (rows->kinds[at] == KIND_APPLY) {
        row.mask = rows->masks + slot * rows->mask_slot_stride + j * rows->mask_row_stride;
        int64_t count = 0;
        for (int64_t g = 0; g < groups_of(&a->head); g++) count += row.mask[g] != 0;
        if (count * WHOLE_SHARE >= groups_of(&a->head)) row.only = EVERY_GROUP, row.mask = 0;
    }
    return row;
}

INLINE int wants(const struct head_row *row, int64_t g) { return row->mask ? row->mask[g] != 0 : row->only == g; }

struct head_call {
    const struct forward_args *args;
    const struct head_row
        *rows; /* those that are computed whole, [0, num_whole); those of which parts are, [parts, num_rows) */
    struct block_rows inputs; /* in this order */
    int64_t num_whole, parts, num_rows;
};

/* Group g of `count` rows from `first` on, into their places. */
static void head_tile(const struct head_call *c, const struct block_rows *x, int64_t g, int64_t first, int64_t count,
                      const struct fetch *ahead) {
    const struct forward_args *a = c->args;
    const int64_t left = a->head.outputs - g * GROUP, width = left < GROUP ? left : GROUP;
    float y[STEP_ROWS][GROUP];
    group_rows(&a->head, g, x, first, count, ahead, y[0], GROUP);
    for (int64_t t = 0; t < count; t++) {
        finish_logits(a, y[t], width);
        memcpy(a->logits + c->rows[first + t].place * a->logits_stride + g * GROUP, y[t],
               (size_t)width * sizeof(float));
    }
}

static void masked_head_body(struct member *m, void *context) {
    const struct head_call *c = context;
    const struct block_weights *w = &c->args->head;
    const struct block_rows x = ready_rows(m, w, &c->inputs, c->num_whole, c->num_whole);
    TEAM_FOR_CHUNKS(m, g, groups_of(w), HEAD_CHUNK) {
        for (int64_t r = 0, n; r < c->num_whole; r += n) {
            n = tile_of(w, &x, r, c->num_whole - r);
            const struct fetch ahead = fetch_of(w, r, c->num_whole, g + 1);
            head_tile(c, &x, g, r, n, &ahead);
        }
        for (int64_t r = c->parts, n; r < c->num_rows; r += n ? n : 1) {
            for (n = 0; n < ROW_TILE && r + n < c->num_rows && wants(c->rows + r + n, g);) n++;
            if (n) head_tile(c, &x, g, r, n, &(struct fetch){0});
        }
    }
    leave_products();
}

/* Finish the forward of `a`, which had `defers_head`; its arguments and scratch are as that call left them. */
void VARIANT(lockstep_forward_head)(const struct forward_args *a, const struct accept_args *rows) {
    struct forward_work w;
    lay_out(a, a->scratch, a->num_rows, &w);
    open_work(a, &w);
    struct head_call call = {
        .args = a, .rows = w.head_rows, .inputs = w.head_inputs, .parts = w.num_logits, .num_rows = w.num_logits};
    for (int64_t r = 0; r < w.num_logits; r++) {
        const struct head_row row = head_row_of(a, rows, &w, r);
        if (!row.mask && row.only == NO_GROUP) continue;
        const int64_t at = row.only == EVERY_GROUP ? call.num_whole++ : --call.parts;
        w.head_rows[at] = row;
        copy_block_row(&w.normed, r, &w.head_inputs, at);
    }
    if (call.num_whole || call.parts < call.num_rows) team_run(masked_head_body, &call);
}

#endif
