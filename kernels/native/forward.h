/* A decoder's whole forward over block-quantised weights, for CPUs: one call, one team of threads, no Python in between.
 *
 * A layer is x += scale * post(attention(pre(x))), then the same with a gated block or a mixture of experts; a block next
 * to the attention gets the attention's input. Instead of attention, or next to it, a layer may have a recurrence
 * (recurrent_layer.h); it may also have only these, or only a block. A layer may have an input of its own after that (see
 * layer_inputs.h), and may read the keys and values of an earlier one. Its attention may be latent (latent_layer.h). Each
 * function below has loops that the team shares, in their order; with many rows and no experts they are over a chunk of rows
 * that one member has. Between products everything is fp32; keys and values are rounded to the pages' dtype. Padding
 * is dropped in front: only rows with a position are computed. Invariant: a row depends only on its own sequence, bit for
 * bit, whatever else is in the call. Not responsible for: the ownership of pages and weights.
 */
#ifndef LOCKSTEP_FORWARD_H
#define LOCKSTEP_FORWARD_H

#include "blocks.h"
#include "latent_layer.h"
#include "layer_inputs.h"
#include "low_rank.h"
#include "mixture.h"
#include "paged_attention.h"
#include "recurrent_layer.h"
#include "team.h"

enum { OWN_VALUES, VALUES_FROM_KEYS, SHARED_VALUES }; /* see KeyValues in fused_arguments.py */

struct forward_layer {
    struct block_weights qkv, output;   /* of attention; null: there is none */
    struct block_weights gate_up, down; /* gate_up: the gate's outputs, then those of up. Null: there is no block */
    struct mixture mixture; /* a null router: there is none. Else gate_up and down are its shared expert, or null */
    struct layer_input input;
    /* fp32 [hidden]; null: no such norm */
    const float *pre_attention, *post_attention, *pre_block, *post_block;
    /* fp32 [hidden]: of the mixture's input, of what its experts give, and of what the shared expert gives, whose input is
     * the block's. Null: the mixture and its shared expert have the block's input, and no norms after them. */
    const float *pre_mixture, *post_mixture, *post_shared;
    /* fp32 [head_dim], or of all query heads and of all key heads with `whole_norms`; null: none */
    const float *q_norm, *k_norm;
    const float *v_norm;     /* fp32 [head_dim], of each value head; null: none */
    const float *cos, *sin;  /* fp32 [positions][rotated]; halves, whatever channels are pairs */
    const float *factors;    /* fp32 [positions], of the queries after the rotation; null: none */
    const float *sinks;      /* see paged_attention.h */
    void *k_pages, *v_pages; /* see paged_attention.h */
    float *k_scales, *v_scales;
    void *tap;       /* [num_rows][hidden] in the embedding's dtype: gets the layer's input; null: not wanted */
    int64_t rotated; /* the first channels of a head, which are rotated */
    int64_t head_dim, num_kv_heads;
    float pre_attention_eps, post_attention_eps, pre_block_eps, post_block_eps;
    float pre_mixture_eps, post_mixture_eps, post_shared_eps, q_eps, k_eps, v_eps;
    float scale, softcap; /* of attention */
    float stream_scale;   /* of the residual stream after the layer */
    int32_t window, act;
    int32_t neighbours;  /* channels 2 i and 2 i + 1 are rotated together; 0: i and i + rotated / 2 */
    int32_t whole_norms; /* q_norm is one norm of all query heads together, k_norm one of all keys */
    int32_t norms_last;  /* q_norm and k_norm come after the rotation */
    /* The block is next to the attention, and has its input; pre_block and post_attention are null. */
    int32_t is_parallel;
    int32_t key_values;
    int32_t tiles;                           /* which of the forward's `kv_heads` is num_kv_heads */
    const struct recurrent_layer *recurrent; /* next to attention, with the same input; null: there is none */
    const struct latent_layer *latent;       /* of latent attention, whose `qkv` gives queries, latent and shared key */
};

enum { OF_QKV, OF_OUTPUT, OF_GATE_UP, OF_DOWN, PRODUCTS }; /* the products of a layer, as adapters number them */

#define TILE_LISTS 2 /* different numbers of KV heads that layers may have */

struct forward_args {
    const struct forward_layer *layers;
    struct block_weights head;
    const float *norm;        /* fp32 [hidden], before the head */
    const void *embedding;    /* [vocabulary][hidden], bfloat16 or fp32 */
    const int64_t *ids;       /* [num_rows] */
    const int32_t *positions; /* [num_rows]; negative is padding, after the other rows of its sequence */
    const int32_t
        *row_starts; /* [num_sequences + 1], ascending: sequence b has rows [row_starts[b], row_starts[b + 1]) */
    const int32_t *page_table; /* [num_sequences][table_stride] */
    float *logits;             /* [num_logits][logits_stride]: rows of padding are not written */
    void *tap;                 /* [num_rows][hidden]: gets the input of the head; null: not wanted */
    uint8_t *scratch;          /* lockstep_forward_scratch bytes, on a 64-byte boundary */
    int64_t table_stride, logits_stride;
    int64_t num_rows, num_sequences, num_layers;
    int64_t num_logits; /* the first rows, whose logits are wanted. Without a tap others fill pages and states */
    int64_t hidden, inner, num_heads, page_size;     /* inner: the most of any layer */
    int64_t channels, attended;                      /* the most of any layer: of q, k and v together, and of q */
    int64_t kv_heads[TILE_LISTS];                    /* 0: unused */
    float embedding_scale, norm_eps, logits_softcap; /* softcap 0: none */
    float virtual_scale;                             /* of `virtual_embedding` */
    float residual_scale;                            /* of what is added to the residual stream */
    float logits_scale;
    int32_t centred;                        /* every norm of the residual stream takes the mean off first */
    int32_t bf16;                           /* embedding and taps */
    int32_t pages;                          /* their kind, of paged_attention.h */
    int32_t defers_head;                    /* the logits are left to lockstep_forward_head (masked_head.h) */
    const struct low_rank *const *adapters; /* by number: PRODUCTS entries a layer; null: no row has one. [0] is null */
    const int32_t *sequence_adapters;       /* [num_sequences]: their numbers; 0: none */
    const float *virtual_embedding;         /* [][hidden]: of the ids from `vocabulary` on; null: there are none */
    int64_t adapter_rank;                   /* of a product, its parts together: the most of any adapter */
    int64_t vocabulary;                     /* rows of the embedding */
    struct mixture_sizes mixtures;
    struct layer_inputs inputs;
    struct recurrent_sizes recurrents;
    struct recurrent_rows lanes; /* of the recurrent layers: their rows are the caller's, padding included */
    struct latent_sizes latents; /* of every attention, or of none */
    int64_t query_gates;         /* after the channels of a query head come as many of its gate; 0: queries have none */
};

