/* Paged attention with the KV store fused in front, for CPUs: any number of query positions, grouped-query heads.
 *
 * Layout of one layer's cache, chosen so that both products run along 16 lanes without a horizontal sum:
 *     k_pages [num_pages][Hkv][D][page_size]     (transposed: 16 tokens of one channel are neighbours)
 *     v_pages [num_pages][Hkv][page_size][D]
 *     k_scales, v_scales [num_pages][Hkv][page_size], fp32, with pages of 8 bits only
 * Where the values are the first channels of the keys (latent attention), both are v_pages, and v_scales those of both.
 * With 8 bits a number is an integer times the scale of its token's head: a score is multiplied by the key's scale, and a
 * weight by the value's, so the integers are only converted.
 * Softmax is the online one (Milakov and Gimelshein 2018) over blocks of 64 tokens that start at multiples of 64, so a
 * query's result does not depend on what else is in the batch, nor on how many queries come with it.
 *
 * Writer of the cache: this function, in its first half; all stores are done before the first load (the implicit barrier
 * of the parallel loop).
 */
#include "simd.h"

#define TILE 6      /* queries at once */
#define MOST_TILE 8 /* the same of keys that begin with their values, which have many query heads, or LEAST_JOINED */
#define LEAST_JOINED 2
#define SUBS 4 /* sub-blocks of 16 tokens, each within one page */
#define BLOCK (16 * SUBS)
#define MAX_D 576
#if WIDTH == 16
#define SCORED SUBS /* sub-blocks whose scores for TILE queries fit into registers */
#define GATHERED 4  /* times 16 channels, whose sums for TILE queries fit into registers */
#define TOGETHER 8  /* queries whose scores of two tokens fit into registers */
#else
#define SCORED 1
#define GATHERED 1
#define TOGETHER 2
#endif

enum { PAGES_FP32, PAGES_BF16, PAGES_INT8 };

struct paged_attention_args {
    const void *q;           /* [B][P][Hq][D] by strides below, D contiguous */
    const void *k;           /* [B][P][Hkv][D] by strides below, the new keys; null: nothing is stored */
    const void *v;           /* the same for values; not read where `values` is set */
    void *out;               /* [B][P][Hq][D] contiguous, or [B][P][Hq][values] */
    void *k_pages, *v_pages; /* as above */
    float *k_scales, *v_scales;
    const int32_t *page_table; /* [B][table_stride], page numbers */
    const int32_t *positions;  /* [B][P], absolute position of each query; < 0: padding, nothing stored, zeros out */
    int64_t q_stride_b, q_stride_p, q_stride_h;
    int64_t k_stride_b, k_stride_p, k_stride_h;
    int64_t v_stride_b, v_stride_p, v_stride_h;
    int64_t table_stride;
    int32_t num_batch, num_queries, num_heads, num_kv_heads, head_dim, page_size;
    int32_t kind;         /* of the pages */
    int32_t window;       /* sliding window in tokens, 0: none */
    float scale, softcap; /* softcap 0: none */
    int32_t io_bf16;      /* q, k, v and out; fp32 values are rounded when they are stored in other pages */
    int32_t chunk;        /* a query sees only its own chunk of so many tokens, 0: none */
    const float *sinks;   /* [Hq], a further logit of each head, without a value; NULL: none */
    int64_t values; /* a value is so many channels of its key, the first, a multiple of 16; 0: it is stored apart */
};

/* WIDTH numbers of a page. */
INLINE floats load_page(const void *pages, int64_t index, int kind) {
    return kind == PAGES_INT8 ? floats_of_int8((const int8_t *)pages + index)
                              : load_lanes(pages, index, kind == PAGES_BF16);
}

INLINE int64_t bytes_of_number(int kind) { return kind == PAGES_INT8 ? 1 : kind == PAGES_BF16 ? 2 : 4; }

/* A head of one token as integers to the nearest of x / scale, `step` bytes apart; returns the scale, a 127th of the largest
 * magnitude. A quotient is rounded once; a product with the inverse would be twice. */
