/* Paged attention with the KV store fused in front, for CPUs: any number of query positions, grouped-query heads.
 *
 * Layout of one layer's cache, chosen so that both products run along 16 lanes without a horizontal sum:
 *     k_pages [num_pages][Hkv][D][page_size]     (transposed: 16 tokens of one channel are neighbours)
 *     v_pages [num_pages][Hkv][page_size][D]
 * Softmax is the online one (Milakov and Gimelshein 2018) over blocks of 64 tokens that start at multiples of 64, so a
 * query's result does not depend on what else is in the batch, nor on how many queries come with it.
 *
 * Writer of the cache: this function, in its first half; all stores are done before the first load (the implicit barrier
 * of the parallel loop).
 */
#include "simd.h"

#define TILE 6    /* queries at once: TILE * SUBS score vectors stay in registers */
#define SUBS 4    /* sub-blocks of 16 tokens, each within one page */
#define BLOCK (16 * SUBS)
#define MAX_D 256
#define UNROLL _Pragma("GCC unroll 8")

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

/* State of one tile of queries, carried from block to block. */
struct tile {
    float q[MAX_D][TILE];          /* scaled */
    v16f acc[TILE][MAX_D / 16];    /* weighted sum of the values so far */
    float peak[TILE], denom[TILE]; /* largest score so far, sum of weights */
    int32_t first_key[TILE], pos[TILE];
    int32_t begin, last;           /* over the tile; last < 0: padding alone */
};

INLINE void open_tile(const struct paged_attention_args *a, struct tile *w, int64_t b, int64_t hkv, int64_t first, int64_t d,
                      int bf16) {
    const int64_t group = a->num_heads / a->num_kv_heads, total = a->num_queries * group;
    w->begin = INT32_MAX;
    w->last = -1;
    for (int t = 0; t < TILE; t++) {
        int64_t i = first + t;
        w->pos[t] = i < total ? a->positions[b * a->num_queries + i / group] : -1;
        w->first_key[t] = a->window > 0 && w->pos[t] >= a->window ? w->pos[t] - a->window + 1 : 0;
        w->peak[t] = -INFINITY;
        w->denom[t] = 0.0f;
        for (int64_t c = 0; c < d / 16; c++)
            w->acc[t][c] = splat(0.0f);
        int64_t src = b * a->q_stride_b + (i / group) * a->q_stride_p + (hkv * group + i % group) * a->q_stride_h;
        for (int64_t c = 0; c < d; c++)
            w->q[c][t] = w->pos[t] < 0 ? 0.0f : load1(a->q, src + c, bf16) * a->scale;
        if (w->pos[t] < 0)
            continue;
        w->last = w->pos[t] > w->last ? w->pos[t] : w->last;
        w->begin = w->first_key[t] < w->begin ? w->first_key[t] : w->begin;
    }
}

/* Scores of 16 * subs keys into s, and their values as fp32 into v. */
INLINE void load_block(const struct paged_attention_args *a, const struct tile *w, int64_t b, int64_t hkv, int64_t at, int subs,
                       v16f s[TILE][SUBS], float *v, int64_t d, int bf16) {
    const int64_t ps = a->page_size;
    int64_t key[SUBS];
    for (int i = 0; i < subs; i++) {
        int64_t token = at + 16 * i, page = a->page_table[b * a->table_stride + token / ps];
        int64_t head = (page * a->num_kv_heads + hkv) * d * ps;
        key[i] = head + token % ps;
        /* Behind the last position are values of the page's earlier owner. Their weight is 0, but 0 * NaN is NaN. */
        int64_t fresh = w->last - token + 1 < 16 ? w->last - token + 1 : 16;
        for (int64_t c = 0; c < 16 * d; c += 16) {
            v16f x = c < fresh * d ? load(a->v_pages, head + token % ps * d + c, bf16) : splat(0.0f);
            memcpy(v + 16 * i * d + c, &x, sizeof x);
        }
    }
    for (int t = 0; t < TILE; t++)
        for (int i = 0; i < SUBS; i++)
            s[t][i] = splat(0.0f);
    if (subs == SUBS) {
        v16f r[TILE][SUBS] = {0};
        for (int64_t c = 0; c < d; c++) {
            v16f k[SUBS];
            UNROLL for (int i = 0; i < SUBS; i++) k[i] = load(a->k_pages, key[i] + c * ps, bf16);
            UNROLL for (int t = 0; t < TILE; t++) {
                v16f q = splat(w->q[c][t]);
                UNROLL for (int i = 0; i < SUBS; i++) r[t][i] += q * k[i];
            }
        }
        memcpy(s, r, sizeof r);
    } else
        for (int i = 0; i < subs; i++) {
            v16f part[TILE] = {0};
            for (int64_t c = 0; c < d; c++) {
                v16f k = load(a->k_pages, key[i] + c * ps, bf16);
                UNROLL for (int t = 0; t < TILE; t++) part[t] += splat(w->q[c][t]) * k;
            }
            for (int t = 0; t < TILE; t++)
                s[t][i] = part[t];
        }
}