enum { EVERY_GROUP = -1, NO_GROUP = -2 };

/* A row of the logits, and the groups of the head's outputs that are wanted of it. */
struct head_row {
    const uint32_t *mask; /* a word for each group; null: see `only` */
    int32_t only;         /* the one wanted group, EVERY_GROUP, or NO_GROUP */
    int32_t place;        /* its number among the caller's rows */
};

/* The tiles of attention: sequence, KV head, first query. */
struct tiles {
    int32_t (*tasks)[3];
    int64_t count;
};

/* Memory of one call, cut from the scratch. R rows that are no padding. */
struct forward_work {
    float *x, *delta, *qkv, *attended; /* [R][hidden], [R][hidden], [R][channels], and of every row [][Hq D] */
    float *inputs;                     /* [R][layers * width], see layer_inputs.h */
    struct block_rows normed;          /* the input of a product of hidden channels */
    /* The same of every row and of Hq D, of inner and of a layer's input's channels: `inputs_at` lays them out by layer.
     * Each has one layout in a loop, where members are at different products. */
    uint8_t *heads, *gated, *gated_input;
    int32_t *place, *position, *sequence; /* [R]: number among the caller's rows, position, and whose row it is */
    int32_t *first;                       /* [num_sequences + 1]: sequence b has rows [first[b], first[b + 1]) of R */
    struct tiles tiles[TILE_LISTS];
    struct head_row *head_rows; /* [num_logits], only with `defers_head`, as are their inputs */
    struct block_rows head_inputs;
    float *low, *active; /* only with adapters: [R][adapter_rank] and, as fp32, the input of `down`, [R][inner] */
    struct mixture_work mixed;
    struct recurrent_work recurrent;
    struct latent_work latent;
    int64_t tile;                    /* queries of a tile of attention */
    int64_t begin, rows, num_logits; /* begin: the number of the first row among all */
};

INLINE int has_attention(const struct forward_layer *l) { return l->qkv.quants != 0; }

INLINE int has_block(const struct forward_layer *l) { return l->gate_up.quants || l->mixture.router; }

/* From a query head to the next, in a row of queries, keys and values. */
INLINE int64_t query_step(const struct forward_args *a, const struct forward_layer *l) {
    return l->head_dim * (a->query_gates ? 2 : 1);
}

/* Lay the work out from `memory` on for so many rows; return the end. With a null `work` it only counts. */
static uint8_t *lay_out(const struct forward_args *a, uint8_t *memory, int64_t rows, struct forward_work *work) {
    struct forward_work w;
    w.x = (float *)carve(&memory, rows * a->hidden * 4);
    w.delta = (float *)carve(&memory, rows * a->hidden * 4);
    w.qkv = (float *)carve(&memory, rows * a->channels * 4);
    w.attended = (float *)carve(&memory, rows * a->attended * 4);
    w.inputs = (float *)carve(&memory, a->inputs.width ? rows * a->inputs.projection.outputs * 4 : 0);
    w.normed = block_rows_at(carve(&memory, block_rows_bytes(rows, a->hidden)), rows, a->hidden);
    w.heads = carve(&memory, block_rows_bytes(rows, a->attended));
    w.gated = carve(&memory, block_rows_bytes(rows, a->inner));
    w.gated_input = carve(&memory, block_rows_bytes(rows, a->inputs.width));
    w.place = (int32_t *)carve(&memory, rows * 4);
    w.position = (int32_t *)carve(&memory, rows * 4);
    w.sequence = (int32_t *)carve(&memory, rows * 4);
    w.first = (int32_t *)carve(&memory, (a->num_sequences + 1) * 4);
    const int64_t tile = a->latents.latent ? LEAST_JOINED : TILE;
    for (int i = 0; i < TILE_LISTS; i++) {
        const int64_t heads = a->kv_heads[i], group = heads ? a->num_heads / heads : 0;
        const int64_t tiles = (rows * group + tile - 1) / tile + a->num_sequences;
        w.tiles[i].tasks = (int32_t (*)[3])carve(&memory, tiles * heads * 12);
    }
    const int64_t deferred = a->defers_head ? a->num_logits : 0;
    w.head_rows = (struct head_row *)carve(&memory, deferred * (int64_t)sizeof *w.head_rows);
    w.head_inputs = block_rows_at(carve(&memory, block_rows_bytes(deferred, a->hidden)), deferred, a->hidden);
    w.low = (float *)carve(&memory, a->adapters ? rows * a->adapter_rank * 4 : 0);
    w.active = (float *)carve(&memory, a->adapters ? rows * a->inner * 4 : 0);
    memory = lay_out_mixture(&a->mixtures, a->hidden, memory, rows, &w.mixed);
    memory = lay_out_recurrent(&a->recurrents, &a->lanes, memory, rows, &w.recurrent);
    memory = lay_out_latent(&a->latents, a->num_heads, memory, rows, &w.latent);
    if (work) *work = w;
    return memory;
}

/* List the tiles of attention over some number of KV heads. */
static void list_tiles(const struct forward_args *a, const struct forward_work *w, int64_t heads, struct tiles *to) {
    const int64_t group = a->num_heads / heads;
    for (int64_t b = 0; b < a->num_sequences; b++)
        for (int64_t q = 0; q < (w->first[b + 1] - w->first[b]) * group; q += w->tile)
            for (int64_t h = 0; h < heads; h++) {
                int32_t *task = to->tasks[to->count++];
                task[0] = (int32_t)b;
                task[1] = (int32_t)h;
                task[2] = (int32_t)q;
            }
}

/* Drop padding, and list the tiles of attention. */
static void open_work(const struct forward_args *a, struct forward_work *w) {
    w->begin = w->rows = w->num_logits = 0;
    for (int64_t b = 0; b < a->num_sequences; b++) {
        w->first[b] = (int32_t)w->rows;
        for (int32_t r = a->row_starts[b]; r < a->row_starts[b + 1] && a->positions[r] >= 0; r++) {
            w->place[w->rows] = r;
            w->sequence[w->rows] = (int32_t)b;
            w->position[w->rows++] = a->positions[r];
            w->num_logits += r < a->num_logits;
        }
    }
    w->first[a->num_sequences] = (int32_t)w->rows;
    w->tile = a->latents.latent ? joined_tile(w->rows * a->num_heads) : TILE;
    for (int i = 0; i < TILE_LISTS; i++) {
        w->tiles[i].count = 0;
        if (a->kv_heads[i]) list_tiles(a, w, a->kv_heads[i], w->tiles + i);
    }
}