INLINE float store_int8(const void *x, int64_t at, int64_t d, int bf16, int8_t *to, int64_t step) {
    const floats magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to the nearest integer */
    floats top[PIECES] = {0};
    FOR_LANES(i, p, d) {
        const floats y = load_lanes(x, at + i, bf16);
        top[p] = larger(top[p], larger(y, -y));
    }
    const float scale = max16(top) / 127.0f;
    const floats divisor = splat(scale > 0.0f ? scale : 1.0f);
    for (int64_t i = 0; i < d; i += WIDTH) {
        const floats y = (load_lanes(x, at + i, bf16) / divisor + magic) - magic;
        const int8s q = __builtin_convertvector(__builtin_convertvector(y, int32s), int8s);
        if (step == 1)
            memcpy(to + i, &q, sizeof q);
        else
            for (int j = 0; j < WIDTH; j++) to[(i + j) * step] = q[j];
    }
    return scale;
}

/* A key that begins with its value, at number `at` of the pages; its scale is `number`. */
INLINE void store_joined(const struct paged_attention_args *a, int64_t key, int64_t at, int64_t number, int kind) {
    if (kind == PAGES_INT8) {
        a->v_scales[number] = store_int8(a->k, key, a->head_dim, a->io_bf16, (int8_t *)a->v_pages + at, 1);
        return;
    }
    for (int64_t i = 0; i < a->head_dim; i += WIDTH)
        store_lanes(a->v_pages, at + i, load_lanes(a->k, key + i, a->io_bf16), kind == PAGES_BF16);
}

INLINE void store_row(const struct paged_attention_args *a, int64_t b, int64_t p, int kind) {
    int32_t pos = a->positions[b * a->num_queries + p];
    if (pos < 0) return;
    int64_t ps = a->page_size, d = a->head_dim;
    int64_t page = a->page_table[b * a->table_stride + pos / ps], off = pos % ps;
    for (int64_t h = 0; a->values && h < a->num_kv_heads; h++) {
        const int64_t number = (page * a->num_kv_heads + h) * ps + off;
        store_joined(a, b * a->k_stride_b + p * a->k_stride_p + h * a->k_stride_h, number * d, number, kind);
    }
    if (a->values) return;
    for (int64_t h = 0; h < a->num_kv_heads; h++) {
        int64_t ks = b * a->k_stride_b + p * a->k_stride_p + h * a->k_stride_h;
        int64_t vs = b * a->v_stride_b + p * a->v_stride_p + h * a->v_stride_h;
        int64_t head = (page * a->num_kv_heads + h) * d * ps;
        if (kind == PAGES_INT8) {
            const int64_t number = (page * a->num_kv_heads + h) * ps + off;
            a->k_scales[number] = store_int8(a->k, ks, d, a->io_bf16, (int8_t *)a->k_pages + head + off, ps);
            a->v_scales[number] = store_int8(a->v, vs, d, a->io_bf16, (int8_t *)a->v_pages + head + off * d, 1);
        } else if (kind == PAGES_BF16 && !a->io_bf16) {
            const float *k = (const float *)a->k + ks, *v = (const float *)a->v + vs;
            uint16_t *kp = (uint16_t *)a->k_pages + head + off, *vp = (uint16_t *)a->v_pages + head + off * d;
            for (int64_t i = 0; i < d; i++) {
                kp[i * ps] = to_bf16(k[i]);
                vp[i] = to_bf16(v[i]);
            }
        } else if (kind == PAGES_BF16) {
            const uint16_t *k = (const uint16_t *)a->k + ks;
            uint16_t *kp = (uint16_t *)a->k_pages + head + off;
            for (int64_t i = 0; i < d; i++) kp[i * ps] = k[i];
            memcpy((uint16_t *)a->v_pages + head + off * d, (const uint16_t *)a->v + vs, (size_t)d * 2);
        } else {
            const float *k = (const float *)a->k + ks;
            float *kp = (float *)a->k_pages + head + off;
            for (int64_t i = 0; i < d; i++) kp[i * ps] = k[i];
            memcpy((float *)a->v_pages + head + off * d, (const float *)a->v + vs, (size_t)d * 4);
        }
    }
}

