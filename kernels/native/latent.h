/* Latent attention in its absorbed form, around the attention itself: the rows that the cache and the attention take, and one
 * product for each head.
 *
 * A token's keys and values are products of one latent vector, so queries are multiplied by the keys' matrix of their head,
 * and what they attend to by the values' one: the cache has the latent, and the part of the key that rotates. Invariant: a row
 * depends only on itself, bit for bit, whatever else is in the call. Not responsible for: the attention (see
 * paged_attention.h), other products.
 *
 * Source: DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1.
 */
#ifndef LOCKSTEP_LATENT_H
#define LOCKSTEP_LATENT_H

#include "fused.h"
#include "team.h"

struct block_weights;

/* Mirrored in kernels/latent.py. */
struct latent_rows_args {
    const void *q;      /* [rows][q_stride]: by head, channels that do not rotate, then those that do */
    const void *kv;     /* [rows][kv_stride]: the latent before its norm, then the shared key */
    const void *weight; /* [latent], of the RMSNorm that rounds before it scales */
    const void *cos;    /* [rows][angle_stride], the first rotated / 2 */
    const void *sin;    /* the same */
    void *queries;      /* [rows][heads][width]: gets the channels from `latent` on */
    void *keys;         /* [rows][width]: gets all */
    int64_t rows, q_stride, kv_stride, angle_stride, heads, unrotated, rotated, latent, width;
    float eps;
    int32_t bf16, angles_bf16;
    int32_t neighbours; /* channels 2 i and 2 i + 1 are a pair; 0: i and i + rotated / 2 */
};

struct head_products_args {
    const struct block_weights *blocks; /* by head; null: `weights` */
    const void *weights;                /* [heads][inputs][outputs] */
    const void *x;                      /* x and out: by the steps below */
    void *out;
    uint8_t *scratch; /* of blocks, block_rows_bytes(rows * heads, inputs) */
    int64_t rows, heads, inputs, outputs, x_row, x_head, out_row, out_head;
    int64_t bf16;
};

/* Rotated channels of one head into `to`, the first channels of all pairs and then the second ones; zeros up to `end`. */
INLINE void rotate_into(const struct latent_rows_args *a, const void *from, int64_t at, void *to, int64_t out,
                        int64_t angle, int64_t end, int bf16, int angles_bf16) {
    const int32s even = (int32s)lanes_of(0) * 2;
    const int64_t half = a->rotated / 2;
    for (int64_t i = 0; i < half; i += WIDTH) {
        const int64_t n = half - i;
        floats x, y;
        const floats c = load_some(a->cos, angle + i, n, angles_bf16);
        const floats s = load_some(a->sin, angle + i, n, angles_bf16);
        if (a->neighbours) {
            const floats low = load_some(from, at + 2 * i, 2 * n, bf16);
            const floats high = load_some(from, at + 2 * i + WIDTH, 2 * n - WIDTH, bf16);
            x = __builtin_shuffle(low, high, even);
            y = __builtin_shuffle(low, high, even + 1);
        } else {
            x = load_some(from, at + i, n, bf16);
            y = load_some(from, at + half + i, n, bf16);
        }
        store_some(to, out + i, turned(x, c, -y, s, angles_bf16), n, bf16);
        store_some(to, out + half + i, turned(y, c, x, s, angles_bf16), n, bf16);
    }
    for (int64_t i = a->rotated; i < end; i++) store1(to, out + i, 0.0f, bf16);
}

INLINE void latent_row(const struct latent_rows_args *a, int64_t r, int bf16, int angles_bf16) {
    const int64_t size = bf16 ? 2 : 4, angle = r * a->angle_stride, end = a->width - a->latent;
    const struct rms_norm_args norm = {
        .x = (char *)(intptr_t)a->kv + r * a->kv_stride * size,
        .weight = a->weight,
        .out = (char *)a->keys + r * a->width * size,
        .rows = 1,
        .width = a->latent,
        .eps = a->eps,
        .kind = ROUND_THEN_SCALE,
    };
    norm_row(&norm, 0, bf16);
    rotate_into(a, a->kv, r * a->kv_stride + a->latent, a->keys, r * a->width + a->latent, angle, end, bf16,
                angles_bf16);
    for (int64_t h = 0; h < a->heads; h++)
        rotate_into(a, a->q, r * a->q_stride + h * (a->unrotated + a->rotated) + a->unrotated, a->queries,
                    (r * a->heads + h) * a->width + a->latent, angle, end, bf16, angles_bf16);
}

static __attribute__((noinline)) void latent_rows_body(struct member *m, void *context) {
    const struct latent_rows_args *a = context;
    TEAM_FOR(m, r, a->rows) {
        if (a->bf16 && a->angles_bf16)
            latent_row(a, r, 1, 1);
        else if (a->bf16)
            latent_row(a, r, 1, 0);
        else
            latent_row(a, r, 0, 0);
    }
}

void VARIANT(lockstep_latent_rows)(const struct latent_rows_args *a) {
    team_run(latent_rows_body, (void *)(intptr_t)a);
}

