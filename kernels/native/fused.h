/* The small operators of a decoder layer, for CPUs: residual + RMSNorm, per-head RMSNorm + rotary, activation * up.
 *
 * Invariant: values are rounded to the model's dtype where transformers' own modules round them, so in bf16 a result
 * differs from theirs in a rare last bit only (another order of a sum, another exponential). A row has a fixed order of
 * operations whatever else is in the call. Not responsible for: products and attention.
 */
#ifndef LOCKSTEP_FUSED_H
#define LOCKSTEP_FUSED_H

#include "simd.h"

#define SERIAL_BELOW 8192 /* elements: a parallel region costs as much time */

enum { ROUND_THEN_SCALE, SCALE_THEN_ROUND, ONE_PLUS_SCALE, CENTRED };
enum { ACT_SILU, ACT_GELU_TANH, ACT_SWIGLU_OAI, ACT_RELU_SQUARED };

struct rms_norm_args {
    void *x;            /* [rows][x_stride], width used; becomes x + delta */
    const void *delta;  /* [rows][delta_stride]; null: x is unchanged */
    const void *weight; /* [width] */
    void *out;          /* [rows][width] contiguous */
    int64_t rows, width, x_stride, delta_stride;
    float eps;
    int32_t kind, bf16;
};

struct rotary_args {
    void
        *qkv; /* [rows][stride]: q heads, then k heads, changed in place; the columns after them only with `v_weight` */
    const void *cos;      /* [rows][rotated] contiguous; halves, whatever channels are pairs */
    const void *sin;      /* the same */
    const void *q_weight; /* [head_dim], RMSNorm of a query head, or with `whole_norms` of all together; null: none */
    const void *k_weight; /* the same for keys */
    const void *v_weight; /* [head_dim], RMSNorm of each of the k_heads heads after the keys; null: none */
    int64_t rows, stride, q_heads, k_heads, head_dim, rotated; /* the first `rotated` channels of a head are rotated */
    float q_eps, k_eps, v_eps;
    int32_t kind, bf16;
    int32_t angles_bf16;             /* 0 with bf16: the rotation is computed in fp32, and rounded once */
    int32_t neighbours;              /* channels 2 i and 2 i + 1 are a pair; 0: i and i + rotated / 2 */
    int32_t whole_norms, norms_last; /* last: after the rotation */
};

struct gated_args {
    const void *gate_up; /* [rows][2 * width] contiguous: gate, then up */
    void *out;           /* [rows][width] contiguous */
    int64_t rows, width;
    int32_t act, bf16;
};

INLINE floats rounded(floats x, int bf16) { return bf16 ? (floats)(bf16_bits(x) << 16) : x; }

INLINE float rounded1(float x, int bf16) {
    uint32_t u = (uint32_t)to_bf16(x) << 16;
    float y;
    memcpy(&y, &u, sizeof y);
    return bf16 ? y : x;
}

/* A register's lanes, or the last `n`, with zeros after them. */
INLINE floats load_some(const void *base, int64_t index, int64_t n, int bf16) {
    floats x = splat(0.0f);
    if (n >= WIDTH) return load_lanes(base, index, bf16);
    for (int64_t i = 0; i < n; i++) x[i] = load1(base, index + i, bf16);
    return x;
}

INLINE void store_some(void *base, int64_t index, floats x, int64_t n, int bf16) {
    if (n >= WIDTH) {
        store_lanes(base, index, x, bf16);
        return;
    }
    for (int64_t i = 0; i < n; i++) store1(base, index + i, x[i], bf16);
}

INLINE floats scaled(floats x, float inverse, floats weight, int kind, int bf16) {
    const floats y = x * splat(inverse);
    if (kind == ROUND_THEN_SCALE) return rounded(y, bf16) * weight;
    return kind == ONE_PLUS_SCALE ? y * (splat(1.0f) + weight) : y * weight;
}

/* x minus its mean; elements from n on stay 0. */
INLINE floats without_mean(floats x, float mean, int64_t n) {
    x -= splat(mean);
    for (int64_t i = n > 0 ? n : 0; i < WIDTH; i++) x[i] = 0.0f;
    return x;
}

