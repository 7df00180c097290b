/* Paged attention with the KV store fused in front, for CPUs: any number of query positions, grouped-query heads.
 *
 * Layout of one layer's cache, chosen so that both products run along 16 lanes without a horizontal sum:
 *     k_pages [num_pages][Hkv][D][page_size]     (transposed: 16 tokens of one channel are neighbours)
 *     v_pages [num_pages][Hkv][page_size][D]
 * Softmax is the online one (Milakov and Gimelshein 2018) over blocks of 16 tokens that start at multiples of 16, so a
 * query's result does not depend on what else is in the batch, nor on how many queries come with it.
 *
 * Writer of the cache: this function, in its first half; all stores are done before the first load (the implicit barrier
 * of the parallel loop).
 */
#define _GNU_SOURCE
#include "simd.h"

#include <stdlib.h>

#define TILE 12  /* queries whose scores live in registers at once */
#define MAX_D 256
#define BLOCK 16

struct paged_attention_args {
    const void *q;            /* [B][P][Hq][D] by strides below, D contiguous */
    const void *k;            /* [B][P][Hkv][D] by strides below, the new keys */
    const void *v;            /* the same for values */
    void *out;                /* [B][P][Hq][D] contiguous */
    void *k_pages, *v_pages;  /* as above */
    const int32_t *page_table; /* [B][table_stride], page numbers */
    const int32_t *positions;  /* [B][P], absolute position of each query; < 0: padding, nothing stored, zeros out */
    int64_t q_stride_b, q_stride_p, q_stride_h;
    int64_t k_stride_b, k_stride_p, k_stride_h;
    int64_t v_stride_b, v_stride_p, v_stride_h;
    int64_t table_stride;
    int32_t num_batch, num_queries, num_heads, num_kv_heads, head_dim, page_size;
    int32_t bf16;
    int32_t window;           /* sliding window in tokens, 0: none */
    float scale, softcap;     /* softcap 0: none */
};

INLINE void store_row(const struct paged_attention_args *a, int64_t b, int64_t p, int bf16) {
    int32_t pos = a->positions[b * a->num_queries + p];
    if (pos < 0)
        return;
    int64_t ps = a->page_size, d = a->head_dim;
    int64_t page = a->page_table[b * a->table_stride + pos / ps], off = pos % ps;
    for (int64_t h = 0; h < a->num_kv_heads; h++) {
        int64_t ks = b * a->k_stride_b + p * a->k_stride_p + h * a->k_stride_h;
        int64_t vs = b * a->v_stride_b + p * a->v_stride_p + h * a->v_stride_h;
        int64_t head = (page * a->num_kv_heads + h) * d * ps;
        if (bf16) {
            const uint16_t *k = (const uint16_t *)a->k + ks;
            uint16_t *kp = (uint16_t *)a->k_pages + head + off;
            for (int64_t i = 0; i < d; i++)
                kp[i * ps] = k[i];
            memcpy((uint16_t *)a->v_pages + head + off * d, (const uint16_t *)a->v + vs, (size_t)d * 2);
        } else {
            const float *k = (const float *)a->k + ks;
            float *kp = (float *)a->k_pages + head + off;
            for (int64_t i = 0; i < d; i++)
                kp[i * ps] = k[i];
            memcpy((float *)a->v_pages + head + off * d, (const float *)a->v + vs, (size_t)d * 4);
        }
    }
}

