/* Matrix products of 4 and 8 bits, for CPUs: weights in blocks of 32 inputs, activations of 8 bits in blocks of 32.
 *
 * A block of a weight is GGUF's Q4_1 or Q8_0 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): integers with a
 * scale, and for 4 bits an offset, for every 32 inputs of an output. A block of activations is Q8_1: integers, a scale, and
 * the sum. A product of two blocks is a sum of integers, hence exact; the sums of blocks are added in fp32, in the order of
 * the inputs. Invariant: an output depends on its own row alone, bit for bit, for any number of rows and threads.
 *
 * Packed weights: 16 outputs are the lanes of a vector, and four neighbouring inputs of an output are the bytes of a lane, as
 * the dot product of bytes wants them (VNNI's vpdpbusd; pairs of vpmaddubsw elsewhere). The bytes are unsigned: 0 to 15, or
 * the 8-bit integer plus 128. Needs AVX2, FMA and F16C. Not
 * responsible for: the choice of a format (see gpu_engine/model/quantised).
 */
#ifndef LOCKSTEP_BLOCKS_H
#define LOCKSTEP_BLOCKS_H

#include "simd.h"
#include "team.h"

#include <immintrin.h>

#define QBLOCK 32  /* inputs of a block */
#define LANES 16   /* outputs of a vector */
#define GROUP 32   /* outputs at once: two vectors share the loads of the activations */

#define FETCH_AHEAD 2048 /* bytes of weights */

#define UNROLL_8 _Pragma("GCC unroll 8")

enum { BLOCKS_4_BIT, BLOCKS_8_BIT };
enum { OF_4_BITS, OF_8_BITS, OF_8_BITS_OFFSET }; /* the compiled forms of a product */

typedef int8_t v16c __attribute__((vector_size(16)));

/* One matrix. The loader of the model owns the memory. K = inputs / 32; G = outputs / 16, rounded up to an even number. */
struct block_weights {
    const uint8_t *quants;   /* 4 bits: [G/2][K][2][4][16][4], input 4 j + i in the low half of a byte, 4 (j + 4) + i in the high
                                one; 8 bits: [G/2][K][2][8][16][4]. A group's blocks lie in the order in which they are read */
    const uint16_t *scales;  /* [G/2][K][2][16], half precision */
    const uint16_t *offsets; /* the same, added to every weight of the block; null: none, with 8 bits only */
    const float *bias;       /* [16 G]; null: none */
    int64_t outputs, inputs;
    int64_t kind;
};

/* Rows of activations in blocks; K = inputs / 32. */
struct block_rows {
    int8_t *quants; /* [rows][inputs] */
    float *scales;  /* [rows][K] */
    float *sums;    /* [rows][K], scale times the sum of the integers */
    int32_t *counts; /* [rows][K], the sum of the integers */
    int64_t inputs;
};

struct block_linear_args {
    struct block_weights weights;
    const void *x; /* [rows][inputs] */
    void *out;     /* [rows][outputs] */
    uint8_t *scratch; /* block_rows_bytes(rows, inputs) */
    int64_t rows, bf16;
};

INLINE int64_t block_rows_bytes(int64_t rows, int64_t inputs) { return rows * (inputs + inputs / QBLOCK * 12) + 256; }

/* Lay rows of blocks out in memory of that many bytes. */
INLINE struct block_rows block_rows_at(uint8_t *memory, int64_t rows, int64_t inputs) {
    const int64_t blocks = rows * (inputs / QBLOCK);
    struct block_rows r;
    r.quants = (int8_t *)memory;
    r.scales = (float *)(memory + rows * inputs);
    r.sums = r.scales + blocks;
    r.counts = (int32_t *)(r.sums + blocks);
    r.inputs = inputs;
    return r;
}

INLINE v16f half16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    __m256 half[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
    return load_f32(half);
#endif
}

INLINE v16f fused_add(v16f a, v16f b, v16f c) {
#if defined(__AVX512F__)
    return (v16f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

INLINE v16i splat_int(int32_t x) { return (v16i){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* Without the instruction for it a dot product is a long program, and the sums do not fit into registers: one row, in a loop. */
#if defined(__AVX512VNNI__)
#define ROW_TILE 4 /* rows at once: their sums stay in registers */
#define UNROLL_DOTS _Pragma("GCC unroll 8")
#else
#define ROW_TILE 1
#define UNROLL_DOTS _Pragma("GCC unroll 1")
#endif

#if !defined(__AVX512VNNI__)
/* Pairs of bytes into 16 bits saturate from 2 * 127 * 129 on, so 8-bit weights go in halves of 4 bits. */
INLINE __m256i dot_half(__m256i sum, __m256i w, __m256i x, int wide) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    if (!wide)
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), ones));
    __m256i lo = _mm256_maddubs_epi16(_mm256_and_si256(w, low), x);
    __m256i hi = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(w, 4), low), x);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(lo, ones));
    return _mm256_add_epi32(sum, _mm256_slli_epi32(_mm256_madd_epi16(hi, ones), 4));
}
#endif