/* State of one tile of queries, carried from block to block. */
struct tile {
    float q[MOST_TILE][MAX_D];               /* scaled */
    floats acc[MOST_TILE][MAX_D / WIDTH];    /* weighted sum of the values so far */
    float peak[MOST_TILE], denom[MOST_TILE]; /* largest score so far, sum of weights */
    int32_t first_key[MOST_TILE], pos[MOST_TILE];
    int32_t begin, last; /* over the tile; last < 0: only padding */
};

INLINE void open_tile(const struct paged_attention_args *a, struct tile *w, int64_t b, int64_t hkv, int64_t first,
                      int64_t d, int n) {
    const int64_t group = a->num_heads / a->num_kv_heads;
    w->begin = INT32_MAX;
    w->last = -1;
    for (int64_t t = 0, row = first / group, head = first % group; t < n;
         t++, head + 1 < group ? head++ : (row++, head = 0)) {
        w->pos[t] = row < a->num_queries ? a->positions[b * a->num_queries + row] : -1;
        w->first_key[t] = a->window > 0 && w->pos[t] >= a->window ? w->pos[t] - a->window + 1 : 0;
        if (a->chunk > 0 && w->pos[t] > 0) w->first_key[t] = w->pos[t] / a->chunk * a->chunk;
        w->peak[t] = -INFINITY;
        w->denom[t] = 0.0f;
        for (int64_t c = 0; c < d / WIDTH; c++) w->acc[t][c] = splat(0.0f);
        int64_t src = b * a->q_stride_b + row * a->q_stride_p + (hkv * group + head) * a->q_stride_h;
        for (int64_t c = 0; c < d; c += WIDTH) {
            const int seen = w->pos[t] >= 0;
            store_floats(w->q[t] + c, seen ? load_lanes(a->q, src + c, a->io_bf16) * splat(a->scale) : splat(0.0f));
        }
        if (w->pos[t] < 0) continue;
        w->last = w->pos[t] > w->last ? w->pos[t] : w->last;
        w->begin = w->first_key[t] < w->begin ? w->first_key[t] : w->begin;
    }
}

/* Where 16 * SUBS tokens lie: offsets of their keys' first channel, and of their values, in the pages. */
struct block {
    int64_t key[SUBS], value[SUBS], number[SUBS]; /* number: of the scales */
    int subs;                                     /* sub-blocks with a token that some query sees */
    int tokens; /* of these, tokens up to the tile's last position: values after it are of the page's earlier owner */
};

INLINE struct block block_at(const struct paged_attention_args *a, int64_t b, int64_t hkv, int64_t at, int64_t last,
                             int64_t d) {
    const int64_t ps = a->page_size;
    struct block k;
    /* Keys past the tile's last position may lie in no page at all. */
    k.subs = last - at >= BLOCK - 16 ? SUBS : (int)((last - at) / 16 + 1);
    k.tokens = last - at + 1 < BLOCK ? (int)(last - at + 1) : BLOCK;
    for (int i = 0; i < SUBS; i++) { /* after the last, the first again: its scores are masked */
        int64_t token = at + 16 * (i < k.subs ? i : 0), page = a->page_table[b * a->table_stride + token / ps];
        int64_t head = (page * a->num_kv_heads + hkv) * d * ps;
        k.key[i] = head + token % ps;
        k.value[i] = head + token % ps * d;
        k.number[i] = (page * a->num_kv_heads + hkv) * ps + token % ps;
    }
    return k;
}

/* Start to load channels c and c + 1 of the next block's keys into L2. A block is loaded while the one before it is
 * multiplied, a few lines at a time: a core waits for few lines at once, and one that asks for more of them stands still.
 * Its sub-blocks are not neighbours in memory, so no stream of addresses foretells them. */
INLINE void fetch_keys(const struct paged_attention_args *a, const struct block *next, int64_t c, int kind) {
    const int64_t size = bytes_of_number(kind), row = a->page_size * size; /* bytes of one channel in a page */
    UNROLL for (int i = 0; i < SUBS; i++) {
        const char *key = (const char *)a->k_pages + next->key[i] * size + c * row;
        __builtin_prefetch(key, 0, 2);
        if (kind == PAGES_INT8 && c == 0) {
            __builtin_prefetch(a->k_scales + next->number[i], 0, 2);
            __builtin_prefetch(a->v_scales + next->number[i], 0, 2);
        }
        if (row > 32) __builtin_prefetch(key + row, 0, 2); /* else both channels are in one line */
    }
}

