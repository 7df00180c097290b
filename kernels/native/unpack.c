/* Reads the blocks of the quantised matrices of GGUF files, and rounds floats to blocks of 8 bits.
 *
 * A kind has the number that ggml gives it; its layout is ggml's
 * (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). One function for each kind reads 32 inputs as integers
 * and the scales and offsets of either 16; from these come the blocks of a product (`lockstep_unpack_blocks`) or the numbers
 * (`lockstep_dequantise`). Invariant: the numbers have the bits of the gguf package's dequantisation: every product of a
 * scale and an integer is exact, so no order or contraction changes a bit. Not responsible for: the layout of a product (see
 * pack.c), the order of rows and columns.
 */
#include <stdint.h>
#include <string.h>

#include "codes.h"

#define INLINE static inline __attribute__((always_inline))

enum { INPUTS = 32, PART = 16 };

enum kind {
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    MXFP4 = 39,
};

/* 32 inputs: weight = scale * quant + offset. */
struct block {
    int8_t quants[INPUTS];
    float scales[2], offsets[2]; /* of 16 inputs each */
};

struct unpack_args {
    const uint8_t *raw; /* [rows][row_bytes] */
    int64_t rows, row_bytes, blocks, kind;
    /* [rows][blocks][16 with 4 bits, 20 with 5, 24 with 6, 32 with 8], as a product is packed from (see pack.c) */
    uint8_t *quants;
    uint16_t *scales;  /* [rows][blocks], half precision; of the kinds with a scale for 16 inputs [rows][blocks][2] */
    uint16_t *offsets; /* [rows][blocks] */
};

struct dequantise_args {
    const uint8_t *raw; /* [rows][row_bytes] */
    int64_t rows, row_bytes, blocks, kind, bf16;
    void *out; /* [rows][blocks][32], float or bfloat16 */
};

struct round_args {
    const void *x; /* [blocks][32] */
    int64_t blocks, bf16;
    uint8_t *quants;   /* [blocks][32]: 8 bits with their sign, or 0 to 15 */
    uint16_t *scales;  /* [blocks], half precision */
    uint16_t *offsets; /* the same, with 4 bits; null: 8 bits */
};

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest < 0x400) return float_of(sign | bits_of((float)rest * 0x1p-24f));
    return float_of(sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + 0x38000000));
}