INLINE void norm_row(const struct rms_norm_args *a, int64_t row, int bf16) {
    const int64_t n = a->width, at = row * a->x_stride, to = row * n;
    floats squares[PIECES] = {0}, sum[PIECES] = {0};
    FOR_LANES(i, p, n) {
        floats x = load_some(a->x, at + i, n - i, bf16);
        if (a->delta) {
            x = rounded(x + load_some(a->delta, row * a->delta_stride + i, n - i, bf16), bf16);
            store_some(a->x, at + i, x, n - i, bf16);
        }
        squares[p] = fused(x, x, squares[p]);
        sum[p] += x;
    }
    const int is_centred = a->kind == CENTRED;
    const float mean = is_centred ? sum16(sum) / (float)n : 0.0f;
    if (is_centred) {
        memset(squares, 0, sizeof squares);
        FOR_LANES(i, p, n) {
            const floats x = without_mean(load_some(a->x, at + i, n - i, bf16), mean, n - i);
            squares[p] = fused(x, x, squares[p]);
        }
    }
    float inverse = 1.0f / sqrtf(sum16(squares) / (float)n + a->eps);
    for (int64_t i = 0; i < n; i += WIDTH) {
        floats x = load_some(a->x, at + i, n - i, bf16), w = load_some(a->weight, i, n - i, bf16);
        if (is_centred) x = without_mean(x, mean, n - i);
        store_some(a->out, to + i, scaled(x, inverse, w, a->kind, bf16), n - i, bf16);
    }
}

/* The RMSNorm of one head, or of several as one, in place. */
INLINE void norm_head(void *head, int64_t at, const void *weight, int64_t d, float eps, int kind, int bf16) {
    floats squares[PIECES] = {0};
    FOR_LANES(i, p, d) {
        const floats x = load_some(head, at + i, d - i, bf16);
        squares[p] += x * x; /* not fused, as before fusing was written out: its bits stay */
    }
    float inverse = 1.0f / sqrtf(sum16(squares) / (float)d + eps);
    for (int64_t i = 0; i < d; i += WIDTH) {
        const floats x = load_some(head, at + i, d - i, bf16), w = load_some(weight, i, d - i, bf16);
        store_some(head, at + i, scaled(x, inverse, w, kind, bf16), d - i, bf16);
    }
}

/* The norms of a row's queries and keys, where it has them. */
INLINE void norm_heads_of(const struct rotary_args *a, int64_t row, int bf16) {
    const int64_t d = a->head_dim, together = a->whole_norms ? a->q_heads : 1;
    const int64_t keys_together = a->whole_norms ? a->k_heads : 1, keys = row * a->stride + a->q_heads * d;
    for (int64_t h = 0; a->q_weight && h < a->q_heads; h += together)
        norm_head(a->qkv, row * a->stride + h * d, a->q_weight, together * d, a->q_eps, a->kind, bf16);
    for (int64_t h = 0; a->k_weight && h < a->k_heads; h += keys_together)
        norm_head(a->qkv, keys + h * d, a->k_weight, keys_together * d, a->k_eps, a->kind, bf16);
}

/* x * c + y * s, of products that are rounded to bfloat16 where the angles are. */
INLINE floats turned(floats x, floats c, floats y, floats s, int bf16) {
    return bf16 ? rounded(x * c, 1) + rounded(y * s, 1) : fused(x, c, y * s);
}

INLINE float turned1(float x, float c, float y, float s, int bf16) {
    return bf16 ? rounded1(x * c, 1) + rounded1(y * s, 1) : fused1(x, c, y * s);
}

/* A head whose pairs are halves of the rotated channels. */
INLINE void rotate_halves(const struct rotary_args *a, int64_t at, int64_t angle, int bf16, int angles_bf16) {
    const int64_t half = a->rotated / 2;
    for (int64_t i = 0; i < half; i += WIDTH) {
        const int64_t n = half - i;
        const floats x = load_some(a->qkv, at + i, n, bf16), y = load_some(a->qkv, at + half + i, n, bf16);
        const floats cx = load_some(a->cos, angle + i, n, angles_bf16);
        const floats sx = load_some(a->sin, angle + i, n, angles_bf16);
        const floats cy = load_some(a->cos, angle + half + i, n, angles_bf16);
        const floats sy = load_some(a->sin, angle + half + i, n, angles_bf16);
        store_some(a->qkv, at + i, turned(x, cx, -y, sx, angles_bf16), n, bf16);
        store_some(a->qkv, at + half + i, turned(y, cy, x, sy, angles_bf16), n, bf16);
    }
}

INLINE void rotate_neighbours(const struct rotary_args *a, int64_t at, int64_t angle, int bf16, int angles_bf16) {
    const int64_t half = a->rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        float x = load1(a->qkv, at + 2 * i, bf16), y = load1(a->qkv, at + 2 * i + 1, bf16);
        float cx = load1(a->cos, angle + i, angles_bf16), sx = load1(a->sin, angle + i, angles_bf16);
        float cy = load1(a->cos, angle + half + i, angles_bf16), sy = load1(a->sin, angle + half + i, angles_bf16);
        store1(a->qkv, at + 2 * i, turned1(x, cx, -y, sx, angles_bf16), bf16);
        store1(a->qkv, at + 2 * i + 1, turned1(y, cy, x, sy, angles_bf16), bf16);
    }
}