/* x * weight / rms(x), n a multiple of 16; `out` may be `x`. `centred`: of x minus its mean. */
INLINE void norm32(const float *x, const float *weight, float eps, int32_t centred, float *out, int64_t n) {
    if (centred) {
        floats sum[PIECES] = {0};
        FOR_LANES(i, p, n) sum[p] += load_floats(x + i);
        const floats mean = splat(sum16(sum) / (float)n);
        for (int64_t i = 0; i < n; i += WIDTH) store_floats(out + i, load_floats(x + i) - mean);
        x = out;
    }
    floats squares[PIECES] = {0};
    FOR_LANES(i, p, n) {
        const floats y = load_floats(x + i);
        squares[p] = fused(y, y, squares[p]);
    }
    const floats inverse = splat(1.0f / sqrtf(sum16(squares) / (float)n + eps));
    for (int64_t i = 0; i < n; i += WIDTH)
        store_floats(out + i, load_floats(x + i) * inverse * load_floats(weight + i));
}

static void tap_row(const struct forward_args *a, const struct forward_work *w, void *tap, int64_t r, const float *x) {
    for (int64_t i = 0; i < a->hidden; i++) store1(tap, w->place[r] * a->hidden + i, x[i], a->bf16);
}

/* What becomes of a product's output: x = scale * (x + residual_scale * norm(output)). */
struct pending {
    const float *norm; /* null: none */
    float eps, scale;
};

INLINE struct pending pending_attention(const struct forward_layer *l) {
    return (struct pending){l->post_attention, l->post_attention_eps, 1.0f};
}

INLINE struct pending pending_block(const struct forward_layer *l) {
    return (struct pending){l->post_block, l->post_block_eps, l->input.gate.quants ? 1.0f : l->stream_scale};
}

/* Of a layer's last product; `l` is null before the first layer. */
INLINE struct pending pending_layer(const struct forward_layer *l) {
    if (!l) return (struct pending){0, 0.0f, 1.0f};
    if (!l->input.gate.quants) return pending_block(l);
    return (struct pending){l->input.norm, l->input.eps, l->stream_scale};
}

/* Add the pending output to x, then delta = pre(x): the input of the next product. `pre` may be null. */
INLINE void add_and_norm(const struct forward_args *a, const struct forward_work *w, int64_t r, struct pending last,
                         const float *pre, float pre_eps, void *tap) {
    const int64_t n = a->hidden;
    float *x = w->x + r * n, *delta = w->delta + r * n;
    if (last.norm) norm32(delta, last.norm, last.eps, a->centred, delta, n);
    const floats grown = splat(a->residual_scale), scale = splat(last.scale);
    for (int64_t i = 0; i < n; i += WIDTH)
        store_floats(x + i, fused(load_floats(delta + i), grown, load_floats(x + i)) * scale);
    if (tap) tap_row(a, w, tap, r, x);
    if (pre)
        norm32(x, pre, pre_eps, a->centred, delta, n);
    else
        memcpy(delta, x, (size_t)n * 4);
}

/* Rows of the embedding; the pending output is zero. */
static void embed(struct member *m, const struct forward_args *a, const struct forward_work *w) {
    const int64_t n = a->hidden;
    TEAM_FOR(m, r, w->rows) {
        const int64_t id = a->ids[w->place[r]];
        memset(w->delta + r * n, 0, (size_t)n * 4);
        if (a->virtual_embedding && id >= a->vocabulary) {
            const float *row = a->virtual_embedding + (id - a->vocabulary) * n;
            for (int64_t i = 0; i < n; i += WIDTH)
                store_floats(w->x + r * n + i, load_floats(row + i) * splat(a->virtual_scale));
            continue;
        }
        for (int64_t i = 0; i < n; i += WIDTH)
            store_floats(w->x + r * n + i, load_lanes(a->embedding, id * n + i, a->bf16) * splat(a->embedding_scale));
    }
}

/* The matrices that row r's adapter has for a product of the layer; null: none. */
INLINE const struct low_rank *low_rank_of(const struct forward_args *a, const struct forward_layer *l,
                                          const struct forward_work *w, int64_t r, int product) {
    const struct low_rank *adapter = a->adapters[a->sequence_adapters[w->sequence[r]]];
    if (!adapter) return 0;
    adapter += (l - a->layers) * PRODUCTS + product;
    return adapter->num_parts ? adapter : 0;
}

/* The first half of a row's low-rank product; the row's thread has just made its input `x`. */
static void shrink(const struct forward_args *a, const struct forward_layer *l, const struct forward_work *w, int64_t r,
                   int product, const float *x) {
    const struct low_rank *low = low_rank_of(a, l, w, r, product);
    if (low) shrink_row(low, x, 0, 0, w->low + r * a->adapter_rank);
}

/* The second half, for `count` outputs of `rows` rows from `first` on. */
static void expand(const struct forward_args *a, const struct forward_layer *l, const struct forward_work *w,
                   int64_t first, int64_t rows, int product, int64_t from, int64_t count, float *y, int64_t stride) {
    for (int64_t r = first; r < first + rows; r++) {
        const struct low_rank *low = low_rank_of(a, l, w, r, product);
        if (low) expand_row(low, w->low + r * a->adapter_rank, from, count, y + (r - first) * stride, 0, 0);
    }
}

/* `l` and `product` are of the product after it; a null `l`: the head, which no adapter changes. */
static void before_product(struct member *m, const struct forward_args *a, const struct forward_work *w,
                           struct pending last, const float *pre, float pre_eps, void *tap,
                           const struct forward_layer *l, int product) {
    TEAM_FOR(m, r, w->rows) {
        add_and_norm(a, w, r, last, pre, pre_eps, tap);
        if (a->adapters && l) shrink(a, l, w, r, product, w->delta + r * a->hidden);
        if (l && product == OF_GATE_UP && l->mixture.router && !l->pre_mixture)
            route_row(&l->mixture, &a->mixtures, w->delta + r * a->hidden, a->hidden, &w->mixed.routes, r);
        quantise_row(w->delta + r * a->hidden, &w->normed, r);
    }
}