/* To the nearest, ties to even. */
INLINE uint16_t to_half(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000, rest = bits_of(x) & 0x7fffffff;
    if (rest >= 0x47800000) return (uint16_t)(sign | (rest > 0x7f800000 ? 0x7e00 : 0x7c00));
    /* Next to a half, a float is a multiple of the least half-precision number. */
    if (rest < 0x38800000) return (uint16_t)(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

INLINE uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float half_at(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return from_half(half);
}

INLINE void scaled(struct block *to, float scale, float offset) {
    to->scales[0] = to->scales[1] = scale;
    to->offsets[0] = to->offsets[1] = offset;
}

/* The low halves of 16 bytes, then the high ones. */
INLINE void nibbles(struct block *to, const uint8_t *at) {
    for (int i = 0; i < PART; i++) {
        to->quants[i] = (int8_t)(at[i] & 15);
        to->quants[PART + i] = (int8_t)(at[i] >> 4);
    }
}

/* In place of codes, what they stand for. */
INLINE void look_up(struct block *to, const int8_t *values) {
    for (int i = 0; i < INPUTS; i++) to->quants[i] = values[to->quants[i]];
}

INLINE void minus(struct block *to, int8_t less) {
    for (int i = 0; i < INPUTS; i++) to->quants[i] = (int8_t)(to->quants[i] - less);
}

INLINE void fifth_bits(struct block *to, const uint8_t *at) {
    static const uint8_t bit[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    for (int byte = 0; byte < 4; byte++)
        for (int i = 0; i < 8; i++) to->quants[8 * byte + i] |= (int8_t)(at[byte] & bit[i] ? 16 : 0);
}

INLINE void read_q4_0(struct block *to, const uint8_t *row, int64_t b) {
    nibbles(to, row + 18 * b + 2);
    minus(to, 8);
    scaled(to, half_at(row + 18 * b), 0);
}

INLINE void read_q4_1(struct block *to, const uint8_t *row, int64_t b) {
    nibbles(to, row + 20 * b + 4);
    scaled(to, half_at(row + 20 * b), half_at(row + 20 * b + 2));
}

INLINE void read_q5_0(struct block *to, const uint8_t *row, int64_t b) {
    nibbles(to, row + 22 * b + 6);
    fifth_bits(to, row + 22 * b + 2);
    minus(to, 16);
    scaled(to, half_at(row + 22 * b), 0);
}

INLINE void read_q5_1(struct block *to, const uint8_t *row, int64_t b) {
    nibbles(to, row + 24 * b + 8);
    fifth_bits(to, row + 24 * b + 4);
    scaled(to, half_at(row + 24 * b), half_at(row + 24 * b + 2));
}

INLINE void read_q8_0(struct block *to, const uint8_t *row, int64_t b) {
    memcpy(to->quants, row + 34 * b + 2, INPUTS);
    scaled(to, half_at(row + 34 * b), 0);
}

static const int8_t IQ4_VALUES[16] = IQ4_LEVELS(0), MXFP4_VALUES[16] = TWICE_E2M1(0);

INLINE void read_iq4_nl_codes(struct block *to, const uint8_t *row, int64_t b) {
    nibbles(to, row + 18 * b + 2);
    scaled(to, half_at(row + 18 * b), 0);
}

INLINE void read_iq4_nl(struct block *to, const uint8_t *row, int64_t b) {
    read_iq4_nl_codes(to, row, b);
    look_up(to, IQ4_VALUES);
}

INLINE void read_mxfp4(struct block *to, const uint8_t *row, int64_t b) {
    const uint8_t *at = row + 17 * b;
    nibbles(to, at + 1);
    look_up(to, MXFP4_VALUES);
    /* 2 ** (at[0] - 128); the two least are denormals. */
    scaled(to, float_of(at[0] < 2 ? 0x200000u << at[0] : (uint32_t)(at[0] - 1) << 23), 0);
}

/* The kinds with 256 inputs in eight blocks follow. */

INLINE void read_iq4_xs_codes(struct block *to, const uint8_t *row, int64_t b) {
    const uint8_t *at = row + 136 * (b / 8);
    const int j = (int)(b % 8), high = (at[2] | at[3] << 8) >> 2 * j & 3, low = at[4 + j / 2] >> 4 * (j % 2) & 15;
    nibbles(to, at + 8 + PART * j);
    scaled(to, half_at(at) * (float)((low | high << 4) - 32), 0);
}

INLINE void read_iq4_xs(struct block *to, const uint8_t *row, int64_t b) {
    read_iq4_xs_codes(to, row, b);
    look_up(to, IQ4_VALUES);
}

INLINE void scale_and_minimum(struct block *to, const uint8_t *at, int j) {
    const uint8_t *s = at + 4;
    const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
    const int least = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
    scaled(to, half_at(at) * (float)scale, -half_at(at + 2) * (float)least);
}

INLINE void read_q4_k(struct block *to, const uint8_t *row, int64_t b) {
    const uint8_t *at = row + 144 * (b / 8);
    const int j = (int)(b % 8), shift = 4 * (j % 2);
    for (int i = 0; i < INPUTS; i++) to->quants[i] = (int8_t)(at[16 + INPUTS * (j / 2) + i] >> shift & 15);
    scale_and_minimum(to, at, j);
}

INLINE void read_q5_k(struct block *to, const uint8_t *row, int64_t b) {
    const uint8_t *at = row + 176 * (b / 8);
    const int j = (int)(b % 8), shift = 4 * (j % 2);
    for (int i = 0; i < INPUTS; i++)
        to->quants[i] = (int8_t)((at[48 + INPUTS * (j / 2) + i] >> shift & 15) | (at[16 + i] >> j & 1) << 4);
    scale_and_minimum(to, at, j);
}

INLINE void read_q2_k(struct block *to, const uint8_t *row, int64_t b) {
    const uint8_t *at = row + 84 * (b / 8);
    const int j = (int)(b % 8), shift = 2 * (j % 4);
    for (int i = 0; i < INPUTS; i++) to->quants[i] = (int8_t)(at[16 + INPUTS * (j / 4) + i] >> shift & 3);
    for (int p = 0; p < 2; p++) {
        to->scales[p] = half_at(at + 80) * (float)(at[2 * j + p] & 15);
        to->offsets[p] = -half_at(at + 82) * (float)(at[2 * j + p] >> 4);
    }
}

INLINE void read_q3_k(struct block *to, const uint8_t *row, int64_t b) {
    const uint8_t *at = row + 110 * (b / 8), *s = at + 96;
    const int j = (int)(b % 8), shift = 2 * (j % 4);
    for (int i = 0; i < INPUTS; i++)
        to->quants[i] = (int8_t)((at[32 + INPUTS * (j / 4) + i] >> shift & 3) + (at[i] >> j & 1) * 4 - 4);
    for (int p = 0; p < 2; p++) {
        const int n = 2 * j + p, low = n < 8 ? s[n] & 15 : s[n - 8] >> 4, high = s[8 + n % 4] >> 2 * (n / 4) & 3;
        to->scales[p] = half_at(at + 108) * (float)((low | high << 4) - 32);
        to->offsets[p] = 0;
    }
}

INLINE void read_q6_k(struct block *to, const uint8_t *row, int64_t b) {
    const uint8_t *at = row + 210 * (b / 8);
    const int j = (int)(b % 8), shift = 2 * (j % 4), half = j % 4 / 2 * 4;
    const uint8_t *low = at + 64 * (j / 4) + INPUTS * (j % 2), *high = at + 128 + INPUTS * (j / 4);
    for (int i = 0; i < INPUTS; i++)
        to->quants[i] = (int8_t)(((low[i] >> half & 15) | (high[i] >> shift & 3) << 4) - 32);
    for (int p = 0; p < 2; p++) {
        to->scales[p] = half_at(at + 208) * (float)(int8_t)at[192 + 2 * j + p];
        to->offsets[p] = 0;
    }
}

typedef void read_block(struct block *to, const uint8_t *row, int64_t b);

/* Integers or codes of 4 to 6 bits, as a product has them in its words (see block_weights in blocks.h). */
INLINE void put_bits(uint8_t *out, const uint8_t *quants, int bits) {
    if (bits == 6) {
        for (int i = 0; i < 24; i++) { /* byte i % 4 of word i / 4 % 3 of a part */
            const uint8_t *part = quants + i / 12 * PART;
            out[i] = (uint8_t)(part[i % 12] | part[12 + i % 4] >> 2 * (i / 4 % 3) << 6);
        }
        return;
    }
    uint8_t *four_bits = out + 4 * (bits - 4);
    memset(out, 0, 4); /* the fifth bits */
    for (int i = 0; i < PART; i++) {
        if (bits == 5) out[i % 4] |= (uint8_t)((quants[i] >> 4 | quants[PART + i] >> 4 << 1) << i / 4 * 2);
        four_bits[i] = (uint8_t)((quants[i] & 15) | (quants[PART + i] & 15) << 4);
    }
}

/* `zero`: added to integers or codes of fewer than 8 bits, which makes them 0 and more. `parts`: scales of a block. */
INLINE void unpack(const struct unpack_args *a, read_block *read, int bits, int zero, int parts) {
    const int64_t bytes = bits == 8 ? INPUTS : 4 * bits;
    for (int64_t r = 0; r < a->rows; r++)
        for (int64_t b = 0; b < a->blocks; b++) {
            const int64_t n = r * a->blocks + b;
            uint8_t *out = a->quants + n * bytes;
            struct block block;
            read(&block, a->raw + r * a->row_bytes, b);
            if (bits == 8) {
                memcpy(out, block.quants, INPUTS);
            } else {
                minus(&block, (int8_t)-zero);
                put_bits(out, (const uint8_t *)block.quants, bits);
            }
            for (int p = 0; p < parts; p++) a->scales[n * parts + p] = to_half(block.scales[p]);
            if (a->offsets) a->offsets[n] = to_half(block.offsets[0]);
        }
}

INLINE void dequantise(const struct dequantise_args *a, read_block *read, int has_offset) {
    for (int64_t r = 0; r < a->rows; r++)
        for (int64_t b = 0; b < a->blocks; b++) {
            const int64_t first = (r * a->blocks + b) * INPUTS;
            struct block block;
            float x[INPUTS];
            read(&block, a->raw + r * a->row_bytes, b);
            for (int p = 0; p < 2; p++)
                for (int i = 0; i < PART; i++) {
                    x[p * PART + i] = block.scales[p] * (float)block.quants[p * PART + i];
                    if (has_offset) x[p * PART + i] += block.offsets[p];
                }
            if (a->bf16)
                for (int i = 0; i < INPUTS; i++) ((uint16_t *)a->out)[first + i] = to_bf16(x[i]);
            else
                memcpy((float *)a->out + first, x, sizeof x);
        }
}

/* Kinds that are not unpacked: Q2_K, whose offsets are for 16 inputs, and MXFP4, whose codes a product takes as they are. */
void lockstep_unpack_blocks(const struct unpack_args *a) {
    switch (a->kind) {
    case Q4_0:
        unpack(a, read_q4_0, 4, 8, 1);
        break;
    case Q4_1:
        unpack(a, read_q4_1, 4, 0, 1);
        break;
    case Q5_0:
        unpack(a, read_q5_0, 5, 16, 1);
        break;
    case Q5_1:
        unpack(a, read_q5_1, 5, 0, 1);
        break;
    case Q8_0:
        unpack(a, read_q8_0, 8, 0, 1);
        break;
    case Q4_K:
        unpack(a, read_q4_k, 4, 0, 1);
        break;
    case Q5_K:
        unpack(a, read_q5_k, 5, 0, 1);
        break;
    case Q3_K:
        unpack(a, read_q3_k, 4, 8, 2);
        break;
    case Q6_K:
        unpack(a, read_q6_k, 6, 32, 2);
        break;
    case IQ4_NL:
        unpack(a, read_iq4_nl_codes, 4, 0, 1);
        break;
    case IQ4_XS:
        unpack(a, read_iq4_xs_codes, 4, 0, 1);
        break;
    }
}

void lockstep_dequantise(const struct dequantise_args *a) {
    switch (a->kind) {
    case Q4_0:
        dequantise(a, read_q4_0, 0);
        break;
    case Q4_1:
        dequantise(a, read_q4_1, 1);
        break;
    case Q5_0:
        dequantise(a, read_q5_0, 0);
        break;
    case Q5_1:
        dequantise(a, read_q5_1, 1);
        break;
    case Q8_0:
        dequantise(a, read_q8_0, 0);
        break;
    case Q2_K:
        dequantise(a, read_q2_k, 1);
        break;
    case Q3_K:
        dequantise(a, read_q3_k, 0);
        break;
    case Q4_K:
        dequantise(a, read_q4_k, 1);
        break;
    case Q5_K:
        dequantise(a, read_q5_k, 1);
        break;
    case Q6_K:
        dequantise(a, read_q6_k, 0);
        break;
    case IQ4_NL:
        dequantise(a, read_iq4_nl, 0);
        break;
    case IQ4_XS:
        dequantise(a, read_iq4_xs, 0);
        break;
    case MXFP4:
        dequantise(a, read_mxfp4, 0);
        break;
    }
}

/* To the nearest integer, ties to even, from `low` to `high`. */
INLINE int32_t rounded(float x, float low, float high) {
    const float to_even = 0x1.8p23f, above = x > low ? x : low; /* a float of that size has no fraction */
    return (int32_t)(((above < high ? above : high) + to_even) - to_even);
}

/* To the nearest multiple of the largest magnitude's 127th part, which is rounded to half precision first. */
INLINE void round_to_8_bits(const struct round_args *a, int64_t b, const float *x) {
    int32_t most = 0; /* bits of magnitudes are in the order of these */
    for (int i = 0; i < INPUTS; i++) {
        const int32_t bits = (int32_t)(bits_of(x[i]) & 0x7fffffff);
        most = bits > most ? bits : most;
    }
    a->scales[b] = to_half(float_of((uint32_t)most) / 127);
    const float scale = from_half(a->scales[b]);
    uint8_t *out = a->quants + b * INPUTS;
    if (!(scale > 0)) {
        memset(out, 0, INPUTS);
        return;
    }
    for (int i = 0; i < INPUTS; i++) out[i] = (uint8_t)rounded(x[i] / scale, -127, 127);
}

/* From the least number on, to the nearest multiple of the range's 15th part. Both are rounded to half precision first. */
INLINE void round_to_4_bits(const struct round_args *a, int64_t b, const float *x) {
    float least = x[0], most = x[0];
    for (int i = 1; i < INPUTS; i++) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    a->offsets[b] = to_half(least);
    const float offset = from_half(a->offsets[b]);
    a->scales[b] = to_half((most - offset) / 15);
    const float scale = from_half(a->scales[b]);
    uint8_t *out = a->quants + b * INPUTS;
    if (!(scale > 0)) {
        memset(out, 0, INPUTS);
        return;
    }
    for (int i = 0; i < INPUTS; i++) out[i] = (uint8_t)rounded((x[i] - offset) / scale, 0, 15);
}

void lockstep_round_blocks(const struct round_args *a) {
    for (int64_t b = 0; b < a->blocks; b++) {
        float x[INPUTS];
        if (a->bf16)
            for (int i = 0; i < INPUTS; i++) x[i] = float_of((uint32_t)((const uint16_t *)a->x)[b * INPUTS + i] << 16);
        else
            memcpy(x, (const float *)a->x + b * INPUTS, sizeof x);
        if (a->offsets)
            round_to_4_bits(a, b, x);
        else
            round_to_8_bits(a, b, x);
    }
}
