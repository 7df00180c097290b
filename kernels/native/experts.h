/* Mixtures of experts: the experts that each row takes, and the pairs of a row and an expert in the order of the experts.
 *
 * A router has an output for each expert. A row takes the `chosen` experts of the highest shares, the first ones of equal
 * shares, and adds what they give in this order, weighted by their shares, which are the softmax or the sigmoid of the
 * outputs. With groups of experts it takes them from the highest groups. Invariant: what a row takes, and the order in which
 * it adds, depend only on this row. Not responsible for: the experts' products (see mixture.h).
 *
 * Source: N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer",
 * arXiv:1701.06538; the softmax before the choice as in W. Fedus et al., "Switch Transformers", arXiv:2101.03961; sigmoids,
 * corrections and groups as in DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437.
 */
#ifndef LOCKSTEP_EXPERTS_H
#define LOCKSTEP_EXPERTS_H

#include <math.h>

#include "blocks.h"
#include "fused.h"

/* The weights of one layer's mixture. The loader of the model owns them. */
struct mixture {
    const struct block_weights *gate_up, *down; /* of each expert: the same as a gated block's */
    const void *router;                         /* [experts][hidden], bfloat16 or fp32 */
    const float *router_bias;                   /* [experts]; null: none */
    const float *correction;                    /* [experts], added to the shares for the choice only; null: none */
    const float *scales;                        /* [experts], of the weights; null: they are 1 */
    const float *shared_gate; /* [hidden]: its sigmoid weighs the shared expert; null: the weight is 1 */
    float scale;              /* of all weights */
    int32_t of_sigmoid;       /* shares are sigmoids; 0: the softmax */
    int32_t renormalises;     /* the weights of the chosen experts are divided by their sum */
    int32_t router_bf16;
    int32_t groups; /* of experts, at most MOST_GROUPS; 1: there are none */
    int32_t kept;   /* groups from which a row takes experts */
    int32_t by_two; /* a group counts as much as its two highest experts together; 0: as its highest */
};

#define MOST_GROUPS 64

/* Numbers that all mixtures of a model have in common. */
struct mixture_sizes {
    int64_t experts, chosen, inner; /* inner: channels between an expert's products; experts 0: there are no mixtures */
    int64_t has_shared;             /* some have a further expert, which every row takes */
};

/* The experts of R rows. Pair p is the row rows[p] with one of its experts, whose pairs lie next to each other. */
struct routes {
    float *scores;       /* [R][2][experts, rounded up to whole vectors]: shares, and what is chosen by */
    float *shared;       /* [R]: the weight of the shared expert */
    float *weights;      /* [R][chosen] */
    int32_t *experts;    /* [R][chosen] */
    int32_t *pairs;      /* [R][chosen]: the number of the pair */
    int32_t *rows;       /* [R * chosen] */
    int32_t *active;     /* [experts]: those that some row takes, ascending */
    int32_t *first;      /* [experts + 1]: active[i] has the pairs [first[i], first[i + 1]) */
    int32_t *num_active; /* at most most_active(...) */
};

INLINE int64_t whole_vectors(int64_t count) { return (count + 15) / 16 * 16; }

/* The most experts that so many rows take together: the members of a loop know it before they have read `num_active`. */
INLINE int64_t most_active(const struct mixture_sizes *sizes, int64_t rows) {
    const int64_t pairs = rows * sizes->chosen;
    return pairs < sizes->experts ? pairs : sizes->experts;
}

/* The weight of the shared expert for the row x. */
static float shared_weight(const struct mixture *mix, const float *x, int64_t hidden) {
    if (!mix->shared_gate) return 1.0f;
    floats sum[PIECES] = {0};
    FOR_LANES(i, p, hidden) sum[p] = fused(load_floats(x + i), load_floats(mix->shared_gate + i), sum[p]);
    return sigmoid_floats(splat(sum16(sum)))[0];
}

/* Bar the experts of all groups but the highest ones. */
static void bar_groups(const struct mixture *mix, int64_t experts, float *keys) {
    const int64_t each = experts / mix->groups;
    float counts[MOST_GROUPS];
    for (int64_t g = 0; g < mix->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (const float *key = keys + g * each; key < keys + (g + 1) * each; key++) {
            const float lower = *key > first ? first : *key;
            first = *key > first ? *key : first;
            second = lower > second ? lower : second;
        }
        counts[g] = mix->by_two ? first + second : first;
    }
    uint64_t kept = 0;
    for (int64_t n = 0; n < mix->kept; n++) {
        int64_t best = 0; /* where no output is a number, every choice */
        for (int64_t g = 1; g < mix->groups; g++) best = counts[g] > counts[best] ? g : best;
        counts[best] = -INFINITY;
        kept |= (uint64_t)1 << best;
    }
    for (int64_t e = 0; e < experts; e++)
        if (!(kept >> e / each & 1)) keys[e] = -INFINITY;
}