/* The same of the values of its token j. */
INLINE void fetch_value(const struct paged_attention_args *a, const struct block *next, int j, int64_t d, int kind) {
    const int64_t size = bytes_of_number(kind);
    const char *value = (const char *)a->v_pages + (next->value[j / 16] + j % 16 * d) * size;
    for (int64_t at = 0; at < d * size; at += 64) __builtin_prefetch(value + at, 0, 2);
}

/* Scores of the keys in `subs` sub-blocks from `from` on; `subs` is a compile-time constant, and each of few queries needs
 * several sums to hide the latency. */
INLINE void score_subs(const struct paged_attention_args *a, const struct tile *w, const struct block *k,
                       const struct block *next, floats s[MOST_TILE][SUBS * PIECES], int64_t d, int kind, int n,
                       int from, int subs) {
    const int64_t ps = a->page_size;
    const int vectors = subs * PIECES;
    floats r[TILE][SCORED * PIECES] = {0};
    for (int64_t two = 0; two < d; two += 2) {
        if (from == 0) fetch_keys(a, next, two, kind);
        UNROLL for (int64_t c = two; c < two + 2; c++) {
            floats x[SCORED * PIECES];
            UNROLL for (int i = 0; i < vectors; i++) x[i] =
                load_page(a->k_pages, k->key[from + i / PIECES] + c * ps + i % PIECES * WIDTH, kind);
            UNROLL for (int t = 0; t < n; t++) {
                const floats q = splat(w->q[t][c]);
                UNROLL for (int i = 0; i < vectors; i++) r[t][i] = fused(q, x[i], r[t][i]);
            }
        }
    }
    if (kind == PAGES_INT8) UNROLL for (int i = 0; i < vectors; i++) {
            const floats scale = load_floats(a->k_scales + k->number[from + i / PIECES] + i % PIECES * WIDTH);
            UNROLL for (int t = 0; t < n; t++) r[t][i] *= scale;
        }
    UNROLL for (int t = 0; t < n; t++) memcpy(s[t] + from * PIECES, r[t], (size_t)vectors * sizeof r[t][0]);
}

/* Products of `n` queries from `t` on with 16 tokens' keys, which begin with their values: `number` of the first token, and
 * `at` of its key. Each score is a sum of its own over the lanes. */
INLINE void score_tokens(const struct paged_attention_args *a, const struct tile *w, int64_t at, int64_t number,
                         floats s[MOST_TILE][SUBS * PIECES], int sub, int64_t d, int kind, int t, int n) {
    floats sums[TOGETHER][16][PIECES];
    for (int j = 0; j < 16; j += 2) {
        floats r[TOGETHER][2][PIECES] = {0};
        for (int64_t c = 0; c < d; c += 16) UNROLL for (int p = 0; p < PIECES; p++) {
                floats x[2];
                UNROLL for (int i = 0; i < 2; i++) x[i] = load_page(a->v_pages, at + (j + i) * d + c + p * WIDTH, kind);
                UNROLL for (int e = 0; e < n; e++) {
                    const floats q = load_floats(w->q[t + e] + c + p * WIDTH);
                    UNROLL for (int i = 0; i < 2; i++) r[e][i][p] = fused(q, x[i], r[e][i][p]);
                }
            }
        UNROLL for (int e = 0; e < n; e++) memcpy(sums[e][j], r[e], sizeof r[e]);
    }
    for (int e = 0; e < n; e++) {
        floats *y = s[t + e] + sub * PIECES;
        sum_of_each((const floats(*)[PIECES])sums[e], y);
        if (kind == PAGES_INT8)
            UNROLL for (int p = 0; p < PIECES; p++) y[p] *= load_floats(a->v_scales + number + p * WIDTH);
    }
}