static void product(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                    const struct forward_work *w, const struct block_weights *weights, int number,
                    const struct block_rows *x, float *out, int64_t stride) {
    const struct block_rows ready = ready_rows(m, weights, x, w->rows, w->rows);
    TEAM_FOR_RANGES(m, part, groups_of(weights)) {
        groups_into(weights, &part, &ready, w->rows, out, stride, 0);
        for (int64_t g = part.begin; a->adapters && g < part.end; g++) {
            const int64_t left = weights->outputs - g * GROUP;
            expand(a, l, w, 0, w->rows, number, g * GROUP, left < GROUP ? left : GROUP, out + g * GROUP, stride);
        }
    }
}

/* The channels of pair i are `first` * i and `second` further. */
INLINE void rotate_pairs(float *head, const float *cos, const float *sin, int64_t half, int64_t first, int64_t second) {
    for (int64_t i = 0; i < half; i++) {
        float x = head[first * i], y = head[first * i + second];
        head[first * i] = fused1(x, cos[i], -y * sin[i]);
        head[first * i + second] = fused1(y, cos[half + i], x * sin[half + i]);
    }
}

INLINE void rotate32(float *head, const float *cos, const float *sin, int64_t rotated, int32_t neighbours) {
    if (neighbours)
        rotate_pairs(head, cos, sin, rotated / 2, 2, 1);
    else
        rotate_pairs(head, cos, sin, rotated / 2, 1, rotated / 2);
}

/* Memory of every row as the inputs of a product, from the work's first row on. */
INLINE struct block_rows inputs_at(const struct forward_args *a, const struct forward_work *w, uint8_t *memory,
                                   int64_t inputs) {
    const struct block_rows all = block_rows_at(memory, a->num_rows, inputs);
    return block_rows_from(&all, w->begin);
}

/* The norms of a row's queries and keys. */
static void norm_heads(const struct forward_args *a, const struct forward_layer *l, float *qkv) {
    const int64_t d = l->head_dim, queries = a->num_heads * d, keys = l->num_kv_heads * d;
    const int64_t q_width = l->whole_norms ? queries : d, k_width = l->whole_norms ? keys : d;
    const int64_t step = query_step(a, l), begin = a->num_heads * step;
    for (int64_t c = 0; l->q_norm && c < begin; c += l->whole_norms ? queries : step)
        norm32(qkv + c, l->q_norm, l->q_eps, 0, qkv + c, q_width);
    for (int64_t c = begin; l->k_norm && c < begin + keys; c += k_width)
        norm32(qkv + c, l->k_norm, l->k_eps, 0, qkv + c, k_width);
}

/* A row's queries times a factor. */
static void grow_queries(const struct forward_args *a, const struct forward_layer *l, float *q, float factor) {
    for (int64_t h = 0; h < a->num_heads; h++)
        for (int64_t i = 0; i < l->head_dim; i++) q[h * query_step(a, l) + i] *= factor;
}

/* Head norms and rotary, then keys and values into the pages, where the layer has some. */
static void rotate_and_store(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                             const struct forward_work *w, const struct paged_attention_args *attention) {
    const int64_t d = l->head_dim, step = query_step(a, l);
    const int64_t keys = l->key_values == SHARED_VALUES ? 0 : l->num_kv_heads * d;
    TEAM_FOR(m, r, w->rows) {
        float *q = w->qkv + r * a->channels, *k = q + a->num_heads * step, *v = k + keys;
        const int64_t angle = w->position[r] * l->rotated;
        if (l->key_values == VALUES_FROM_KEYS) memcpy(v, k, (size_t)keys * sizeof *v);
        if (!l->norms_last) norm_heads(a, l, q);
        for (float *head = q; head < v; head += head < k ? step : d)
            rotate32(head, l->cos + angle, l->sin + angle, l->rotated, l->neighbours);
        if (l->norms_last) norm_heads(a, l, q);
        if (l->factors) grow_queries(a, l, q, l->factors[w->position[r]]);
        for (int64_t c = 0; l->v_norm && c < keys; c += d) norm32(v + c, l->v_norm, l->v_eps, 0, v + c, d);
        if (l->key_values == SHARED_VALUES) continue;
        struct paged_attention_args row = *attention;
        row.k = k;
        row.v = v;
        row.positions = w->position + r;
        row.page_table += w->sequence[r] * a->table_stride;
        store_row(&row, 0, 0, a->pages);
    }
}

/* Attention as one sequence's queries see it. */
INLINE struct paged_attention_args attention_of_sequence(const struct forward_args *a, const struct forward_work *w,
                                                         const struct paged_attention_args *attention, int64_t b) {
    const int64_t r = w->first[b];
    struct paged_attention_args part = *attention;
    part.q = (const float *)part.q + r * part.q_stride_p;
    part.out = (float *)part.out + r * a->num_heads * (part.values ? part.values : part.head_dim);
    part.positions = w->position + r;
    part.page_table += b * a->table_stride;
    part.num_queries = w->first[b + 1] - (int32_t)r;
    return part;
}

/* The first block that the tile of this query reads. */
static struct block first_block(const struct paged_attention_args *a, int64_t b, int64_t hkv, int64_t first) {
    const int64_t row = first / (a->num_heads / a->num_kv_heads);
    const int32_t last = a->positions[b * a->num_queries + row];
    const int64_t from = a->window > 0 && last >= a->window ? (last - a->window + 1) / BLOCK * BLOCK : 0;
    return block_at(a, b, hkv, from, last, a->head_dim);
}

static void attend_tiles(struct member *m, const struct forward_args *a, const struct forward_work *w,
                         const struct paged_attention_args *attention, const struct tiles *tiles) {
    TEAM_FOR_CHUNKS(m, tile, tiles->count, 1) {
        const int32_t *task = tiles->tasks[tile];
        const struct paged_attention_args part = attention_of_sequence(a, w, attention, task[0]);
        if (part.values) {
            attend_joined(&part, 0, task[1], task[2], w->tile);
            continue;
        }
        struct block then, *known = 0;
        /* Neighbours cost about the same, so the members take them in turn: what this one probably takes next. */
        if (tile + m->threads < tiles->count) {
            const int32_t *other = tiles->tasks[tile + m->threads];
            const struct paged_attention_args next = attention_of_sequence(a, w, attention, other[0]);
            then = first_block(&next, 0, other[1], other[2]);
            known = &then;
        }
        attend(&part, 0, task[1], task[2], known);
    }
}

