/* What a recurrent layer of a forward computes between its first and its last product.
 *
 * Two forms. A gated convolution (LFM 2) has outputs before, after, x of equal size, and gives after * conv(before * x).
 * A matrix mixer (Mamba 2, the gated delta rule) has outputs for its convolution, its gate and what controls a row, and
 * gives the gated norm of what its matrices read. `bring_rows` and `gate_read` take every row for itself; `recur`, between
 * them, needs the rows of all lanes. Invariant: as in recurrent.h, whose loops these are. Not responsible for: the first
 * and the last product.
 */
#ifndef LOCKSTEP_RECURRENT_LAYER_H
#define LOCKSTEP_RECURRENT_LAYER_H

#include "mixture.h"
#include "recurrent.h"

enum { GATED_CONV, MATRIX_MIXER };

struct recurrent_layer {
    struct block_weights first, output;
    struct short_conv_args conv; /* without rows, x and out; so are the next two */
    struct matrix_recurrence_args matrix;
    struct gated_norm_args norm;
    struct block_weights control;      /* gives what controls a row, from the first product's input */
    int64_t x_at, gate_at, control_at; /* columns of the first product's outputs. control_at: without `control` */
    int32_t kind;
};

/* The same for all recurrent layers of a forward; all 0: it has none. */
struct recurrent_sizes {
    int64_t projected; /* outputs of the first product */
    int64_t mixed;     /* channels of a matrix mixer's convolution */
    int64_t control;   /* floats that control a row of a matrix mixer */
    int64_t read;      /* inputs of the last product */
    int64_t beside;    /* outputs of the last product of a layer that also has attention; 0: there is none */
};

/* R rows that are no padding, of L lanes. */
struct recurrent_work {
    float *projected, *mixed, *control, *read; /* [R], but mixed: [L max_pending + R] */
    struct block_rows given;                   /* `read`, as the last product takes it */
    float *beside;                             /* [R]: what that product gives next to attention */
    int32_t *first;                            /* [L + 1]: lane i has rows [first[i], first[i + 1]) of R */
};

/* Lay the work out from `memory` on for so many rows; return the end. */
static uint8_t *lay_out_recurrent(const struct recurrent_sizes *sizes, const struct recurrent_rows *lanes,
                                  uint8_t *memory, int64_t rows, struct recurrent_work *w) {
    if (!sizes->projected) rows = 0;
    const int64_t redone = sizes->mixed ? lanes->lanes * lanes->max_pending : 0;
    w->projected = (float *)carve(&memory, rows * sizes->projected * 4);
    w->mixed = (float *)carve(&memory, (redone + rows) * sizes->mixed * 4);
    w->control = (float *)carve(&memory, rows * sizes->control * 4);
    w->read = (float *)carve(&memory, rows * sizes->read * 4);
    w->beside = (float *)carve(&memory, rows * sizes->beside * 4);
    w->given = block_rows_at(carve(&memory, block_rows_bytes(rows, sizes->read)), rows, sizes->read);
    w->first = (int32_t *)carve(&memory, (lanes->lanes + 1) * 4);
    return memory;
}

/* Find where the lanes begin among the rows that are no padding, whose numbers among the caller's rows ascend. */
static void open_lanes(const struct recurrent_rows *lanes, const int32_t *place, int64_t rows,
                       struct recurrent_work *w) {
    w->first[0] = 0;
    if (lanes->lanes == 0) return;
    for (int64_t i = 0, r = 0; i <= lanes->lanes; i++) {
        while (r < rows && place[r] < lanes->first[i]) r++;
        w->first[i] = (int32_t)r;
    }
}

/* The work of only the rows from `begin` on, for loops in which a row is by itself. */
static struct recurrent_work recurrent_work_from(const struct recurrent_sizes *sizes, const struct recurrent_work *w,
                                                 int64_t begin) {
    struct recurrent_work part = *w;
    part.projected += begin * sizes->projected;
    part.control += begin * sizes->control;
    part.read += begin * sizes->read;
    part.beside += begin * sizes->beside;
    part.given = block_rows_from(&w->given, begin);
    return part;
}

/* What the convolution and the matrices take of the rows `x`, after the first product. */
static void bring_rows(struct member *m, const struct recurrent_layer *l, const struct recurrent_sizes *sizes,
                       const struct block_rows *x, int64_t rows, const struct recurrent_work *w) {
    if (l->control.quants) {
        const struct block_rows ready = ready_rows(m, &l->control, x, rows, rows);
        TEAM_FOR_RANGES(m, part, groups_of(&l->control))
        groups_into(&l->control, &part, &ready, rows, w->control, sizes->control, 0);
        return;
    }
    TEAM_FOR(m, r, rows) {
        float *row = w->projected + r * sizes->projected;
        if (l->kind == MATRIX_MIXER) {
            memcpy(w->control + r * sizes->control, row + l->control_at, (size_t)sizes->control * 4);
            continue;
        }
        for (int64_t i = 0; i < sizes->read; i += WIDTH)
            store_floats(row + i, load_floats(row + i) * load_floats(row + 2 * sizes->read + i));
    }
}

/* The convolution of all rows, and the matrices. */
static void recur(struct member *m, const struct recurrent_layer *l, const struct recurrent_sizes *sizes,
                  const struct recurrent_rows *lanes, int64_t rows, const struct recurrent_work *w) {
    struct short_conv_args conv = l->conv;
    conv.rows = *lanes;
    conv.rows.first = w->first;
    conv.rows.num_rows = rows;
    conv.x = w->projected + l->x_at;
    conv.x_stride = sizes->projected;
    conv.out = l->kind == MATRIX_MIXER ? w->mixed : w->read;
    short_conv_body(m, &conv);
    if (l->kind != MATRIX_MIXER) return;
    struct matrix_recurrence_args matrix = l->matrix;
    matrix.rows = conv.rows;
    matrix.mixed = w->mixed;
    matrix.mixed_stride = sizes->mixed;
    matrix.control = w->control;
    matrix.out = w->read;
    matrix_recurrence_body(m, &matrix);
}

/* A row of what was read, through its gate, in place: the input of the last product. */
INLINE void gate_read(const struct recurrent_layer *l, const struct recurrent_sizes *sizes,
                      const struct recurrent_work *w, int64_t r) {
    float *read = w->read + r * sizes->read;
    const float *projected = w->projected + r * sizes->projected;
    if (l->kind == MATRIX_MIXER) {
        struct gated_norm_args norm = l->norm;
        norm.x = norm.out = read;
        norm.gate = projected + l->gate_at;
        norm.rows = norm.per = sizes->read / norm.width;
        for (int64_t i = 0; i < norm.rows; i++) gated_norm_row(&norm, i, norm.kind, 0);
        return;
    }
    for (int64_t i = 0; i < sizes->read; i += WIDTH)
        store_floats(read + i, load_floats(read + i) * load_floats(projected + sizes->read + i));
}

#endif