/* Write query t's weights of this block into p, zero where the key is masked, and rescale its sums to the new peak. */
INLINE void weigh(const struct paged_attention_args *a, struct tile *w, int t, int64_t at, const v16f s[SUBS], float *p, int64_t d) {
    const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    v16f x[SUBS], m = splat(-INFINITY), total = splat(0.0f);
    for (int i = 0; i < SUBS; i++) {
        v16i token = lane + (int32_t)(at + 16 * i);
        v16i legal = (token <= w->pos[t]) & (token >= w->first_key[t]);
        x[i] = s[i];
        if (a->softcap > 0.0f)
            for (int j = 0; j < 16; j++)
                x[i][j] = a->softcap * tanhf(x[i][j] / a->softcap);
        x[i] = select16(legal, x[i], splat(-INFINITY));
        m = larger(m, x[i]);
    }
    float peak = max16(m);
    if (peak > w->peak[t]) {
        float shrink = w->peak[t] == -INFINITY ? 0.0f : exp16(splat(w->peak[t] - peak))[0];
        w->denom[t] *= shrink;
        for (int64_t c = 0; c < d / 16; c++)
            w->acc[t][c] *= splat(shrink);
        w->peak[t] = peak;
    }
    float base = w->peak[t] == -INFINITY ? 0.0f : w->peak[t];
    for (int i = 0; i < SUBS; i++) {
        x[i] = exp16(x[i] - splat(base));
        total += x[i];
        memcpy(p + 16 * i, &x[i], sizeof x[i]);
    }
    w->denom[t] += sum16(total);
}

/* acc += p . v for two queries: eight sums in registers keep both multipliers busy. */
INLINE void gather(struct tile *w, int t, const float *p0, const float *p1, const float *v, int tokens, int64_t d) {
    for (int64_t c = 0; c < d / 16; c += 4) {
        int n = d / 16 - c < 4 ? (int)(d / 16 - c) : 4;
        v16f x[4], y[4];
        for (int e = 0; e < n; e++) {
            x[e] = w->acc[t][c + e];
            y[e] = w->acc[t + 1][c + e];
        }
        if (n == 4)
            for (int j = 0; j < tokens; j++) {
                v16f q0 = splat(p0[j]), q1 = splat(p1[j]);
                UNROLL for (int e = 0; e < 4; e++) {
                    v16f value = load_f32(v + j * d + (c + e) * 16);
                    x[e] += q0 * value;
                    y[e] += q1 * value;
                }
            }
        else
            for (int j = 0; j < tokens; j++)
                for (int e = 0; e < n; e++) {
                    v16f value = load_f32(v + j * d + (c + e) * 16);
                    x[e] += splat(p0[j]) * value;
                    y[e] += splat(p1[j]) * value;
                }
        for (int e = 0; e < n; e++) {
            w->acc[t][c + e] = x[e];
            w->acc[t + 1][c + e] = y[e];
        }
    }
}

/* TILE queries of one (sequence, KV head): query number i is (p, g) = (i / group, i % group). */
INLINE void attend_tile(const struct paged_attention_args *a, int64_t b, int64_t hkv, int64_t first, int64_t d, int bf16) {
    const int64_t group = a->num_heads / a->num_kv_heads, total = a->num_queries * group;
    struct tile w __attribute__((aligned(64)));
    float v[BLOCK * MAX_D] __attribute__((aligned(64))), p[TILE][BLOCK] __attribute__((aligned(64)));
    open_tile(a, &w, b, hkv, first, d, bf16);
    for (int64_t at = w.last < 0 ? 0 : w.begin / BLOCK * BLOCK; at <= w.last; at += BLOCK) {
        v16f s[TILE][SUBS];
        /* Keys past the tile's last position may lie in no page at all. */
        int subs = w.last - at >= BLOCK - 16 ? SUBS : (int)((w.last - at) / 16 + 1);
        load_block(a, &w, b, hkv, at, subs, s, v, d, bf16);
        for (int t = 0; t < TILE; t++)
            weigh(a, &w, t, at, s[t], p[t], d);
        for (int t = 0; t < TILE; t += 2)
            gather(&w, t, p[t], p[t + 1], v, 16 * subs, d);
    }
    for (int t = 0; t < TILE && first + t < total; t++) {
        int64_t i = first + t;
        int64_t dst = ((b * a->num_queries + i / group) * a->num_heads + hkv * group + i % group) * d;
        float inverse = w.denom[t] > 0.0f ? 1.0f / w.denom[t] : 0.0f;
        for (int64_t c = 0; c < d; c++)
            store1(a->out, dst + c, w.acc[t][c / 16][c % 16] * inverse, bf16);
    }
}

static void attend(const struct paged_attention_args *a, int64_t b, int64_t hkv, int64_t first) {
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

void VARIANT(lockstep_paged_attention)(const struct paged_attention_args *a) {
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