/* A row of what the heads attended to, times the sigmoid of their gates. */
static void gate_attended(const struct forward_args *a, const struct forward_layer *l, const float *qkv,
                          float *attended) {
    const int64_t d = l->head_dim;
    for (int64_t h = 0; h < a->num_heads; h++)
        for (int64_t i = 0; i < d; i += WIDTH) {
            const floats gate = load_floats(qkv + h * query_step(a, l) + d + i);
            store_floats(attended + h * d + i, load_floats(attended + h * d + i) * sigmoid_floats(gate));
        }
}

/* The inputs of the last products of attention and of the recurrence. */
static void quantise_attended(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                              const struct forward_work *w, const struct block_rows *heads) {
    const struct recurrent_work *recurrent = &w->recurrent;
    TEAM_FOR(m, r, w->rows) {
        if (l->recurrent) {
            const float *read = recurrent->read + r * a->recurrents.read;
            gate_read(l->recurrent, &a->recurrents, recurrent, r);
            if (a->adapters) shrink(a, l, w, r, OF_OUTPUT, read);
            quantise_row(read, &recurrent->given, r);
        }
        if (!has_attention(l)) continue;
        float *attended = w->attended + (w->begin + r) * heads->inputs;
        if (a->query_gates) gate_attended(a, l, w->qkv + r * a->channels, attended);
        if (a->adapters) shrink(a, l, w, r, OF_OUTPUT, attended);
        quantise_row(attended, heads, r);
    }
}

/* What attention, the recurrence, or both add to the stream: their last products. */
static void add_mixers(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                       const struct forward_work *w, const struct block_rows *heads) {
    const struct recurrent_work *recurrent = &w->recurrent;
    if (!l->recurrent || !has_attention(l)) {
        const struct block_weights *weights = l->recurrent ? &l->recurrent->output : &l->output;
        product(m, a, l, w, weights, OF_OUTPUT, l->recurrent ? &recurrent->given : heads, w->delta, a->hidden);
        return;
    }
    const struct block_rows attended = ready_rows(m, &l->output, heads, w->rows, w->rows);
    const struct block_rows given = ready_rows(m, &l->recurrent->output, &recurrent->given, w->rows, w->rows);
    TEAM_FOR_RANGES(m, part, groups_of(&l->output)) for (int64_t g = part.begin; g < part.end; g++) {
        const int64_t next = after(&part, g);
        group_into(&l->output, g, &attended, 0, w->rows, next, w->delta, a->hidden, 0);
        group_into(&l->recurrent->output, g, &given, 0, w->rows, next, recurrent->beside, a->hidden, 0);
        for (int64_t r = 0; r < w->rows; r++)
            for (int64_t i = r * a->hidden + g * GROUP; i < r * a->hidden + (g + 1) * GROUP; i += WIDTH)
                store_floats(w->delta + i, load_floats(w->delta + i) + load_floats(recurrent->beside + i));
    }
}

/* act(gate) * up of 32 channels at a time, quantised at once: the input of the product `down`. */
static void gate_and_up(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                        const struct forward_work *w, const struct block_rows *gated) {
    const int64_t blocks = l->down.inputs / GROUP;
    const struct block_rows x = ready_rows(m, &l->gate_up, &w->normed, w->rows, w->rows);
    float gate[GATED_ROWS][GROUP] __attribute__((aligned(64))), up[GATED_ROWS][GROUP] __attribute__((aligned(64)));
    const int64_t in_tiles = rows_in_tiles(&l->gate_up, &x, w->rows);
    TEAM_FOR_RANGES(m, part, blocks)
    for (int64_t c = part.begin; c < part.end; c++)
        for (int64_t r = 0, rows; r < w->rows; r += rows) {
            rows = (r < in_tiles ? in_tiles : w->rows) - r;
            if (rows > GATED_ROWS) rows = GATED_ROWS;
            const int64_t then = r + rows < w->rows ? c : after(&part, c);
            gate_and_up_group(&l->gate_up, c, blocks, &x, r, r, rows, then, l->act, gate[0], up[0]);
            if (a->adapters) {
                expand(a, l, w, r, rows, OF_GATE_UP, c * GROUP, GROUP, gate[0], GROUP);
                if (l->act != ACT_RELU_SQUARED)
                    expand(a, l, w, r, rows, OF_GATE_UP, l->down.inputs + c * GROUP, GROUP, up[0], GROUP);
            }
            gate_rows(gate[0], up[0], rows, l->act);
            if (a->adapters)
                for (int64_t t = 0; t < rows; t++)
                    memcpy(w->active + (r + t) * a->inner + c * GROUP, gate[t], sizeof gate[t]);
            quantise_gated(gate, r, rows, c, gated);
        }
}

static void shrink_active(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                          const struct forward_work *w) {
    TEAM_FOR(m, r, w->rows)
    shrink(a, l, w, r, OF_DOWN, w->active + r * a->inner);
}

/* What the model makes of its head's outputs. */
INLINE void finish_logits(const struct forward_args *a, float *y, int64_t count) {
    const floats cap = splat(a->logits_softcap);
    for (int64_t i = 0; i < count && a->logits_scale != 1.0f; i++) y[i] *= a->logits_scale;
    for (int64_t i = 0; i < count && a->logits_softcap > 0.0f; i += WIDTH)
        store_some(y, i, tanh_floats(load_some(y, i, count - i, 0) / cap) * cap, count - i, 0);
}

static void head(struct member *m, const struct forward_args *a, const struct forward_work *w) {
    const struct block_rows x = ready_rows(m, &a->head, &w->normed, w->num_logits, w->num_logits);
    TEAM_FOR_RANGES(m, part, groups_of(&a->head))
    groups_into(&a->head, &part, &x, w->num_logits, a->logits, a->logits_stride, w->place);
    if (a->logits_softcap > 0.0f || a->logits_scale != 1.0f) {
        TEAM_FOR(m, r, w->num_logits)
        finish_logits(a, a->logits + w->place[r] * a->logits_stride, a->head.outputs);
    }
}

static struct paged_attention_args attention_of(const struct forward_args *a, const struct forward_layer *l,
                                                const struct forward_work *w) {
    const int64_t d = l->head_dim;
    return (struct paged_attention_args){
        .q = l->latent ? w->latent.queries : w->qkv,
        .out = w->attended,
        .k_pages = l->k_pages,
        .v_pages = l->v_pages,
        .k_scales = l->k_scales,
        .v_scales = l->v_scales,
        .page_table = a->page_table,
        .positions = w->position,
        .q_stride_p = l->latent ? a->num_heads * d : a->channels,
        .q_stride_h = query_step(a, l),
        .k_stride_h = d,
        .v_stride_h = d,
        .table_stride = a->table_stride,
        .num_batch = 1,
        .num_queries = 1,
        .num_heads = (int32_t)a->num_heads,
        .num_kv_heads = (int32_t)l->num_kv_heads,
        .head_dim = (int32_t)d,
        .page_size = (int32_t)a->page_size,
        .kind = a->pages,
        .window = l->window,
        .scale = l->scale,
        .softcap = l->softcap,
        .sinks = l->sinks,
        .values = l->latent ? a->latents.latent : 0,
    };
}