/* TILE queries of one (sequence, KV head): query number i is (p, g) = (i / group, i % group). */
INLINE void attend_tile(const struct paged_attention_args *a, int64_t b, int64_t hkv, int64_t first, int64_t d, int bf16) {
    const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t ps = a->page_size, group = a->num_heads / a->num_kv_heads;
    const int64_t total = a->num_queries * group;
    float q[MAX_D][TILE] __attribute__((aligned(64)));
    v16f acc[TILE][MAX_D / 16];
    float peak[TILE], denom[TILE];
    int32_t pos[TILE];
    int32_t last = -1, begin = INT32_MAX;

    for (int t = 0; t < TILE; t++) {
        int64_t i = first + t;
        pos[t] = -1;
        peak[t] = -INFINITY;
        denom[t] = 0.0f;
        for (int64_t c = 0; c < d / 16; c++)
            acc[t][c] = splat(0.0f);
        if (i < total)
            pos[t] = a->positions[b * a->num_queries + i / group];
        if (pos[t] < 0) {
            for (int64_t c = 0; c < d; c++)
                q[c][t] = 0.0f;
            continue;
        }
        int64_t src = b * a->q_stride_b + (i / group) * a->q_stride_p + (hkv * group + i % group) * a->q_stride_h;
        for (int64_t c = 0; c < d; c++)
            q[c][t] = load1(a->q, src + c, bf16) * a->scale;
        int32_t lo = a->window > 0 && pos[t] >= a->window ? pos[t] - a->window + 1 : 0;
        last = pos[t] > last ? pos[t] : last;
        begin = lo < begin ? lo : begin;
    }
    for (int64_t block = last < 0 ? 1 : begin / BLOCK; block <= (last < 0 ? 0 : last / BLOCK); block++) {
        int64_t at = block * BLOCK, page = a->page_table[b * a->table_stride + at / ps], off = at % ps;
        int64_t head = (page * a->num_kv_heads + hkv) * d * ps;
        v16f s[TILE];
        for (int t = 0; t < TILE; t++)
            s[t] = splat(0.0f);
        for (int64_t c = 0; c < d; c++) {
            v16f k = load(a->k_pages, head + c * ps + off, bf16);
            for (int t = 0; t < TILE; t++)
                s[t] += splat(q[c][t]) * k;
        }
        for (int t = 0; t < TILE; t++) {
            int32_t lo = a->window > 0 ? pos[t] - a->window + 1 : 0;
            if (pos[t] < at || at + BLOCK <= lo)
                continue;
            if (a->softcap > 0.0f)
                for (int j = 0; j < 16; j++)
                    s[t][j] = a->softcap * tanhf(s[t][j] / a->softcap);
            v16i token = lane + (int32_t)at;
            v16i legal = (token <= pos[t]) & (token >= lo);
            v16f x = select16(legal, s[t], splat(-INFINITY));
            float m = max16(x);
            if (m > peak[t]) {
                float shrink = peak[t] == -INFINITY ? 0.0f : exp16(splat(peak[t] - m))[0];
                denom[t] *= shrink;
                for (int64_t c = 0; c < d / 16; c++)
                    acc[t][c] *= splat(shrink);
                peak[t] = m;
            }
            v16f p = select16(legal, exp16(s[t] - splat(peak[t])), splat(0.0f));
            denom[t] += sum16(p);
            /* Channels in fours: the sums stay in registers over the block's tokens. */
            for (int64_t c = 0; c < d / 16; c += 4) {
                int64_t n = d / 16 - c < 4 ? d / 16 - c : 4;
                for (int j = 0; j < BLOCK; j++)
                    for (int64_t e = 0; e < n; e++)
                        acc[t][c + e] += splat(p[j]) * load(a->v_pages, head + (off + j) * d + (c + e) * 16, bf16);
            }
        }
    }
    for (int t = 0; t < TILE; t++) {
        int64_t i = first + t;
        if (i >= total)
            break;
        int64_t dst = ((b * a->num_queries + i / group) * a->num_heads + hkv * group + i % group) * d;
        float inverse = denom[t] > 0.0f ? 1.0f / denom[t] : 0.0f;
        for (int64_t c = 0; c < d; c++)
            store1(a->out, dst + c, acc[t][c / 16][c % 16] * inverse, bf16);
    }
}

MULTIVERSION static void attend(const struct paged_attention_args *a, int64_t b, int64_t hkv, int64_t first) {
    int64_t d = a->head_dim;
    if (a->bf16) {
        if (d == 64)
            attend_tile(a, b, hkv, first, 64, 1);
        else if (d == 128)
            attend_tile(a, b, hkv, first, 128, 1);
        else
            attend_tile(a, b, hkv, first, d, 1);
    } else {
        if (d == 64)
            attend_tile(a, b, hkv, first, 64, 0);
        else
            attend_tile(a, b, hkv, first, d, 0);
    }
}

void lockstep_paged_attention(const struct paged_attention_args *a) {
    int64_t rows = (int64_t)a->num_batch * a->num_queries;
    int64_t group = a->num_heads / a->num_kv_heads;
    int64_t tiles = (a->num_queries * group + TILE - 1) / TILE;
    int64_t tasks = (int64_t)a->num_batch * a->num_kv_heads * tiles;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            if (a->bf16)
                store_row(a, r / a->num_queries, r % a->num_queries, 1);
            else
                store_row(a, r / a->num_queries, r % a->num_queries, 0);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++)
            attend(a, task / (a->num_kv_heads * tiles), task / tiles % a->num_kv_heads, task % tiles * TILE);
    }
}
