/* Latent attention in a whole forward (see forward.h): what lies between a layer's first product and its last one, around the
 * attention. All numbers are fp32. See latent.h for the method.
 *
 * Each function has loops that the team shares. Invariant: a row depends only on itself. Not responsible for: the attention,
 * the pages.
 */
#ifndef LOCKSTEP_LATENT_LAYER_H
#define LOCKSTEP_LATENT_LAYER_H

#include "blocks.h"
#include "mixture.h"
#include "team.h"

/* One layer's weights. The loader of the model owns them. */
struct latent_layer {
    struct block_weights query; /* of compressed queries; null integers: the first product gives queries */
    const struct block_weights *keys, *values; /* by head: unrotated -> latent, latent -> value channels */
    const float *query_norm, *norm;            /* fp32, of compressed queries and of the latent */
    float query_eps, eps;
};

/* Numbers that all layers of a model have in common; latent 0: there is no such layer. */
struct latent_sizes {
    int64_t latent, unrotated, rotated, values;
    int64_t width; /* of a key in the pages: the latent, the channels that rotate, zeros */
    int64_t rank;  /* of compressed queries; 0: they are not compressed */
};

struct latent_work {
    float *queries;          /* [R][heads][width]; after the attention [R][heads][values], in the same places */
    uint8_t *normed, *heads; /* inputs of the products of compressed queries, and of those by head */
};

INLINE int64_t most_head_inputs(const struct latent_sizes *s) {
    return s->latent > s->unrotated ? s->latent : s->unrotated;
}

/* Lay the work out from `memory` on for so many rows; return the end. */
static uint8_t *lay_out_latent(const struct latent_sizes *s, int64_t heads, uint8_t *memory, int64_t rows,
                               struct latent_work *w) {
    const int64_t some = s->latent ? rows : 0;
    w->queries = (float *)carve(&memory, some * heads * s->width * 4);
    w->normed = carve(&memory, s->rank ? block_rows_bytes(some, s->rank) : 0);
    w->heads = carve(&memory, some ? block_rows_bytes(some * heads, most_head_inputs(s)) : 0);
    return memory;
}

/* The inputs of the products by head, of `rows` rows from `begin` on: row r of head h is h * rows + r. These rows have bytes of
 * their own, because members of one loop may be at the keys of a layer and at the values of the one before it. */
INLINE struct block_rows head_inputs_at(const struct latent_sizes *s, const struct latent_work *w, int64_t heads,
                                        int64_t begin, int64_t rows, int64_t inputs) {
    const int64_t bytes = block_row_bytes(most_head_inputs(s));
    return block_rows_at(w->heads + begin * heads * bytes, rows * heads, inputs);
}

/* Rotated channels, the first ones of all pairs and then the second ones; zeros up to `end`. The angles are halves. */
INLINE void rotate_apart(const float *from, const float *cos, const float *sin, int64_t rotated, int32_t neighbours,
                         float *to, int64_t end) {
    const int64_t half = rotated / 2, first = neighbours ? 2 : 1, second = neighbours ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
        const float x = from[first * i], y = from[first * i + second];
        to[i] = fused1(x, cos[i], -y * sin[i]);
        to[half + i] = fused1(y, cos[i], x * sin[i]);
    }
    for (int64_t i = rotated; i < end; i++) to[i] = 0.0f;
}

/* One row's queries: the channels that rotate into `queries`, the others as inputs of the keys' products. */
static void place_queries(const struct latent_sizes *s, int64_t heads, const float *q, const float *cos,
                          const float *sin, int32_t neighbours, float *queries, const struct block_rows *to,
                          int64_t rows, int64_t r) {
    for (int64_t h = 0; h < heads; h++, q += s->unrotated + s->rotated, queries += s->width) {
        rotate_apart(q + s->unrotated, cos, sin, s->rotated, neighbours, queries + s->latent, s->width - s->latent);
        quantise_row(q, to, h * rows + r);
    }
}

/* The product of each head, of `rows` rows, to `out` by the steps of rows and heads. */
static void product_by_head(struct member *m, const struct block_weights *weights, int64_t heads,
                            const struct block_rows *x, int64_t rows, float *out, int64_t row, int64_t head) {
    const int64_t groups = groups_of(weights);
    const struct block_rows ready = ready_rows(m, weights, x, rows, heads * rows);
    TEAM_FOR(m, item, heads * groups) {
        const int64_t h = item / groups, g = item % groups;
        const struct block_rows of_head = block_rows_from(&ready, h * rows);
        group_into(weights + h, g, &of_head, 0, rows, g + 1, out + h * head, row, 0);
    }
}

#endif