/* Latent attention up to the keys in the pages: the first product has given its rows. */
static void before_latent(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                          const struct forward_work *w, const struct paged_attention_args *attention) {
    const struct latent_layer *latent = l->latent;
    const struct latent_sizes *s = &a->latents;
    const int64_t H = a->num_heads, wide = H * (s->unrotated + s->rotated), compressed = latent->query.inputs;
    const int64_t kv_at = latent->query.quants ? compressed : wide;
    float *q = w->qkv, *queries = w->latent.queries + w->begin * H * s->width;
    int64_t stride = a->channels;
    if (latent->query.quants) {
        const struct block_rows whole = block_rows_at(w->latent.normed, a->num_rows, compressed);
        const struct block_rows normed = block_rows_from(&whole, w->begin);
        TEAM_FOR(m, r, w->rows) {
            float *row = w->qkv + r * a->channels;
            norm32(row, latent->query_norm, latent->query_eps, 0, row, compressed);
            quantise_row(row, &normed, r);
        }
        q = w->attended + w->begin * a->attended; /* free before the attention */
        stride = a->attended;
        product(m, a, l, w, &latent->query, OF_QKV, &normed, q, stride);
    }
    const struct block_rows inputs = head_inputs_at(s, &w->latent, H, w->begin, w->rows, s->unrotated);
    TEAM_FOR(m, r, w->rows) {
        const int64_t angle = w->position[r] * l->rotated;
        float *kv = w->qkv + r * a->channels + kv_at, key[MAX_D] __attribute__((aligned(64)));
        norm32(kv, latent->norm, latent->eps, 0, key, s->latent);
        rotate_apart(kv + s->latent, l->cos + angle, l->sin + angle, s->rotated, l->neighbours, key + s->latent,
                     s->width - s->latent);
        place_queries(s, H, q + r * stride, l->cos + angle, l->sin + angle, l->neighbours, queries + r * H * s->width,
                      &inputs, w->rows, r);
        struct paged_attention_args row = *attention;
        row.k = key;
        row.positions = w->position + r;
        row.page_table += w->sequence[r] * a->table_stride;
        store_row(&row, 0, 0, a->pages);
    }
    product_by_head(m, latent->keys, H, &inputs, w->rows, queries, H * s->width, s->width);
}

/* What the heads attended to, as the inputs of the last product. */
static void after_latent(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                         const struct forward_work *w, const struct block_rows *heads) {
    const struct latent_sizes *s = &a->latents;
    const int64_t H = a->num_heads;
    const struct block_rows inputs = head_inputs_at(s, &w->latent, H, w->begin, w->rows, s->latent);
    float *given = w->latent.queries + w->begin * H * s->width; /* the queries have been read */
    TEAM_FOR(m, r, w->rows)
    for (int64_t h = 0; h < H; h++)
        quantise_row(w->attended + ((w->begin + r) * H + h) * s->latent, &inputs, h * w->rows + r);
    product_by_head(m, l->latent->values, H, &inputs, w->rows, given, H * s->width, s->values);
    TEAM_FOR(m, r, w->rows) quantise_row(given + r * H * s->width, heads, r);
}

/* A layer up to the keys and values, which attention has of all rows, or up to its block if it has only that. Each function
 * has loops that the members share. */
static void before_attention(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                             const struct forward_work *w, const struct forward_layer *last) {
    const struct paged_attention_args attention = attention_of(a, l, w);
    const int first = l->recurrent || has_attention(l) ? OF_QKV : OF_GATE_UP;
    before_product(m, a, w, pending_layer(last), l->pre_attention, l->pre_attention_eps, l->tap, l, first);
    if (has_attention(l)) {
        product(m, a, l, w, &l->qkv, OF_QKV, &w->normed, w->qkv, a->channels);
        if (l->latent)
            before_latent(m, a, l, w, &attention);
        else
            rotate_and_store(m, a, l, w, &attention);
    }
    if (l->recurrent) {
        const struct block_weights *weights = &l->recurrent->first;
        product(m, a, l, w, weights, OF_QKV, &w->normed, w->recurrent.projected, a->recurrents.projected);
        bring_rows(m, l->recurrent, &a->recurrents, &w->normed, w->rows, &w->recurrent);
    }
}

/* Attention of the rows of `rest`, and the recurrence of all rows. */
static void attend_or_recur(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                            const struct forward_work *w, const struct forward_work *rest) {
    const struct paged_attention_args attention = attention_of(a, l, w);
    if (l->recurrent) recur(m, l->recurrent, &a->recurrents, &a->lanes, w->rows, &w->recurrent);
    if (has_attention(l) && rest->tiles[l->tiles].count > 0) attend_tiles(m, a, w, &attention, rest->tiles + l->tiles);
}

/* The work of only the rows [begin, end). */
static struct forward_work work_of_rows(const struct forward_args *a, const struct forward_work *w, int64_t begin,
                                        int64_t end) {
    struct forward_work part = *w;
    part.begin += begin;
    part.x += begin * a->hidden;
    part.delta += begin * a->hidden;
    part.qkv += begin * a->channels;
    part.inputs += begin * a->inputs.projection.outputs;
    part.normed = inputs_at(a, &part, (uint8_t *)w->normed.quants, a->hidden);
    part.place += begin;
    part.position += begin;
    part.sequence += begin;
    part.low += begin * a->adapter_rank;
    part.active += begin * a->inner;
    part.recurrent = recurrent_work_from(&a->recurrents, &w->recurrent, begin);
    part.rows = end - begin;
    return part;
}

/* What a block next to the attention leaves to do between them: its input is in place. */
static void add_attention(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                          const struct forward_work *w) {
    TEAM_FOR(m, r, w->rows)
    add_and_norm(a, w, r, pending_attention(l), 0, 0.0f, 0);
}