/* Choose row r's experts, whose input is x, fp32 [hidden]. */
static void route_row(const struct mixture *mix, const struct mixture_sizes *sizes, const float *x, int64_t hidden,
                      const struct routes *t, int64_t r) {
    float *scores = t->scores + 2 * r * whole_vectors(sizes->experts), *weights = t->weights + r * sizes->chosen;
    float *keys = scores + whole_vectors(sizes->experts);
    const int bf16 = mix->router_bf16;
    int32_t *experts = t->experts + r * sizes->chosen;
    for (int64_t e = sizes->experts; e < whole_vectors(sizes->experts); e++) scores[e] = -INFINITY;
    for (int64_t e = 0; e < sizes->experts; e++) {
        floats sums[2 * PIECES] = {0}; /* of 32 channels */
        for (int64_t i = 0; i < hidden; i += 32) UNROLL for (int p = 0; p < 2 * PIECES; p++) {
                const int64_t at = i + p * WIDTH;
                sums[p] = fused(load_floats(x + at), load_lanes(mix->router, e * hidden + at, bf16), sums[p]);
            }
        UNROLL for (int p = 0; p < PIECES; p++) sums[p] += sums[PIECES + p];
        scores[e] = sum16(sums) + (mix->router_bias ? mix->router_bias[e] : 0.0f);
    }
    floats top[PIECES], sum[PIECES] = {0};
    UNROLL for (int p = 0; p < PIECES; p++) top[p] = splat(-INFINITY);
    FOR_LANES(e, p, sizes->experts) top[p] = larger(top[p], load_floats(scores + e));
    const float highest = max16(top);
    FOR_LANES(e, p, sizes->experts) {
        const floats score = load_floats(scores + e);
        const floats share = mix->of_sigmoid ? sigmoid_floats(score) : exp_floats(score - splat(highest));
        sum[p] += share;
        store_floats(scores + e, share);
        store_floats(keys + e, share);
    }
    const float whole = mix->of_sigmoid ? 1.0f : sum16(sum);
    for (int64_t e = 0; mix->correction && e < sizes->experts; e++) keys[e] = scores[e] / whole + mix->correction[e];
    if (mix->groups > 1) bar_groups(mix, sizes->experts, keys);
    float total = 0.0f;
    for (int64_t j = 0; j < sizes->chosen; j++) {
        int64_t best = 0; /* where no output is a number, every choice */
        for (int64_t e = 1; e < sizes->experts; e++) best = keys[e] > keys[best] ? e : best;
        experts[j] = (int32_t)best;
        weights[j] = scores[best];
        total += scores[best];
        keys[best] = -INFINITY;
    }
    if (!mix->renormalises) total = whole;
    for (int64_t j = 0; j < sizes->chosen; j++) {
        weights[j] = weights[j] / total * mix->scale;
        if (mix->scales) weights[j] *= mix->scales[experts[j]];
    }
    if (sizes->has_shared) t->shared[r] = shared_weight(mix, x, hidden);
}

/* Number the pairs of `rows` rows. */
static void order_pairs(const struct mixture_sizes *sizes, int64_t rows, const struct routes *t) {
    const int64_t pairs = rows * sizes->chosen;
    int32_t *next = t->active; /* by expert, until it lists the active ones */
    memset(next, 0, (size_t)sizes->experts * sizeof *next);
    for (int64_t i = 0; i < pairs; i++) next[t->experts[i]]++;
    int32_t begin = 0;
    for (int64_t e = 0; e < sizes->experts; e++) {
        const int32_t count = next[e];
        next[e] = begin;
        begin += count;
    }
    for (int64_t i = 0; i < pairs; i++) {
        t->pairs[i] = next[t->experts[i]]++;
        t->rows[t->pairs[i]] = (int32_t)(i / sizes->chosen);
    }
    int32_t active = 0;
    begin = 0;
    for (int64_t e = 0; e < sizes->experts; e++) {
        const int32_t end = next[e]; /* of the expert's pairs */
        if (end > begin) {
            t->first[active] = begin;
            next[active++] = (int32_t)e;
        }
        begin = end;
    }
    t->first[active] = begin;
    *t->num_active = active;
}

#endif
