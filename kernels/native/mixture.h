/* What lies between the two products of a gated block, and mixtures of experts, which are such blocks.
 *
 * Invariant: a row's result depends only on this row, bit for bit: its experts are added in the order of its choice. Not
 * responsible for: the choice (see experts.h).
 */
#ifndef LOCKSTEP_MIXTURE_H
#define LOCKSTEP_MIXTURE_H

#include "blocks.h"
#include "experts.h"
#include "fused.h"
#include "team.h"

#define GATED_ROWS 48  /* rows whose gates and ups lie in L1 together */
#define MIXED_ROWS 512 /* rows of a mixture at once: their pairs take memory */
#define EXPERT_CHUNK 8 /* groups of outputs that a member takes at once: experts have different numbers of rows */

/* Memory of a mixture, whose choices are those of all rows. The rest is of at most MIXED_ROWS rows. */
struct mixture_work {
    struct routes routes;
    struct block_rows taken, taken_gated; /* by pair: inputs of the experts' products, of hidden and inner channels */
    float *given;                         /* by pair: what the expert gives, [hidden] */
    float *shared;                        /* what the shared expert gives, [R][hidden]; null: no mixture has one */
};

struct mixture_args {
    const struct block_weights *gate_up, *down; /* see struct mixture */
    const void *x;                              /* [rows][hidden], bfloat16 or fp32 */
    void *out;                                  /* the same */
    int32_t *experts;                           /* [rows][chosen] */
    float *weights;                             /* [rows][chosen] */
    uint8_t *scratch;                           /* lockstep_mixture_scratch bytes, on a 64-byte boundary */
    struct mixture_sizes sizes;
    int64_t rows, hidden;
    int32_t act, bf16;
};

static uint8_t *carve(uint8_t **memory, int64_t bytes) {
    uint8_t *at = *memory;
    *memory += (bytes + 63) & ~(int64_t)63;
    return at;
}

/* Lay the work out from `memory` on for so many rows; return the end. Without mixtures it takes nothing. */
static uint8_t *lay_out_mixture(const struct mixture_sizes *sizes, int64_t hidden, uint8_t *memory, int64_t rows,
                                struct mixture_work *w) {
    const int64_t pairs = (rows < MIXED_ROWS ? rows : MIXED_ROWS) * sizes->chosen;
    struct routes *t = &w->routes;
    t->scores = (float *)carve(&memory, 2 * rows * whole_vectors(sizes->experts) * 4);
    t->shared = (float *)carve(&memory, sizes->has_shared ? rows * 4 : 0);
    t->weights = (float *)carve(&memory, rows * sizes->chosen * 4);
    t->experts = (int32_t *)carve(&memory, rows * sizes->chosen * 4);
    t->pairs = (int32_t *)carve(&memory, pairs * 4);
    t->rows = (int32_t *)carve(&memory, pairs * 4);
    t->active = (int32_t *)carve(&memory, sizes->experts * 4);
    t->first = (int32_t *)carve(&memory, (sizes->experts + 1) * 4);
    t->num_active = (int32_t *)carve(&memory, 4);
    w->taken = block_rows_at(carve(&memory, block_rows_bytes(pairs, hidden)), pairs, hidden);
    w->taken_gated = block_rows_at(carve(&memory, block_rows_bytes(pairs, sizes->inner)), pairs, sizes->inner);
    w->given = (float *)carve(&memory, pairs * hidden * 4);
    w->shared = (float *)carve(&memory, sizes->has_shared ? rows * hidden * 4 : 0);
    if (!sizes->has_shared) w->shared = 0;
    return memory;
}

INLINE void gate_vectors(float *gate, const float *up, int64_t rows, int act) {
    for (int64_t i = 0; i < rows * GROUP; i += WIDTH) {
        const floats z = active_floats(load_floats(gate + i), act) * factor_floats(load_floats(up + i), act);
        store_floats(gate + i, z);
    }
}

INLINE void square_vectors(float *x, int64_t rows) {
    for (int64_t i = 0; i < rows * GROUP; i += WIDTH) {
        const floats y = larger(splat(0.0f), load_floats(x + i)), z = y * y;
        store_floats(x + i, z);
    }
}