/* Start to load 16 tokens of the next block into L2. */
INLINE void fetch_tokens(const struct paged_attention_args *a, const struct block *next, int sub, int64_t d, int kind) {
    const int64_t size = bytes_of_number(kind);
    const char *at = (const char *)a->v_pages + next->value[sub] * size;
    for (int64_t i = 0; i < 16 * d * size; i += 64) __builtin_prefetch(at + i, 0, 2);
}

INLINE void score_joined(const struct paged_attention_args *a, const struct tile *w, const struct block *k,
                         const struct block *next, floats s[MOST_TILE][SUBS * PIECES], int64_t d, int kind, int n) {
    for (int i = 0; i < k->subs; i++) {
        fetch_tokens(a, next, i, d, kind);
        UNROLL for (int t = 0; t < n; t += TOGETHER)
            score_tokens(a, w, k->value[i], k->number[i], s, i, d, kind, t, n - t < TOGETHER ? n - t : TOGETHER);
    }
}

/* Scores of the block's keys into s, of `subs` sub-blocks at least. */
INLINE void score(const struct paged_attention_args *a, const struct tile *w, const struct block *k,
                  const struct block *next, floats s[MOST_TILE][SUBS * PIECES], int64_t d, int kind, int n) {
#if SCORED == SUBS
    if (k->subs <= 2)
        score_subs(a, w, k, next, s, d, kind, n, 0, 2);
    else
        score_subs(a, w, k, next, s, d, kind, n, 0, SUBS);
#else
    for (int i = 0; i < k->subs; i++) score_subs(a, w, k, next, s, d, kind, n, i, SCORED);
#endif
}

/* Write query t's weights of the block's first sub-blocks into p, zero where the key is masked, and rescale its sums to the
 * new peak. */
INLINE void weigh(const struct paged_attention_args *a, struct tile *w, int t, int64_t at, int subs, const floats *s,
                  float *p, int64_t d) {
    const int whole = at + BLOCK - 1 <= w->pos[t] && at >= w->first_key[t]; /* no key is masked */
    floats m[PIECES], total[PIECES] = {0};
    UNROLL for (int e = 0; e < PIECES; e++) m[e] = splat(-INFINITY);
    for (int i = 0; i < subs; i++) UNROLL for (int e = 0; e < PIECES; e++) {
            floats x = s[i * PIECES + e];
            if (a->softcap > 0.0f) x = splat(a->softcap) * tanh_floats(x / splat(a->softcap));
            if (!whole) {
                const int32s token = (int32s)lanes_of(e) + (int32_t)(at + 16 * i);
                x = select_floats((token <= w->pos[t]) & (token >= w->first_key[t]), x, splat(-INFINITY));
            }
            store_floats(p + 16 * i + e * WIDTH, x);
            m[e] = larger(m[e], x);
        }
    float peak = max16(m);
    if (peak > w->peak[t]) {
        const floats shrink = w->peak[t] == -INFINITY ? splat(0.0f) : exp_floats(splat(w->peak[t] - peak));
        w->denom[t] *= shrink[0];
        for (int64_t c = 0; c < d / WIDTH; c++) w->acc[t][c] *= shrink;
        w->peak[t] = peak;
    }
    const floats base = splat(w->peak[t] == -INFINITY ? 0.0f : w->peak[t]);
    for (int i = 0; i < subs; i++) UNROLL for (int e = 0; e < PIECES; e++) {
            float *to = p + 16 * i + e * WIDTH;
            const floats x = exp_floats(load_floats(to) - base);
            total[e] += x;
            store_floats(to, x);
        }
    w->denom[t] += sum16(total);
}

/* The weights by the values' scales; after the tile's last position they are not read. */
INLINE void scale_weights(const struct paged_attention_args *a, const struct block *k, float p[MOST_TILE][BLOCK],
                          int n) {
    for (int i = 0; i < k->subs * PIECES; i++) {
        const floats scale = load_floats(a->v_scales + k->number[i / PIECES] + i % PIECES * WIDTH);
        for (int t = 0; t < n; t++) store_floats(p[t] + WIDTH * i, load_floats(p[t] + WIDTH * i) * scale);
    }
}

/* acc += p . v for `n` queries from `t` on, 16 * wide channels from 16 * c on: the sums stay in registers. `next`: null where
 * the scores have fetched the values. */