/* The input of a mixture with norms of its own, and the choice of its experts. */
static void begin_mixture(const struct forward_args *a, const struct forward_layer *l, const struct forward_work *w,
                          int64_t r) {
    float *input = w->delta + r * a->hidden;
    norm32(w->x + r * a->hidden, l->pre_mixture, l->pre_mixture_eps, a->centred, input, a->hidden);
    route_row(&l->mixture, &a->mixtures, input, a->hidden, &w->mixed.routes, r);
    quantise_row(input, &w->normed, r);
}

/* The sum of the norms of what such a mixture and its shared expert give. */
static void end_mixture(const struct forward_args *a, const struct forward_layer *l, const struct forward_work *w,
                        int64_t r) {
    float *given = w->delta + r * a->hidden, *shared = w->mixed.shared + r * a->hidden;
    norm32(given, l->post_mixture, l->post_mixture_eps, a->centred, given, a->hidden);
    norm32(shared, l->post_shared, l->post_shared_eps, a->centred, shared, a->hidden);
    for (int64_t i = 0; i < a->hidden; i++) given[i] += shared[i];
}

/* The mixture of a layer, whose experts are chosen. Adapters change nothing of it. */
static void mix_layer(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                      const struct forward_work *w) {
    float *shared = l->gate_up.quants ? w->mixed.shared : 0;
    if (shared) {
        const struct block_rows gated = inputs_at(a, w, w->gated, l->down.inputs);
        gate_and_up(m, a, l, w, &gated);
        product(m, a, l, w, &l->down, OF_DOWN, &gated, shared, a->hidden);
    }
    if (l->pre_mixture) {
        TEAM_FOR(m, r, w->rows) begin_mixture(a, l, w, r);
    }
    mix(m, &l->mixture, &a->mixtures, l->act, &w->normed, w->rows, &w->mixed, l->pre_mixture ? 0 : shared, w->delta);
    if (l->pre_mixture) {
        TEAM_FOR(m, r, w->rows) end_mixture(a, l, w, r);
    }
}

/* The inputs of all layers, from the first layer's input. */
static void make_inputs(struct member *m, const struct forward_args *a, const struct forward_work *w) {
    const struct block_weights *projection = &a->inputs.projection;
    TEAM_FOR(m, r, w->rows) quantise_row(w->x + r * a->hidden, &w->normed, r);
    const struct block_rows x = ready_rows(m, projection, &w->normed, w->rows, w->rows);
    TEAM_FOR_RANGES(m, part, groups_of(projection))
    groups_into(projection, &part, &x, w->rows, w->inputs, projection->outputs, 0);
    TEAM_FOR(m, r, w->rows)
    finish_inputs(&a->inputs, w->inputs + r * projection->outputs, a->ids[w->place[r]], a->bf16);
}

/* act(gate) * input of 32 channels at a time, quantised at once: the input of the projection. */
static void gate_input(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                       const struct forward_work *w, const struct block_rows *gated) {
    const int64_t stride = a->inputs.projection.outputs, of_layer = (l - a->layers) * a->inputs.width;
    float gate[GATED_ROWS][GROUP] __attribute__((aligned(64))), input[GATED_ROWS][GROUP] __attribute__((aligned(64)));
    const struct block_rows x = ready_rows(m, &l->input.gate, &w->normed, w->rows, w->rows);
    TEAM_FOR_RANGES(m, part, a->inputs.width / GROUP)
    for (int64_t c = part.begin; c < part.end; c++)
        for (int64_t r = 0, rows; r < w->rows; r += rows) {
            rows = w->rows - r < GATED_ROWS ? w->rows - r : GATED_ROWS;
            group_of_rows(&l->input.gate, c, &x, r, r, rows, r + rows < w->rows ? c : after(&part, c), gate[0], GROUP);
            for (int64_t t = 0; t < rows; t++)
                memcpy(input[t], w->inputs + (r + t) * stride + of_layer + c * GROUP, sizeof input[t]);
            gate_rows(gate[0], input[0], rows, l->act);
            quantise_gated(gate, r, rows, c, gated);
        }
}

/* The layer's input, after its block. Adapters change nothing of it. */
static void add_input(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                      const struct forward_work *w) {
    const struct block_rows gated = inputs_at(a, w, w->gated_input, a->inputs.width);
    before_product(m, a, w, pending_block(l), 0, 0.0f, 0, 0, 0);
    gate_input(m, a, l, w, &gated);
    product(m, a, l, w, &l->input.projection, OF_DOWN, &gated, w->delta, a->hidden);
}

/* The rest of a layer: every row for itself. */
static void after_attention(struct member *m, const struct forward_args *a, const struct forward_layer *l,
                            const struct forward_work *w) {
    if (has_attention(l) || l->recurrent) {
        const struct block_rows heads = inputs_at(a, w, w->heads, l->output.inputs);
        if (l->latent)
            after_latent(m, a, l, w, &heads);
        else
            quantise_attended(m, a, l, w, &heads);
        add_mixers(m, a, l, w, &heads);
        if (!has_block(l)) return;
        if (l->is_parallel)
            add_attention(m, a, l, w);
        else
            before_product(m, a, w, pending_attention(l), l->pre_block, l->pre_block_eps, 0, l, OF_GATE_UP);
    }
    if (l->mixture.router) {
        mix_layer(m, a, l, w);
    } else {
        const struct block_rows gated = inputs_at(a, w, w->gated, l->down.inputs);
        gate_and_up(m, a, l, w, &gated);
        if (a->adapters) shrink_active(m, a, l, w);
        product(m, a, l, w, &l->down, OF_DOWN, &gated, w->delta, a->hidden);
    }
    if (l->input.gate.quants) add_input(m, a, l, w);
}

int64_t VARIANT(lockstep_forward_scratch)(const struct forward_args *a) {
    return (int64_t)(intptr_t)lay_out(a, 0, a->num_rows, 0);
}

struct forward_call {
    const struct forward_args *args;
    const struct forward_work *work;
};

/* Keys and values, or states. */
INLINE int stores(const struct forward_layer *l) {
    return l->recurrent || (has_attention(l) && l->key_values != SHARED_VALUES);
}

/* The last layer that stores something, or whose input is wanted, of all rows. */
static int64_t last_of_all_rows(const struct forward_args *a) {
    int64_t i = a->num_layers - 1;
    while (i > 0 && !stores(a->layers + i) && !a->layers[i].tap) i--;
    return i;
}

/* What is wanted after that layer's keys and values: of all rows where a tap wants them, else of those with logits. These
 * come first, so the tiles of their sequences do as well. */