/* act(gate) * up of 32 channels of some rows, into `gate`; of an activation without a gate, act(gate). */
INLINE void gate_rows(float *gate, const float *up, int64_t rows, int32_t act) {
    if (act == ACT_SILU)
        gate_vectors(gate, up, rows, ACT_SILU);
    else if (act == ACT_GELU_TANH)
        gate_vectors(gate, up, rows, ACT_GELU_TANH);
    else if (act == ACT_SWIGLU_OAI)
        gate_vectors(gate, up, rows, ACT_SWIGLU_OAI);
    else
        square_vectors(gate, rows);
}

/* Block c of the outputs of a gate and of up, for rows [r, r + rows) of x. Without a gate, `gate` gets the outputs of up. `at`:
 * rows of the same product before them. `then`: the group that the caller reads after these. */
INLINE void gate_and_up_group(const struct block_weights *gate_up, int64_t c, int64_t blocks,
                              const struct block_rows *x, int64_t r, int64_t at, int64_t rows, int64_t then,
                              int32_t act, float *gate, float *up) {
    const int has_gate = act != ACT_RELU_SQUARED;
    group_of_rows(gate_up, c, x, r, at, rows, has_gate ? blocks + c : then, gate, GROUP);
    if (has_gate) group_of_rows(gate_up, blocks + c, x, r, at, rows, then, up, GROUP);
}

/* Block c of rows [r, r + rows): the input of the product `down`. */
INLINE void quantise_gated(float (*gate)[GROUP], int64_t r, int64_t rows, int64_t c, const struct block_rows *to) {
    for (int64_t t = 0; t < rows; t += 16)
        quantise_blocks(gate[t], GROUP, rows - t < 16 ? rows - t : 16, to, r + t, c, 1);
}

/* A mixture of at most MIXED_ROWS rows of x, from row `begin` on, into those of `out`, [][hidden]. `shared`: what the shared
 * expert gives, [][hidden]; null: there is none. */
static void mix_some(struct member *m, const struct mixture *mixture, const struct mixture_sizes *sizes, int32_t act,
                     const struct block_rows *x, int64_t begin, int64_t rows, const struct mixture_work *w,
                     const float *shared, float *out) {
    const int64_t H = x->inputs, blocks = sizes->inner / GROUP, groups = H / GROUP;
    float gate[GATED_ROWS][GROUP] __attribute__((aligned(64))), up[GATED_ROWS][GROUP] __attribute__((aligned(64)));
    struct routes part = w->routes;
    const struct routes *t = &part;
    part.weights += begin * sizes->chosen;
    part.experts += begin * sizes->chosen;
    TEAM_FOR_CHUNKS(m, once, 1, 1) order_pairs(sizes, rows, t);
    TEAM_FOR(m, p, rows * sizes->chosen) copy_block_row(x, begin + t->rows[p], &w->taken, p);
    /* A row takes an expert once. */
    const struct block_rows taken = ready_rows(m, mixture->gate_up, &w->taken, rows, rows * sizes->chosen);
    TEAM_FOR_CHUNKS(m, item, most_active(sizes, rows) * blocks, EXPERT_CHUNK) {
        const int64_t i = item / blocks, c = item % blocks;
        if (i >= *t->num_active) continue;
        const int64_t end = t->first[i + 1];
        const struct block_weights *gate_up = mixture->gate_up + t->active[i];
        for (int64_t p = t->first[i], pairs; p < end; p += pairs) {
            pairs = end - p < GATED_ROWS ? end - p : GATED_ROWS;
            const int64_t then = p + pairs < end ? c : c + 1;
            gate_and_up_group(gate_up, c, blocks, &taken, p, p - t->first[i], pairs, then, act, gate[0], up[0]);
            gate_rows(gate[0], up[0], pairs, act);
            quantise_gated(gate, p, pairs, c, &w->taken_gated);
        }
    }
    const struct block_rows gated = ready_rows(m, mixture->down, &w->taken_gated, rows, rows * sizes->chosen);
    TEAM_FOR_CHUNKS(m, item, most_active(sizes, rows) * groups, EXPERT_CHUNK) {
        const int64_t i = item / groups, g = item % groups;
        if (i >= *t->num_active) continue;
        const int64_t p = t->first[i];
        group_of_rows(mixture->down + t->active[i], g, &gated, p, 0, t->first[i + 1] - p, g + 1,
                      w->given + p * H + g * GROUP, H);
    }
    TEAM_FOR(m, r, rows)
    for (int64_t h = 0; h < H; h += WIDTH) {
        floats sum = splat(0.0f);
        for (int64_t j = r * sizes->chosen; j < (r + 1) * sizes->chosen; j++)
            sum = fused(splat(t->weights[j]), load_floats(w->given + t->pairs[j] * H + h), sum);
        if (shared) sum = fused(splat(t->shared[begin + r]), load_floats(shared + (begin + r) * H + h), sum);
        store_floats(out + (begin + r) * H + h, sum);
    }
}