INLINE void gather_part(const struct paged_attention_args *a, struct tile *w, const struct block *k,
                        const struct block *next, float p[MOST_TILE][BLOCK], int64_t d, int kind, int t, int n,
                        int64_t c, int wide) {
    const int64_t from = c * PIECES;
    const int vectors = wide * PIECES;
    floats x[TILE][GATHERED * PIECES];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int e = 0; e < vectors; e++) x[i][e] = w->acc[t + i][from + e];
    for (int j = 0; j < k->tokens; j++) {
        const int64_t at = k->value[j / 16] + j % 16 * d + c * 16;
        floats v[GATHERED * PIECES];
        if (next && t == 0 && c == 0) fetch_value(a, next, j, d, kind);
        UNROLL for (int e = 0; e < vectors; e++) v[e] = load_page(a->v_pages, at + e * WIDTH, kind);
        UNROLL for (int i = 0; i < n; i++) {
            const floats q = splat(p[t + i][j]);
            UNROLL for (int e = 0; e < vectors; e++) x[i][e] = fused(q, v[e], x[i][e]);
        }
    }
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int e = 0; e < vectors; e++) w->acc[t + i][from + e] = x[i][e];
}

INLINE void gather(const struct paged_attention_args *a, struct tile *w, const struct block *k,
                   const struct block *next, float p[MOST_TILE][BLOCK], int64_t d, int64_t values, int kind, int n,
                   int together) {
    UNROLL for (int t = 0; t < n; t += together) {
        const int some = n - t < together ? n - t : together;
        int64_t c = 0;
        for (; c + GATHERED <= values / 16; c += GATHERED) gather_part(a, w, k, next, p, d, kind, t, some, c, GATHERED);
        for (; GATHERED > 1 && c < values / 16; c++) gather_part(a, w, k, next, p, d, kind, t, some, c, 1);
    }
}

/* What the weighted sum of query t is multiplied by: a sink takes its part of the weights. */
INLINE float share(const struct paged_attention_args *a, const struct tile *w, int t, int64_t head) {
    if (!(w->denom[t] > 0.0f)) return 0.0f;
    if (!a->sinks) return 1.0f / w->denom[t];
    const float sink = a->sinks[head], peak = sink > w->peak[t] ? sink : w->peak[t];
    const float kept = exp_floats(splat(w->peak[t] - peak))[0], taken = exp_floats(splat(sink - peak))[0];
    return kept / fused1(w->denom[t], kept, taken);
}

/* n queries of one (sequence, KV head): query number i is (p, g) = (i / group, i % group). `values`: channels of a value.
 * `joined`: it is the first part of its key. `then`: a block that is likely to be read afterwards; null: none is known. */
INLINE void attend_tile(const struct paged_attention_args *a, int64_t b, int64_t hkv, int64_t first, int64_t d,
                        int64_t values, int joined, int kind, int n, const struct block *then) {
    const int64_t group = a->num_heads / a->num_kv_heads;
    struct tile w __attribute__((aligned(64)));
    float p[MOST_TILE][BLOCK] __attribute__((aligned(64)));
    struct block now, next;
    open_tile(a, &w, b, hkv, first, d, n);
    int64_t at = w.last < 0 ? 0 : w.begin / BLOCK * BLOCK;
    if (w.last >= 0) now = block_at(a, b, hkv, at, w.last, d);
    for (; at <= w.last; at += BLOCK, now = next) {
        floats s[MOST_TILE][SUBS * PIECES];
        if (at + BLOCK <= w.last)
            next = block_at(a, b, hkv, at + BLOCK, w.last, d);
        else
            next = then ? *then : now;
        if (joined)
            score_joined(a, &w, &now, &next, s, d, kind, n);
        else
            score(a, &w, &now, &next, s, d, kind, n);
        for (int t = 0; t < n; t++) weigh(a, &w, t, at, now.subs, s[t], p[t], values);
        if (kind == PAGES_INT8) scale_weights(a, &now, p, n);
        gather(a, &w, &now, joined ? 0 : &next, p, d, values, kind, n, joined ? 4 : TILE);
    }
    for (int64_t t = 0, row = first / group, head = first % group; t < n && row < a->num_queries;
         t++, head + 1 < group ? head++ : (row++, head = 0)) {
        int64_t dst = ((b * a->num_queries + row) * a->num_heads + hkv * group + head) * values;
        float inverse = share(a, &w, (int)t, hkv * group + head);
        for (int64_t c = 0; c < values; c += WIDTH)
            store_lanes(a->out, dst + c, w.acc[t][c / WIDTH] * splat(inverse), a->io_bf16);
    }
}