static struct forward_work work_of_ends(const struct forward_args *a, const struct forward_work *w) {
    struct forward_work ends = *w;
    if (a->tap) return ends;
    ends.rows = w->num_logits;
    for (struct tiles *t = ends.tiles; t < ends.tiles + TILE_LISTS; t++)
        while (t->count > 0 && w->first[t->tasks[t->count - 1][0]] >= ends.rows) t->count--;
    return ends;
}

/* Layers [first, last] of few rows: the members share the outputs of each product, so that each of them reads a part of the
 * weights. `ends`: what is wanted after the last one's keys and values. */
static void layers_by_outputs(struct member *m, const struct forward_args *a, const struct forward_work *w,
                              const struct forward_work *ends, int64_t first, int64_t last) {
    for (int64_t i = first; i <= last; i++) {
        const struct forward_layer *l = a->layers + i;
        const struct forward_work *rest = i == last ? ends : w;
        before_attention(m, a, l, w, i ? l - 1 : 0);
        attend_or_recur(m, a, l, w, rest);
        if (rest->rows == 0) return;
        after_attention(m, a, l, rest);
    }
}

#define MEMBER_ROWS 48 /* rows for every member from which on they share rows */
#define CHUNK_ROWS 36  /* about: a chunk's activations lie in L2, and it reads all weights of a layer */

/* Few rows of many take the same expert, so members that shared the rows would all read all experts. */
static int by_rows(const struct member *m, const struct forward_args *a, int64_t rows) {
    return !m->alone && !a->mixtures.experts && rows >= MEMBER_ROWS * m->threads;
}

#if HAS_TILES
/* The rows from which on the first gated block of a model uses tiles; 0: never. */
static int64_t tiles_from(const struct forward_args *a) {
    for (const struct forward_layer *l = a->layers; l < a->layers + a->num_layers; l++)
        if (l->gate_up.quants) return TILES_FROM(&l->gate_up);
    return 0;
}
#endif

/* How the members share many rows: as many chunks for each member, the larger ones first. */
struct chunks {
    int64_t rows, count;
    int64_t unit, units, larger; /* rows of a unit, units of a chunk, and chunks at first that have one unit more */
};

static struct chunks chunks_of(const struct member *m, int64_t rows, int64_t rounds, int64_t unit) {
    const int64_t count = m->threads * rounds, units = rows / unit;
    return (struct chunks){rows, count, unit, units / count, units % count};
}

/* Chunks of whole tiles, where each can have enough rows for tiles; the last one has the rows that fill no tile as well. */
static struct chunks share_rows(const struct member *m, const struct forward_args *a, int64_t rows) {
    const int64_t round = CHUNK_ROWS * m->threads, rounds = (rows + round / 2) / round;
#if HAS_TILES
    const int64_t least = tiles_from(a), round_of_tiles = STEP_ROWS * m->threads;
    for (int64_t n = (rows + round_of_tiles / 2) / round_of_tiles; least && n > 0; n--) {
        const struct chunks tiles = chunks_of(m, rows, n, TILE_ROWS);
        if (tiles.units && tiles.units * TILE_ROWS >= least) return tiles;
    }
#endif
    (void)a;
    return chunks_of(m, rows, rounds ? rounds : 1, 1);
}

/* The first row of chunk i. */
static int64_t row_of_chunk(const struct chunks *c, int64_t i) {
    return i == c->count ? c->rows : c->unit * (i * c->units + (i < c->larger ? i : c->larger));
}

/* Many rows: the members share the rows. What a member writes is read by itself, from its own cache, except for keys and values;
 * and a layer has two loops. After the last attention the rows may be few again. */
static void layers_by_rows(struct member *m, const struct forward_args *a, const struct forward_work *w,
                           const struct forward_work *ends, int64_t first, int64_t last) {
    struct member alone = {.alone = 1, .chunks = 1};
    const struct chunks chunks = share_rows(m, a, w->rows), last_chunks = share_rows(m, a, ends->rows);
    const struct forward_layer *l = a->layers + first;
    for (int64_t i = first; i <= last; i++, l++) {
        TEAM_FOR_CHUNKS(m, c, chunks.count, 1) {
            const struct forward_work part = work_of_rows(a, w, row_of_chunk(&chunks, c), row_of_chunk(&chunks, c + 1));
            if (i > first) after_attention(&alone, a, l - 1, &part);
            before_attention(&alone, a, l, &part, i ? l - 1 : 0);
        }
        attend_or_recur(m, a, l, w, i == last ? ends : w);
    }
    if (ends->rows == 0) return;
    if (!by_rows(m, a, ends->rows)) {
        after_attention(m, a, l - 1, ends);
        return;
    }
    TEAM_FOR_CHUNKS(m, c, last_chunks.count, 1) {
        const struct forward_work part =
            work_of_rows(a, ends, row_of_chunk(&last_chunks, c), row_of_chunk(&last_chunks, c + 1));
        after_attention(&alone, a, l - 1, &part);
    }
}

/* Layers [first, last]; `ends` as in layers_by_outputs. */
static void layers(struct member *m, const struct forward_args *a, const struct forward_work *w,
                   const struct forward_work *ends, int64_t first, int64_t last) {
    if (by_rows(m, a, w->rows))
        layers_by_rows(m, a, w, ends, first, last);
    else
        layers_by_outputs(m, a, w, ends, first, last);
}

static void forward_of_member(struct member *m, const struct forward_args *a, const struct forward_work *w) {
    const struct forward_work ends = work_of_ends(a, w);
    const int64_t of_all = last_of_all_rows(a), last = a->num_layers - 1;
    embed(m, a, w);
    if (a->inputs.width) make_inputs(m, a, w);
    layers(m, a, w, &ends, 0, of_all);
    if (ends.rows == 0) return;
    if (of_all < last) layers(m, a, &ends, &ends, of_all + 1, last);
    before_product(m, a, &ends, pending_layer(a->layers + last), a->norm, a->norm_eps, 0, 0, 0);
    if (a->tap) {
        TEAM_FOR(m, r, w->rows)
        tap_row(a, w, a->tap, r, w->delta + r * a->hidden);
    }
    if (!a->defers_head) head(m, a, w);
}

static void forward_body(struct member *m, void *context) {
    const struct forward_call *call = context;
    forward_of_member(m, call->args, call->work);
    leave_products();
}

void VARIANT(lockstep_forward)(const struct forward_args *a) {
    struct forward_work w;
    lay_out(a, a->scratch, a->num_rows, &w);
    open_work(a, &w);
    open_lanes(&a->lanes, w.place, w.rows, &w.recurrent);
    if (w.rows > 0) team_run(forward_body, &(struct forward_call){a, &w});
}

#endif