#define HEAD_ROWS 6 /* rows at once */
/* Vectors of outputs at once: with the rows, as many sums as stay in registers. */
#define HEAD_VECTORS (WIDTH == 16 ? 4 : 2)

/* n rows of one head from `r` on, WIDTH * wide outputs from `o` on. */
INLINE void heads_tile(const struct head_products_args *a, int64_t h, int64_t r, int n, int64_t o, int wide, int bf16) {
    const int64_t x = r * a->x_row + h * a->x_head, w = h * a->inputs * a->outputs + o;
    floats sums[HEAD_ROWS][HEAD_VECTORS] = {0};
    for (int64_t k = 0; k < a->inputs; k++) {
        floats weights[HEAD_VECTORS];
        UNROLL for (int e = 0; e < wide; e++) weights[e] = load_lanes(a->weights, w + k * a->outputs + e * WIDTH, bf16);
        UNROLL for (int t = 0; t < n; t++) {
            const floats each = splat(load1(a->x, x + t * a->x_row + k, bf16));
            UNROLL for (int e = 0; e < wide; e++) sums[t][e] = fused(each, weights[e], sums[t][e]);
        }
    }
    UNROLL for (int t = 0; t < n; t++) UNROLL for (int e = 0; e < wide; e++)
        store_lanes(a->out, (r + t) * a->out_row + h * a->out_head + o + e * WIDTH, sums[t][e], bf16);
}

INLINE void heads_outputs(const struct head_products_args *a, int64_t h, int64_t r, int n, int64_t o, int bf16) {
    if (a->outputs - o >= WIDTH * HEAD_VECTORS) {
        heads_tile(a, h, r, n, o, HEAD_VECTORS, bf16);
        return;
    }
    for (; o < a->outputs; o += WIDTH) heads_tile(a, h, r, n, o, 1, bf16);
}

INLINE void heads_rows(const struct head_products_args *a, int64_t h, int64_t o, int bf16) {
    int64_t r = 0;
    for (; r + HEAD_ROWS <= a->rows; r += HEAD_ROWS) heads_outputs(a, h, r, HEAD_ROWS, o, bf16);
    for (; r + 2 <= a->rows; r += 2) heads_outputs(a, h, r, 2, o, bf16);
    if (r < a->rows) heads_outputs(a, h, r, 1, o, bf16);
}

static __attribute__((noinline)) void float_heads_body(struct member *m, void *context) {
    const struct head_products_args *a = context;
    const int64_t parts = (a->outputs + WIDTH * HEAD_VECTORS - 1) / (WIDTH * HEAD_VECTORS);
    TEAM_FOR(m, item, a->heads * parts) {
        if (a->bf16)
            heads_rows(a, item / parts, item % parts * WIDTH * HEAD_VECTORS, 1);
        else
            heads_rows(a, item / parts, item % parts * WIDTH * HEAD_VECTORS, 0);
    }
}

#if defined(LOCKSTEP_BLOCKS_H)
static __attribute__((noinline)) void block_heads_body(struct member *m, void *context) {
    const struct head_products_args *a = context;
    const struct block_rows plain = block_rows_at(a->scratch, a->rows * a->heads, a->inputs);
    const int bf16 = (int)a->bf16;
    TEAM_FOR(m, i, a->rows * a->heads)
    for (int64_t block = 0; block < a->inputs / QBLOCK; block++) {
        const int64_t at = i % a->rows * a->x_row + i / a->rows * a->x_head + block * QBLOCK;
        float part[QBLOCK];
        for (int64_t e = 0; e < QBLOCK; e += WIDTH) store_floats(part + e, load_lanes(a->x, at + e, bf16));
        quantise_blocks(part, QBLOCK, 1, &plain, i, block, 0);
    }
    const struct block_rows x = ready_rows(m, a->blocks, &plain, a->rows, a->rows * a->heads);
    const int64_t groups = groups_of(a->blocks);
    TEAM_FOR(m, item, a->heads * groups) {
        const int64_t h = item / groups, g = item % groups, left = a->outputs - g * GROUP;
        const int64_t count = left < GROUP ? left : GROUP;
        const struct block_weights *w = a->blocks + h;
        float y[STEP_ROWS][GROUP];
        for (int64_t r = 0, n; r < a->rows; r += n) {
            n = tile_of(w, &x, r, a->rows - r);
            const struct fetch ahead = fetch_of(w, r, a->rows, g + 1);
            group_rows(w, g, &x, h * a->rows + r, n, &ahead, y[0], GROUP);
            for (int64_t t = 0; t < n; t++)
                for (int64_t i = 0; i < count; i += WIDTH)
                    store_some(a->out, (r + t) * a->out_row + h * a->out_head + g * GROUP + i, load_floats(y[t] + i),
                               count - i, bf16);
        }
    }
    leave_products();
}
#endif

void VARIANT(lockstep_head_products)(const struct head_products_args *a) {
#if defined(LOCKSTEP_BLOCKS_H)
    if (a->blocks) {
        team_run(block_heads_body, (void *)(intptr_t)a);
        return;
    }
#endif
    team_run(float_heads_body, (void *)(intptr_t)a);
}

#endif