/* A decode step of one row has as many queries as a group has heads: three are usual. */
#define ATTEND(d, kind)                                                                                                \
    do {                                                                                                               \
        if (left > 3)                                                                                                  \
            attend_tile(a, b, hkv, first, d, d, 0, kind, 6, then);                                                     \
        else                                                                                                           \
            attend_tile(a, b, hkv, first, d, d, 0, kind, 3, then);                                                     \
    } while (0)

static void attend(const struct paged_attention_args *a, int64_t b, int64_t hkv, int64_t first,
                   const struct block *then) {
    int64_t d = a->head_dim, left = (int64_t)a->num_queries * (a->num_heads / a->num_kv_heads) - first;
    if (a->kind == PAGES_BF16) {
        if (d == 64)
            ATTEND(64, PAGES_BF16);
        else if (d == 128)
            ATTEND(128, PAGES_BF16);
        else
            ATTEND(d, PAGES_BF16);
    } else if (a->kind == PAGES_INT8) {
        if (d == 64)
            ATTEND(64, PAGES_INT8);
        else if (d == 128)
            ATTEND(128, PAGES_INT8);
        else
            ATTEND(d, PAGES_INT8);
    } else {
        if (d == 64)
            ATTEND(64, PAGES_FP32);
        else
            ATTEND(d, PAGES_FP32);
    }
}

/* As many queries as `tile` says of keys that begin with their values. */
static void attend_joined(const struct paged_attention_args *a, int64_t b, int64_t hkv, int64_t first, int64_t tile) {
    const int64_t d = a->head_dim, values = a->values;
#define ATTEND_JOINED(d, values, kind)                                                                                 \
    do {                                                                                                               \
        if (tile == MOST_TILE)                                                                                         \
            attend_tile(a, b, hkv, first, d, values, 1, kind, MOST_TILE, 0);                                           \
        else                                                                                                           \
            attend_tile(a, b, hkv, first, d, values, 1, kind, LEAST_JOINED, 0);                                        \
    } while (0)
    if (a->kind == PAGES_BF16 && d == 576 && values == 512)
        ATTEND_JOINED(576, 512, PAGES_BF16); /* of DeepSeek, and of most other families */
    else if (a->kind == PAGES_BF16)
        ATTEND_JOINED(d, values, PAGES_BF16);
    else if (a->kind == PAGES_INT8)
        ATTEND_JOINED(d, values, PAGES_INT8);
    else
        ATTEND_JOINED(d, values, PAGES_FP32);
#undef ATTEND_JOINED
}

extern int omp_get_max_threads(void);

/* Queries of a tile, of so many, where keys begin with their values: a tile reads each key once for all of its queries, and
 * smaller ones give every thread some. */
static int64_t joined_tile(int64_t queries) {
    return queries / MOST_TILE >= omp_get_max_threads() ? MOST_TILE : LEAST_JOINED;
}

void VARIANT(lockstep_paged_attention)(const struct paged_attention_args *a) {
    int64_t rows = (int64_t)a->num_batch * a->num_queries, tile = a->values ? joined_tile(rows * a->num_heads) : TILE;
    int64_t group = a->num_heads / a->num_kv_heads;
    int64_t tiles = (a->num_queries * group + tile - 1) / tile;
    int64_t tasks = (int64_t)a->num_batch * a->num_kv_heads * tiles;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < (a->k ? rows : 0); r++) {
            store_row(a, r / a->num_queries, r % a->num_queries, a->kind);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t b = task / (a->num_kv_heads * tiles), head = task / tiles % a->num_kv_heads;
            if (a->values)
                attend_joined(a, b, head, task % tiles * tile, tile);
            else
                attend(a, b, head, task % tiles * TILE, 0);
        }
    }
}