/* A mixture of the rows of x, whose experts are chosen, into `out`, [rows][hidden]. */
static void mix(struct member *m, const struct mixture *mixture, const struct mixture_sizes *sizes, int32_t act,
                const struct block_rows *x, int64_t rows, const struct mixture_work *w, const float *shared,
                float *out) {
    for (int64_t r = 0; r < rows; r += MIXED_ROWS)
        mix_some(m, mixture, sizes, act, x, r, rows - r < MIXED_ROWS ? rows - r : MIXED_ROWS, w, shared, out);
}

/* Memory of a mixture by itself, of at most MIXED_ROWS rows. */
struct lone_mixture {
    const struct mixture_args *args;
    struct block_rows x;
    float *out; /* [rows][hidden] */
    struct mixture_work work;
};

static uint8_t *lay_out_lone(const struct mixture_args *a, uint8_t *memory, struct lone_mixture *w) {
    const int64_t rows = a->rows < MIXED_ROWS ? a->rows : MIXED_ROWS;
    w->x = block_rows_at(carve(&memory, block_rows_bytes(rows, a->hidden)), rows, a->hidden);
    w->out = (float *)carve(&memory, rows * a->hidden * 4);
    return lay_out_mixture(&a->sizes, a->hidden, memory, rows, &w->work);
}

static __attribute__((noinline)) void mixture_body(struct member *m, void *context) {
    const struct lone_mixture *w = context;
    const struct mixture_args *a = w->args;
    const struct mixture mixture = {.gate_up = a->gate_up, .down = a->down};
    TEAM_FOR(m, r, a->rows) {
        float *row = w->out + r * a->hidden; /* what it holds now is overwritten later */
        for (int64_t i = 0; i < a->hidden; i += WIDTH)
            store_floats(row + i, load_lanes(a->x, r * a->hidden + i, a->bf16));
        quantise_row(row, &w->x, r);
    }
    mix_some(m, &mixture, &a->sizes, a->act, &w->x, 0, a->rows, &w->work, 0, w->out);
    TEAM_FOR(m, r, a->rows)
    for (int64_t i = r * a->hidden; i < (r + 1) * a->hidden; i++) store1(a->out, i, w->out[i], a->bf16);
    leave_products();
}

int64_t VARIANT(lockstep_mixture_scratch)(const struct mixture_args *a) {
    struct lone_mixture w;
    return (int64_t)(intptr_t)lay_out_lone(a, 0, &w);
}

/* Returns 0, and writes nothing, where a row has a number that no expert has. */
int32_t VARIANT(lockstep_mixture)(const struct mixture_args *a) {
    struct lone_mixture w;
    for (int64_t i = 0; i < a->rows * a->sizes.chosen; i++)
        if (a->experts[i] < 0 || a->experts[i] >= a->sizes.experts) return 0;
    lay_out_lone(a, a->scratch, &w);
    for (int64_t r = 0; r < a->rows; r += MIXED_ROWS) {
        struct mixture_args part = *a;
        part.rows = a->rows - r < MIXED_ROWS ? a->rows - r : MIXED_ROWS;
        part.x = (const uint8_t *)a->x + r * a->hidden * (a->bf16 ? 2 : 4);
        part.out = (uint8_t *)a->out + r * a->hidden * (a->bf16 ? 2 : 4);
        w.args = &part;
        w.work.routes.experts = a->experts + r * a->sizes.chosen;
        w.work.routes.weights = a->weights + r * a->sizes.chosen;
        team_run(mixture_body, &w);
    }
    return 1;
}

#endif