/* sum + the products of four unsigned bytes of every lane with the four signed bytes of x. */
INLINE v16i dot4(v16i sum, v16u w, int32_t x, int wide) {
#if defined(__AVX512VNNI__)
    (void)wide;
    return (v16i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#else
    __m256i s[2], v[2], four = _mm256_set1_epi32(x);
    memcpy(s, &sum, sizeof sum);
    memcpy(v, &w, sizeof w);
    s[0] = dot_half(s[0], v[0], four, wide);
    s[1] = dot_half(s[1], v[1], four, wide);
    memcpy(&sum, s, sizeof sum);
    return sum;
#endif
}

/* Quantise one block of 32: integers to nearest even of x * 127 / largest magnitude. */
INLINE void quantise_block(const float *x, const struct block_rows *to, int64_t row, int64_t block) {
    const v16f magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to the nearest integer */
    const v16i positive = splat_int(0x7fffffff);
    int64_t at = row * (to->inputs / QBLOCK) + block;
    v16f a = load_f32(x), b = load_f32(x + 16);
    float top = max16(larger((v16f)((v16i)a & positive), (v16f)((v16i)b & positive)));
    float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    a = (a * splat(inverse) + magic) - magic;
    b = (b * splat(inverse) + magic) - magic;
    v16c qa = __builtin_convertvector(__builtin_convertvector(a, v16i), v16c);
    v16c qb = __builtin_convertvector(__builtin_convertvector(b, v16i), v16c);
    int8_t *q = to->quants + row * to->inputs + block * QBLOCK;
    memcpy(q, &qa, sizeof qa);
    memcpy(q + 16, &qb, sizeof qb);
    float count = sum16(a + b), scale = top / 127.0f;
    to->scales[at] = scale;
    to->sums[at] = scale * count;
    to->counts[at] = (int32_t)count;
}

INLINE void quantise_row(const float *x, const struct block_rows *to, int64_t row) {
    for (int64_t block = 0; block < to->inputs / QBLOCK; block++)
        quantise_block(x + block * QBLOCK, to, row, block);
}

/* Decode part j of a block, the bytes of four inputs of 16 outputs. */
INLINE v16u part_of(const uint8_t *q, int64_t block, int j, int form) {
    v16u x;
    if (form != OF_4_BITS) {
        memcpy(&x, q + (block * 8 + j) * 64, sizeof x);
        return x;
    }
    memcpy(&x, q + (block * 4 + j % 4) * 64, sizeof x);
    return (j < 4 ? x : x >> 4) & 0x0f0f0f0fu;
}

/* Outputs [GROUP g, GROUP (g + 1)) of `rows` rows from `first` on; rows and form are compile-time constants. */
INLINE void group_tile(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first, int rows, int form,
                       v16f out[ROW_TILE][2]) {
    const int64_t blocks = w->inputs / QBLOCK, bytes = form == OF_4_BITS ? 256 : 512;
    const uint8_t *q = w->quants + 2 * g * blocks * bytes;
    const uint16_t *s = w->scales + g * blocks * GROUP, *o = form == OF_8_BITS ? 0 : w->offsets + g * blocks * GROUP;
    const int8_t *xq = x->quants + first * x->inputs;
    const float *xs = x->scales + first * blocks, *xo = x->sums + first * blocks;
    const int32_t *xc = x->counts + first * blocks;
    v16f acc[ROW_TILE][2];
    UNROLL_8 for (int t = 0; t < rows; t++) acc[t][0] = acc[t][1] = splat(0.0f);
    for (int64_t k = 0; k < blocks; k++) {
        v16i sum[ROW_TILE][2];
        /* The hardware's own prefetch begins anew at every page. */
        for (int64_t line = 0; line < 2 * bytes; line += 64)
            __builtin_prefetch(q + 2 * k * bytes + FETCH_AHEAD + line);
        UNROLL_8 for (int t = 0; t < rows; t++) sum[t][0] = sum[t][1] =
            splat_int(form == OF_4_BITS ? 0 : -128 * xc[t * blocks + k]);
        UNROLL_DOTS for (int j = 0; j < 8; j++) {
            v16u a = part_of(q, 2 * k, j, form), b = part_of(q, 2 * k + 1, j, form);
            UNROLL_8 for (int t = 0; t < rows; t++) {
                int32_t four;
                memcpy(&four, xq + t * x->inputs + k * QBLOCK + 4 * j, sizeof four);
                sum[t][0] = dot4(sum[t][0], a, four, form != OF_4_BITS);
                sum[t][1] = dot4(sum[t][1], b, four, form != OF_4_BITS);
            }
        }
        v16f sa = half16(s + k * GROUP), sb = half16(s + k * GROUP + LANES);
        UNROLL_8 for (int t = 0; t < rows; t++) {
            v16f scale = splat(xs[t * blocks + k]);
            acc[t][0] = fused_add(__builtin_convertvector(sum[t][0], v16f) * sa, scale, acc[t][0]);
            acc[t][1] = fused_add(__builtin_convertvector(sum[t][1], v16f) * sb, scale, acc[t][1]);
        }
        if (form != OF_8_BITS) {
            v16f oa = half16(o + k * GROUP), ob = half16(o + k * GROUP + LANES);
            UNROLL_8 for (int t = 0; t < rows; t++) {
                v16f whole = splat(xo[t * blocks + k]);
                acc[t][0] = fused_add(oa, whole, acc[t][0]);
                acc[t][1] = fused_add(ob, whole, acc[t][1]);
            }
        }
    }
    for (int t = 0; t < rows; t++)
        for (int half = 0; half < 2; half++)
            out[t][half] = w->bias ? acc[t][half] + load_f32(w->bias + g * GROUP + half * LANES) : acc[t][half];
}

#define OF_ROWS(n)                                                                                                      \
    case n:                                                                                                             \
        group_tile(w, g, x, first, n, form, out);                                                                       \
        break;

/* The same for up to ROW_TILE rows. */
INLINE void rows_tile(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first, int64_t rows, int form,
                      v16f out[ROW_TILE][2]) {
    switch (rows) {
        OF_ROWS(1)
#if ROW_TILE == 4
        OF_ROWS(2)
        OF_ROWS(3)
        OF_ROWS(4)
#endif
    }
}

static void group_rows(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first, int64_t rows,
                       v16f out[ROW_TILE][2]) {
    if (w->kind == BLOCKS_4_BIT)
        rows_tile(w, g, x, first, rows, OF_4_BITS, out);
    else if (w->offsets)
        rows_tile(w, g, x, first, rows, OF_8_BITS_OFFSET, out);
    else
        rows_tile(w, g, x, first, rows, OF_8_BITS, out);
}

INLINE int64_t groups_of(const struct block_weights *w) { return (w->outputs + GROUP - 1) / GROUP; }

/* Rows of the next tile. */
INLINE int64_t tile_of(int64_t left) { return left < ROW_TILE ? left : ROW_TILE; }

/* Group g of `rows` rows, as fp32 [rows][stride]; row r goes to place[r], or to r where place is null. */
INLINE void group_into(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t rows, float *out,
                       int64_t stride, const int32_t *place) {
    const int64_t left = w->outputs - g * GROUP, count = left < GROUP ? left : GROUP;
    v16f y[ROW_TILE][2];
    for (int64_t r = 0, n; r < rows; r += n) {
        n = tile_of(rows - r);
        group_rows(w, g, x, r, n, y);
        for (int64_t t = 0; t < n; t++)
            memcpy(out + (place ? place[r + t] : r + t) * stride + g * GROUP, y[t], (size_t)count * sizeof(float));
    }
}

/* A product on its own: all rows are quantised before any member multiplies. */
static void block_linear_body(struct member *m, void *context) {
    const struct block_linear_args *a = context;
    const struct block_weights *w = &a->weights;
    struct block_rows x = block_rows_at(a->scratch, a->rows, w->inputs);
    TEAM_FOR(m, r, a->rows)
        for (int64_t block = 0; block < w->inputs / QBLOCK; block++) {
            float part[QBLOCK];
            for (int64_t i = 0; i < QBLOCK; i += 16) {
                v16f y = load(a->x, r * w->inputs + block * QBLOCK + i, (int)a->bf16);
                memcpy(part + i, &y, sizeof y);
            }
            quantise_block(part, &x, r, block);
        }
    TEAM_FOR(m, g, groups_of(w)) {
        const int64_t left = w->outputs - g * GROUP, count = left < GROUP ? left : GROUP;
        v16f y[ROW_TILE][2];
        for (int64_t r = 0, n; r < a->rows; r += n) {
            n = tile_of(a->rows - r);
            group_rows(w, g, &x, r, n, y);
            for (int64_t t = 0; t < n; t++)
                for (int64_t i = 0; i < count; i++)
                    store1(a->out, (r + t) * w->outputs + g * GROUP + i, y[t][i / LANES][i % LANES], (int)a->bf16);
        }
    }
}

void VARIANT(lockstep_block_linear)(const struct block_linear_args *a) { team_run(block_linear_body, (void *)(intptr_t)a); }

#endif
