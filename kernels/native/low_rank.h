/* Low-rank matrices next to a product's own (LoRA, Hu et al. 2021): y += B (scale * A x).
 *
 * Sums are fp32. Invariant: a row depends only on its own input and its own adapter, in a fixed order of operations, and
 * the outputs of a row that has no adapter are not touched. Not responsible for: the ownership of matrices, and which row has
 * which adapter (see gpu_engine/model/adapters/).
 */
#ifndef LOCKSTEP_LOW_RANK_H
#define LOCKSTEP_LOW_RANK_H

#include "simd.h"

#define LOW_RANK_PARTS 3 /* products that may be joined to one: those of q, k and v */

struct low_rank_part {
    const void *a;            /* [rank][inputs] */
    const void *b;            /* [rank][end - begin] */
    int64_t rank, begin, end; /* outputs [begin, end) of the product */
    float scale;
    int32_t bf16; /* a and b; else fp32 */
};

/* One adapter's matrices of one product. */
struct low_rank {
    struct low_rank_part parts[LOW_RANK_PARTS];
    int64_t num_parts, inputs; /* no part: the adapter leaves the product as it is */
};

struct low_rank_args {
    const struct low_rank *const *adapters; /* by number: an array, one entry a product; null: none */
    const int32_t *numbers;                 /* [count]: the adapter of each sequence */
    const void *x;                          /* [rows][inputs] */
    void *y;                                /* [rows][outputs]: added to */
    float *scratch;                         /* [rows][rank] */
    int64_t product, count, rows_each; /* row r is of sequence r / rows_each, the rows after the last one are of that */
    int64_t rows, inputs, outputs, rank; /* rank: of a product, its parts together, the most of any adapter */
    int32_t bf16;                        /* x and y */
};

/* dtypes are compile-time constants: of x or y, and of the matrix. */
INLINE void shrink_part(const struct low_rank_part *part, int64_t n, const void *x, int64_t at, int bf16, int narrow,
                        float *t) {
    const int64_t whole = n & ~(int64_t)31;
    for (int64_t k = 0; k < part->rank; k++) {
        floats sums[2 * PIECES] = {0}; /* of 32 inputs */
        for (int64_t i = 0; i < whole; i += 32)
            UNROLL for (int p = 0; p < 2 * PIECES; p++) sums[p] = fused(
                load_lanes(x, at + i + p * WIDTH, bf16), load_lanes(part->a, k * n + i + p * WIDTH, narrow), sums[p]);
        UNROLL for (int p = 0; p < PIECES; p++) sums[p] += sums[PIECES + p];
        float sum = sum16(sums);
        for (int64_t i = whole; i < n; i++)
            sum = fused1(load1(x, at + i, bf16), load1(part->a, k * n + i, narrow), sum);
        t[k] = sum * part->scale;
    }
}

/* t = scale * A x, the parts one after the other. */
INLINE void shrink_row(const struct low_rank *l, const void *x, int64_t at, int bf16, float *t) {
    for (int64_t p = 0; p < l->num_parts; t += l->parts[p++].rank) {
        if (l->parts[p].bf16)
            shrink_part(l->parts + p, l->inputs, x, at, bf16, 1, t);
        else
            shrink_part(l->parts + p, l->inputs, x, at, bf16, 0, t);
    }
}

/* Outputs [begin, end) of the product; y has those from `from` on. */
INLINE void expand_part(const struct low_rank_part *part, const float *t, int64_t begin, int64_t end, int64_t from,
                        void *y, int64_t at, int bf16, int narrow) {
    const int64_t width = part->end - part->begin;
    int64_t o = begin;
    for (; o + WIDTH <= end; o += WIDTH) {
        floats sum = splat(0.0f);
        for (int64_t k = 0; k < part->rank; k++)
            sum = fused(splat(t[k]), load_lanes(part->b, k * width + o - part->begin, narrow), sum);
        store_lanes(y, at + o - from, load_lanes(y, at + o - from, bf16) + sum, bf16);
    }
    for (; o < end; o++) {
        float sum = 0.0f;
        for (int64_t k = 0; k < part->rank; k++)
            sum = fused1(t[k], load1(part->b, k * width + o - part->begin, narrow), sum);
        store1(y, at + o - from, load1(y, at + o - from, bf16) + sum, bf16);
    }
}

/* y[i] += (B t)[from + i] of `count` outputs. */
INLINE void expand_row(const struct low_rank *l, const float *t, int64_t from, int64_t count, void *y, int64_t at,
                       int bf16) {
    for (int64_t p = 0; p < l->num_parts; t += l->parts[p++].rank) {
        const struct low_rank_part *part = l->parts + p;
        const int64_t begin = part->begin > from ? part->begin : from, last = from + count;
        const int64_t end = part->end < last ? part->end : last;
        if (part->bf16)
            expand_part(part, t, begin, end, from, y, at, bf16, 1);
        else
            expand_part(part, t, begin, end, from, y, at, bf16, 0);
    }
}

INLINE void low_rank_row(const struct low_rank_args *a, int64_t r, int bf16) {
    const int64_t s = r / a->rows_each;
    const struct low_rank *of_products = a->adapters[a->numbers[s < a->count ? s : a->count - 1]];
    if (!of_products || !of_products[a->product].num_parts) return;
    shrink_row(of_products + a->product, a->x, r * a->inputs, bf16, a->scratch + r * a->rank);
    expand_row(of_products + a->product, a->scratch + r * a->rank, 0, a->outputs, a->y, r * a->outputs, bf16);
}

void VARIANT(lockstep_low_rank)(const struct low_rank_args *a) {
#pragma omp parallel for schedule(static) if (a->rows > 1 && a->rows * (a->inputs + a->outputs) * a->rank >= 1 << 18)
    for (int64_t r = 0; r < a->rows; r++) {
        if (a->bf16)
            low_rank_row(a, r, 1);
        else
            low_rank_row(a, r, 0);
    }
}

#endif