INLINE void rotate_row(const struct rotary_args *a, int64_t row, int bf16, int angles_bf16) {
    if (!a->norms_last) norm_heads_of(a, row, bf16);
    for (int64_t h = 0; h < a->q_heads + a->k_heads; h++) {
        const int64_t at = row * a->stride + h * a->head_dim, angle = row * a->rotated;
        if (a->neighbours)
            rotate_neighbours(a, at, angle, bf16, angles_bf16);
        else
            rotate_halves(a, at, angle, bf16, angles_bf16);
    }
    if (a->norms_last) norm_heads_of(a, row, bf16);
    const int64_t d = a->head_dim, values = row * a->stride + (a->q_heads + a->k_heads) * d;
    for (int64_t h = 0; a->v_weight && h < a->k_heads; h++)
        norm_head(a->qkv, values + h * d, a->v_weight, d, a->v_eps, a->kind, bf16);
}

/* 1 / (1 + exp(-x)), without overflow on either side. */
INLINE floats sigmoid_floats(floats x) {
    const floats one = splat(1.0f), e = exp_floats((floats)((int32s)x | INT32_MIN));
    return where_below(x, splat(0.0f), e, one) / (one + e);
}

#define OAI_LIMIT 7.0f /* of gpt-oss's gate, from above, and of the size of its up */

/* act(gate); `act` is a compile-time constant where speed matters. */
INLINE floats active_floats(floats gate, int act) {
    if (act == ACT_SWIGLU_OAI) {
        gate = smaller(splat(OAI_LIMIT), gate); /* the second one where it is no number */
        return gate * sigmoid_floats(splat(1.702f) * gate);
    }
    if (act == ACT_GELU_TANH) { /* 0.5 (1 + tanh u) is sigmoid(2 u) */
        const floats grown = fused(splat(0.044715f) * gate * gate, gate, gate);
        return gate * sigmoid_floats(splat(2.0f * 0.7978845608028654f) * grown);
    }
    return gate * sigmoid_floats(gate);
}

/* What act(gate) is multiplied by. */
INLINE floats factor_floats(floats up, int act) {
    const floats limit = splat(OAI_LIMIT);
    return act == ACT_SWIGLU_OAI ? larger(-limit, smaller(limit, up)) + splat(1.0f) : up;
}

INLINE void gated_row(const struct gated_args *a, int64_t row, int act, int bf16) {
    const int64_t n = a->width, at = row * 2 * n;
    for (int64_t i = 0; i < n; i += WIDTH) {
        const floats active = active_floats(load_some(a->gate_up, at + i, n - i, bf16), act);
        floats factor = factor_floats(load_some(a->gate_up, at + n + i, n - i, bf16), act);
        if (act == ACT_SWIGLU_OAI) factor = rounded(factor, bf16);
        store_some(a->out, row * n + i, rounded(active, bf16) * factor, n - i, bf16);
    }
}

void VARIANT(lockstep_rms_norm)(const struct rms_norm_args *a) {
#pragma omp parallel for schedule(static) if (a->rows > 1 && a->rows * a->width >= SERIAL_BELOW)
    for (int64_t row = 0; row < a->rows; row++) {
        if (a->bf16)
            norm_row(a, row, 1);
        else
            norm_row(a, row, 0);
    }
}

void VARIANT(lockstep_rotary)(const struct rotary_args *a) {
    const int64_t width = (a->q_heads + a->k_heads) * a->head_dim;
#pragma omp parallel for schedule(static) if (a->rows > 1 && a->rows * width >= SERIAL_BELOW)
    for (int64_t row = 0; row < a->rows; row++) {
        if (a->bf16 && a->angles_bf16)
            rotate_row(a, row, 1, 1);
        else if (a->bf16)
            rotate_row(a, row, 1, 0);
        else
            rotate_row(a, row, 0, 0);
    }
}

#define GATED_ROW(act, bf16)                                                                                           \
    case 2 * act + bf16:                                                                                               \
        gated_row(a, row, act, bf16);                                                                                  \
        break;

void VARIANT(lockstep_gated)(const struct gated_args *a) {
#pragma omp parallel for schedule(static) if (a->rows > 1 && a->rows * a->width >= SERIAL_BELOW)
    for (int64_t row = 0; row < a->rows; row++) {
        const int act = a->act, bf16 = a->bf16;
        switch (2 * act + bf16) {
            GATED_ROW(ACT_SILU, 0)
            GATED_ROW(ACT_SILU, 1)
            GATED_ROW(ACT_GELU_TANH, 0)
            GATED_ROW(ACT_GELU_TANH, 1)
            GATED_ROW(ACT_SWIGLU_OAI, 0)
            GATED_ROW(ACT_SWIGLU_OAI, 1)
        }
    }
}

#endif
