/* Matrix products of 4 to 8 bits, for CPUs: weights in blocks of 32 inputs, activations of 8 bits in blocks of 32.
 *
 * A block of a weight is GGUF's Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4 or IQ4_NL
 * (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): integers, or codes of 4 bits that stand for integers of
 * 8 bits, with a scale, and for Q4_1 and Q5_1 an offset, for every 32 inputs of an output. A code of MXFP4 stands for
 * twice the value of its float. A block in two parts is one of Q3_K or Q6_K, and has a scale for every 16 inputs. A
 * block of activations is Q8_1: integers, a scale, and the sum. A product of two blocks, or of a part, is a sum of
 * integers, hence exact; these sums are added in fp32, in the order of the inputs. Invariant: an output depends only on
 * its own row, bit for bit, for any number of rows and threads.
 *
 * Packed weights: 16 outputs are the lanes of a vector, and four neighbouring inputs of an output are the bytes of a
 * lane, as the dot product of bytes wants them (VNNI's vpdpbusd; pairs of vpmaddubsw with AVX2; sdot and usdot on
 * aarch64). The bytes are unsigned: 0 to 63, or the 8-bit integer plus 128. Codes are looked up in a table of bytes.
 * Needs AVX2, FMA and F16C, or aarch64's dot products. Not responsible for: the choice of a format (see
 * gpu_engine/model/quantised).
 */
#ifndef LOCKSTEP_BLOCKS_H
#define LOCKSTEP_BLOCKS_H

#include "codes.h"
#include "simd.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#define QBLOCK 32 /* inputs of a block */
#define LANES 16  /* outputs of a vector */
#define GROUP 32  /* outputs at once: two vectors share the loads of the activations */

#define LINE 64 /* bytes that a core loads at once */
/* Bytes of weights between what a tile multiplies and what it starts to load. With few rows a core itself looks some blocks
 * ahead. */
#define FETCH_AHEAD(rows) ((rows) == 1 ? 2048 : (rows) == 2 ? 4096 : 8192)

/* Outputs of a row from which on the lines of a tile's rows are loaded before it stores to them: the stores would wait for
 * one line after another, and what follows would wait for them. */
#define FAR_APART 2048

#define UNROLL_8 _Pragma("GCC unroll 8")

enum {
    BLOCKS_4_BIT,
    BLOCKS_8_BIT,
    BLOCKS_4_BIT_FLOATS,
    BLOCKS_4_BIT_LEVELS,
    BLOCKS_5_BIT,
    BLOCKS_6_BIT,
    BLOCKS_4_BIT_PARTS
};
/* The compiled forms of a product. */
#define EACH_FORM(of)                                                                                                  \
    of(OF_4_BITS) of(OF_4_BITS_OFFSET) of(OF_8_BITS) of(OF_8_BITS_OFFSET) of(OF_4_BIT_FLOATS) of(OF_4_BIT_LEVELS)      \
        of(OF_5_BITS) of(OF_5_BITS_OFFSET) of(OF_6_BITS) of(OF_6_BITS_OFFSET) of(OF_4_BIT_PARTS)
#define NAME(form) form,
enum { EACH_FORM(NAME) };
#undef NAME
#define MIDDLE 8        /* of integers of 4 bits without offsets: they stand for -8 to 7, so their sums begin lower */
#define MIDDLE_OF_5 16  /* the same of 5 bits */
#define MIDDLE_OF_6 32  /* of 6 bits, with offsets as well */
#define FLOATS_ABOVE 12 /* twice the value of a float, which is -12 to 12, is so much below its unsigned byte */
#define WIDE_ABOVE 128  /* the same of an integer of 8 bits */

/* By form: what a code stands for, and the same as unsigned bytes. */
static const int8_t CODE_VALUES[][16] = {[OF_4_BIT_FLOATS] = TWICE_E2M1(0), [OF_4_BIT_LEVELS] = IQ4_LEVELS(0)};
static const uint8_t CODE_BYTES[][16] = {[OF_4_BIT_FLOATS] = TWICE_E2M1(FLOATS_ABOVE),
                                         [OF_4_BIT_LEVELS] = IQ4_LEVELS(WIDE_ABOVE)};

/* One matrix. The loader of the model owns the memory. K = inputs / 32; G = outputs / 16, rounded up to an even number.
 *
 * Integers, whose blocks of a group lie in the order in which they are read:
 *     4 bits  [G/2][K][2][4][16][4], input 4 j + i in the low half of a byte, 4 (j + 4) + i in the high one
 *     5 bits  [G/2][K][2][5][16][4], first the fifth bits, of input 4 j + i in bit 2 j of byte i, of input 4 (j + 4) + i in
 *             bit 2 j + 1; then as 4 bits
 *     6 bits  [G/2][K][2][2 parts][3][16][4], input 4 j + i of a part in the low bits of a byte of word j < 3, and in the
 *             high ones bits 2 j and 2 j + 1 of input 12 + i
 *     8 bits  [G/2][K][2][8][16][4]
 * Scales in half precision: [G/2][K][2][16], of blocks in parts [G/2][K][2 parts][2][16]. Offsets, which are added to every weight
 * of a block: [G/2][K][2][16], or null. Without them, integers of 4 and 5 bits stand for themselves minus their middle; those of
 * 6 bits always do. */
struct block_weights {
    const uint8_t *quants;
    const uint16_t *scales, *offsets;
    const float *bias; /* [16 G]; null: none */
    int64_t outputs, inputs;
    int64_t kind;
    int64_t tile_rows; /* rows at once from which on a matrix unit multiplies (see amx.h); 0: never */
};

/* Weights of another group that a tile starts to load while it multiplies, in the layout of block_weights. */
struct fetch {
    const uint8_t *quants;            /* null: the tile loads what it reads itself */
    int64_t lines;                    /* of the integers, for each block that the tile multiplies */
    const uint16_t *scales, *offsets; /* one line for each */
};

/* Rows of activations in blocks; K = inputs / 32. */
struct block_rows {
    int8_t *quants;       /* [rows][inputs] */
    float *scales;        /* [rows][K] */
    float *sums;          /* [rows][K], scale times the sum of the integers */
    int32_t *counts;      /* [rows][K], the sum of the integers */
    int32_t *firsts;      /* the same of the first 16 */
    float *columns;       /* [2][K][room]: scales and sums again, those of a block next to each other, if `tiled` */
    int64_t inputs, room; /* rows that there is memory for */
    int tiled;            /* products of many rows may use tiles (see ready_rows) */
};

struct block_linear_args {
    struct block_weights weights;
    const void *x;    /* [rows][inputs] */
    void *out;        /* [rows][outputs] */
    uint8_t *scratch; /* block_rows_bytes(rows, inputs) */
    int64_t rows, bf16;
};

INLINE int form_of(const struct block_weights *w) {
    if (w->kind == BLOCKS_4_BIT_FLOATS) return OF_4_BIT_FLOATS;
    if (w->kind == BLOCKS_4_BIT_LEVELS) return OF_4_BIT_LEVELS;
    if (w->kind == BLOCKS_4_BIT_PARTS) return OF_4_BIT_PARTS;
    if (w->kind == BLOCKS_5_BIT) return w->offsets ? OF_5_BITS_OFFSET : OF_5_BITS;
    if (w->kind == BLOCKS_6_BIT) return w->offsets ? OF_6_BITS_OFFSET : OF_6_BITS;
    if (w->kind == BLOCKS_4_BIT) return w->offsets ? OF_4_BITS_OFFSET : OF_4_BITS;
    return w->offsets ? OF_8_BITS_OFFSET : OF_8_BITS;
}

/* Of a weight. */
INLINE int bits_of(int form) {
    if (form == OF_8_BITS || form == OF_8_BITS_OFFSET) return 8;
    if (form == OF_6_BITS || form == OF_6_BITS_OFFSET) return 6;
    return form == OF_5_BITS || form == OF_5_BITS_OFFSET ? 5 : 4;
}

/* Whether two weights share a byte. */
INLINE int in_nibbles(int form) { return bits_of(form) < 6; }

/* Scales of a block. */
INLINE int parts_of(int form) { return bits_of(form) == 6 || form == OF_4_BIT_PARTS ? 2 : 1; }

/* Whether 4 bits are a code. */
INLINE int has_codes(int form) { return form == OF_4_BIT_FLOATS || form == OF_4_BIT_LEVELS; }

/* Whether the integers that are multiplied have 8 bits. */
INLINE int is_wide(int form) { return bits_of(form) == 8 || form == OF_4_BIT_LEVELS; }

/* Whether the offsets are in memory. */
INLINE int has_offsets(int form) {
    return form == OF_4_BITS_OFFSET || form == OF_8_BITS_OFFSET || form == OF_5_BITS_OFFSET || form == OF_6_BITS_OFFSET;
}

/* What an integer of a weight is above the weight. */
INLINE int middle_of(int form) {
    if (bits_of(form) == 6) return MIDDLE_OF_6;
    return form == OF_5_BITS ? MIDDLE_OF_5 : form == OF_4_BITS || form == OF_4_BIT_PARTS ? MIDDLE : 0;
}

/* Bytes of the integers of 16 outputs' blocks. */
INLINE int64_t bytes_of(int form) { return LINE * bits_of(form); }

/* Of a row: its integers, and four numbers for each block, two of them twice. */
INLINE int64_t block_row_bytes(int64_t inputs) { return inputs + inputs / QBLOCK * 24; }

INLINE int64_t block_rows_bytes(int64_t rows, int64_t inputs) { return rows * block_row_bytes(inputs) + 256; }

/* Lay rows of blocks out in memory of that many bytes. */
INLINE struct block_rows block_rows_at(uint8_t *memory, int64_t rows, int64_t inputs) {
    const int64_t blocks = rows * (inputs / QBLOCK);
    struct block_rows r;
    r.quants = (int8_t *)memory;
    r.scales = (float *)(memory + rows * inputs);
    r.sums = r.scales + blocks;
    r.counts = (int32_t *)(r.sums + blocks);
    r.firsts = r.counts + blocks;
    r.columns = (float *)(r.firsts + blocks);
    r.inputs = inputs;
    r.room = rows;
    r.tiled = 0;
    return r;
}

/* The rows from `row` on. */
INLINE struct block_rows block_rows_from(const struct block_rows *x, int64_t row) {
    const int64_t at = row * (x->inputs / QBLOCK);
    struct block_rows part = *x;
    part.quants += at * QBLOCK;
    part.scales += at;
    part.sums += at;
    part.counts += at;
    part.firsts += at;
    part.columns += row;
    return part;
}

INLINE void copy_block_row(const struct block_rows *from, int64_t i, const struct block_rows *to, int64_t k) {
    const int64_t blocks = from->inputs / QBLOCK;
    memcpy(to->quants + k * to->inputs, from->quants + i * from->inputs, (size_t)from->inputs);
    memcpy(to->scales + k * blocks, from->scales + i * blocks, (size_t)blocks * sizeof *to->scales);
    memcpy(to->sums + k * blocks, from->sums + i * blocks, (size_t)blocks * sizeof *to->sums);
    memcpy(to->counts + k * blocks, from->counts + i * blocks, (size_t)blocks * sizeof *to->counts);
    memcpy(to->firsts + k * blocks, from->firsts + i * blocks, (size_t)blocks * sizeof *to->firsts);
}

/* The nearest integers of x * factor, which are below 2^22. */
INLINE floats nearest(floats x, float factor) {
    const floats magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to the nearest integer */
    return fused(x, splat(factor), magic) - magic;
}

/* Integers of 8 bits. */
INLINE void store_bytes(int8_t *to, floats x) {
    const int8s y = __builtin_convertvector(__builtin_convertvector(x, int32s), int8s);
    memcpy(to, &y, sizeof y);
}

/* The sums of the first 16 integers of a block and of all 32 are added up as one float, the first in this unit: both are below
 * half of it, and together they are below 2^24. */
#define FIRST_UNIT 8192.0f
#define LEAST_OF_BLOCK 4e-37f /* a block of smaller numbers is one of zeros: 127 over the largest would be infinite */

/* Quantise `count` blocks of 32, up to 16, of which block i is at x + i * stride: integers to nearest even of
 * x * 127 / largest magnitude. Block 0 is `block` of `row`; the others follow in the same row, or are those of the next rows. */
INLINE void quantise_blocks(const float *x, int64_t stride, int64_t count, const struct block_rows *to, int64_t row,
                            int64_t block, int next_rows) {
    const int64_t at = row * (to->inputs / QBLOCK) + block, step = next_rows ? to->inputs / QBLOCK : 1;
    floats each[16][PIECES], top[PIECES], both[PIECES];
    float inverse[16], scales[16], sums[16];
    int32_t counts[16], firsts[16];
    for (int64_t i = 0; i < 16; i++) UNROLL for (int p = 0; p < PIECES; p++) {
            const float *from = x + i * stride + p * WIDTH;
            each[i][p] =
                i < count ? larger(magnitude(load_floats(from)), magnitude(load_floats(from + 16))) : splat(0.0f);
        }
    max_of_each((const floats(*)[PIECES])each, top);
    UNROLL for (int p = 0; p < PIECES; p++) store_floats(
        inverse + p * WIDTH, select_floats(top[p] > splat(LEAST_OF_BLOCK), splat(127.0f) / top[p], splat(0.0f)));
    for (int64_t i = 0; i < count; i++) {
        int8_t *q = to->quants + (at + i * step) * QBLOCK;
        UNROLL for (int p = 0; p < PIECES; p++) {
            const float *from = x + i * stride + p * WIDTH;
            const floats a = nearest(load_floats(from), inverse[i]), b = nearest(load_floats(from + 16), inverse[i]);
            each[i][p] = fused(a, splat(FIRST_UNIT), a + b);
            store_bytes(q + p * WIDTH, a);
            store_bytes(q + 16 + p * WIDTH, b);
        }
    }
    /* The lanes after `count` are not read. */
    sum_of_each((const floats(*)[PIECES])each, both);
    UNROLL for (int p = 0; p < PIECES; p++) {
        const floats first = nearest(both[p], 1.0f / FIRST_UNIT), whole = fused(first, splat(-FIRST_UNIT), both[p]);
        const floats scale = top[p] / splat(127.0f);
        store_floats(scales + p * WIDTH, scale);
        store_floats(sums + p * WIDTH, scale * whole);
        store_ints(counts + p * WIDTH, __builtin_convertvector(whole, int32s));
        store_ints(firsts + p * WIDTH, __builtin_convertvector(first, int32s));
    }
    for (int64_t i = 0; i < count; i++) {
        to->scales[at + i * step] = scales[i];
        to->sums[at + i * step] = sums[i];
        to->counts[at + i * step] = counts[i];
        to->firsts[at + i * step] = firsts[i];
    }
}

INLINE void quantise_row(const float *x, const struct block_rows *to, int64_t row) {
    const int64_t blocks = to->inputs / QBLOCK;
    for (int64_t block = 0; block < blocks; block += 16)
        quantise_blocks(x + block * QBLOCK, QBLOCK, blocks - block < 16 ? blocks - block : 16, to, row, block, 0);
}

#if defined(__AVX512VNNI__)
#define ROW_TILE 6 /* rows at once: 12 sums hide the latency of a dot product, and stay in registers */
#elif defined(__AVXVNNI__)
#define ROW_TILE 2 /* four are not faster: sums of as many outputs no longer stay in 16 registers */
#else
#define ROW_TILE 4
#endif

/* What the sum of the products of a block, or of a part, begins with; `count` is the sum of the activations' integers. */
#define SUM_START(form, count)                                                                                         \
    (is_wide(form)               ? WIDE_START(count)                                                                   \
     : (form) == OF_4_BIT_FLOATS ? FLOATS_START(count)                                                                 \
     : (form) == OF_4_BITS       ? HALVES_START(count)                                                                 \
                                 : -middle_of(form) * (count))

#if defined(__aarch64__)
#include "aarch64_tiles.h"
#else
#if defined(__AVX512F__)
typedef int32s ints;

INLINE ints load_ints(const void *p) {
    ints x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE ints spread_ints(int32_t x) { return (ints)_mm512_set1_epi32(x); }
INLINE ints low_halves(ints w) { return w & spread_ints(0x0f0f0f0f); }
INLINE ints high_halves(ints w) { return (ints)((uint32s)w >> 4) & spread_ints(0x0f0f0f0f); }
INLINE ints bits_up(ints w, int bits) { return (ints)((uint32s)w << bits); }
INLINE ints bits_down(ints w, int bits) { return (ints)((uint32s)w >> bits); }
INLINE ints bits_only(ints w, int bits) { return w & spread_ints(bits * 0x01010101); }
INLINE ints bits_or(ints a, ints b) { return a | b; }
INLINE ints plus_bytes(ints w, int more) { return (ints)_mm512_add_epi8((__m512i)w, _mm512_set1_epi8((char)more)); }
INLINE ints signed_bytes(ints w) { return w ^ spread_ints((int32_t)0x80808080); }
INLINE ints looked_up(const void *table, ints codes) {
    const __m512i tables = _mm512_broadcast_i32x4(_mm_loadu_si128(table));
    return (ints)_mm512_shuffle_epi8(tables, (__m512i)codes);
}
INLINE floats half_floats(const uint16_t *p) { return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE floats times(floats a, floats b) { return a * b; }
INLINE floats sum_floats(floats a, floats b) { return a + b; }
INLINE ints sum_ints(ints a, ints b) { return a + b; }
INLINE floats floats_of(ints x) { return __builtin_convertvector(x, floats); }
#else
typedef __m256i ints;

INLINE ints load_ints(const void *p) { return _mm256_loadu_si256(p); }
INLINE ints spread_ints(int32_t x) { return _mm256_set1_epi32(x); }
INLINE ints low_halves(ints w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
INLINE ints high_halves(ints w) { return _mm256_and_si256(_mm256_srli_epi16(w, 4), _mm256_set1_epi8(15)); }
INLINE ints bits_up(ints w, int bits) { return _mm256_slli_epi16(w, bits); }
INLINE ints bits_down(ints w, int bits) { return _mm256_srli_epi16(w, bits); }
INLINE ints bits_only(ints w, int bits) { return _mm256_and_si256(w, _mm256_set1_epi8((char)bits)); }
INLINE ints bits_or(ints a, ints b) { return _mm256_or_si256(a, b); }
INLINE ints plus_bytes(ints w, int more) { return _mm256_add_epi8(w, _mm256_set1_epi8((char)more)); }
INLINE ints signed_bytes(ints w) { return _mm256_xor_si256(w, _mm256_set1_epi8(-128)); }
INLINE ints looked_up(const void *table, ints codes) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table)), codes);
}
INLINE floats half_floats(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE floats times(floats a, floats b) { return _mm256_mul_ps(a, b); }
INLINE floats sum_floats(floats a, floats b) { return _mm256_add_ps(a, b); }
INLINE ints sum_ints(ints a, ints b) { return _mm256_add_epi32(a, b); }
INLINE floats floats_of(ints x) { return _mm256_cvtepi32_ps(x); }
#endif

#define VECTORS (GROUP / WIDTH) /* a lane has an output */

/* Vectors of a group whose sums are under way at once: all, or a half of it, where more than two rows would not stay in
 * registers. */
#if defined(__AVX512VNNI__)
#define PASS(rows, form) VECTORS
#elif defined(__AVX512F__)
#define PASS(rows, form) ((rows) > (needs_room(form) ? 1 : 2) ? VECTORS / 2 : VECTORS)
#else
#define PASS(rows, form) ((rows) > 2 && needs_room(form) ? VECTORS / 2 : VECTORS)
#endif
INLINE int needs_room(int form) { return is_wide(form) || bits_of(form) > 4 || parts_of(form) == 2; }

/* Dot products of four bytes: `sum` + the products of the bytes of every lane with those of x, whose lanes are equal.
 *
 * dot_half takes weights of 4 bits, and sum_of_halves makes integers of 32 bits of eight such sums: pairs of bytes in
 * 16 bits stay below 8 * 2 * 15 * 127. dot_wide takes 8 bits: as they lie, WIDE_ABOVE too large, which WIDE_START takes
 * off with the sum of the activations' integers; or with their sign, which moves to x, so that a pair is at most 2 *
 * 128 * 127 and stays in 16 bits. dot_levels takes what is looked up in LEVELS. dot_bytes takes bytes of up to 6 bits, and
 * dot_two those of two words, whose two pairs stay below 2 * 2 * 63 * 127; eight pairs do not stay in 16 bits. */
#define FLOATS_START(count) (-FLOATS_ABOVE * (count))
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define IN_PAIRS 0
#define HALVES_START(count) (-MIDDLE * (count))
#else
#define IN_PAIRS 1 /* the sums of dot_half are pairs of 16 bits, which have no room for what a sum begins with */
#define HALVES_START(count) 0
#endif
#if defined(__AVX512VNNI__)
INLINE ints dot_half(ints sum, ints w, ints x) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
INLINE ints sum_of_halves(ints x) { return x; }
INLINE ints dot_two(ints sum, ints low, ints x, ints high, ints later) {
    return dot_half(dot_half(sum, low, x), high, later);
}
#define SUMS_BEGIN WHOLE_BITS
#elif defined(__AVX512F__)
INLINE ints dot_half(ints sum, ints w, ints x) {
    return (ints)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
}
INLINE ints sum_of_halves(ints x) { return (ints)_mm512_madd_epi16((__m512i)x, _mm512_set1_epi16(1)); }
/* There is no instruction for the sign. */
INLINE ints dot_with_sign(ints sum, ints w, ints x) {
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)w);
    const __m512i moved = _mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
    return sum + sum_of_halves((ints)_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), moved));
}
INLINE ints dot_two(ints sum, ints low, ints x, ints high, ints later) {
    return sum + sum_of_halves(dot_half(dot_half(spread_ints(0), low, x), high, later));
}
#elif defined(__AVXVNNI__)
INLINE ints dot_half(ints sum, ints w, ints x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
INLINE ints sum_of_halves(ints x) { return x; }
INLINE ints dot_two(ints sum, ints low, ints x, ints high, ints later) {
    return dot_half(dot_half(sum, low, x), high, later);
}
#else
INLINE ints dot_half(ints sum, ints w, ints x) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)); }
INLINE ints sum_of_halves(ints x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
INLINE ints dot_with_sign(ints sum, ints w, ints x) {
    return _mm256_add_epi32(sum, sum_of_halves(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))));
}
INLINE ints dot_two(ints sum, ints low, ints x, ints high, ints later) {
    return _mm256_add_epi32(sum, sum_of_halves(dot_half(dot_half(spread_ints(0), low, x), high, later)));
}
#endif

/* Bytes of up to 6 bits of one word. */
INLINE ints dot_bytes(ints sum, ints w, ints x) {
    return IN_PAIRS ? sum_ints(sum, sum_of_halves(dot_half(spread_ints(0), w, x))) : dot_half(sum, w, x);
}

#if !IN_PAIRS
#define WIDE_START(count) (-WIDE_ABOVE * (count))
#define LEVELS CODE_BYTES[OF_4_BIT_LEVELS]
INLINE ints dot_levels(ints sum, ints w, ints x) { return dot_half(sum, w, x); }
INLINE ints dot_wide(ints sum, ints w, ints x) { return dot_half(sum, w, x); }
#else
#define WIDE_START(count) (0 * (count))
#define LEVELS CODE_VALUES[OF_4_BIT_LEVELS]
INLINE ints dot_levels(ints sum, ints w, ints x) { return dot_with_sign(sum, w, x); }
INLINE ints dot_wide(ints sum, ints w, ints x) { return dot_with_sign(sum, signed_bytes(w), x); }
#endif

#if !defined(SUMS_BEGIN)
#define SUMS_BEGIN 0
#endif

/* The sums of a block, below 2^22, may begin with the bits of the float 1.5 * 2^23, whose last bit has the value 1: their bits,
 * read as a float, are then that number plus the sum, and need no conversion. */
#define WHOLE 12582912.0f
#define WHOLE_BITS 0x4b400000

/* A sum times its block's scale, rounded once; `whole` is scale * -WHOLE, which is exact for a scale of half precision. Only
 * the sign of a zero sum differs from a conversion's, and adding that zero to another number takes it away. A scale is finite. */
INLINE floats scaled_sum(ints sum, floats scale, floats whole) {
#if SUMS_BEGIN
    return fused((floats)sum, scale, whole);
#else
    (void)whole;
    return times(floats_of(sum), scale);
#endif
}

/* The sum of a block's products, from the sums of its lanes; `count` as in SUM_START. */
INLINE ints whole_sum(ints sum, int form, int32_t count) {
    if (form == OF_4_BITS_OFFSET) return sum_of_halves(sum);
    if (form != OF_4_BITS) return sum;
    return IN_PAIRS ? sum_ints(sum_of_halves(sum), spread_ints(-MIDDLE * count)) : sum;
}

INLINE ints four_of(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return spread_ints(four);
}

/* Inputs 4 word + i (half 0) or 4 (word + 4) + i of a block of 5 bits; no bit crosses a byte. */
INLINE ints five_bits(const uint8_t *block, int word, int half) {
    const ints fifth = load_ints(block), four_bits = load_ints(block + LINE * (word + 1));
    const ints nibble = half ? high_halves(four_bits) : low_halves(four_bits);
    const int bit = 2 * word + half;
    return bits_or(nibble, bits_only(bit < 4 ? bits_up(fifth, 4 - bit) : bits_down(fifth, bit - 4), 0x10));
}

/* Inputs 4 word + i of a part of 6 bits: three words have 6 bits each, and two of the fourth. */
INLINE ints six_bits(const uint8_t *part, int word) {
    if (word < 3) return bits_only(load_ints(part + LINE * word), 0x3f);
    const ints low = bits_only(bits_down(load_ints(part), 6), 0x03);
    const ints middle = bits_only(bits_down(load_ints(part + LINE), 4), 0x0c);
    return bits_or(bits_or(low, middle), bits_only(bits_down(load_ints(part + 2 * LINE), 2), 0x30));
}

/* Start to load a line of block k of another group, if it is before `end`. */
INLINE void fetch_line(const struct fetch *ahead, int64_t k, int64_t line, int64_t end) {
    if (line < end) __builtin_prefetch(ahead->quants + (k * ahead->lines + line) * LINE);
}

/* Start to load lines [begin, end), up to three, some blocks ahead: the hardware's own prefetch begins anew at every page. */
INLINE void fetch_lines(const uint8_t *block, int begin, int end, int rows) {
    block += FETCH_AHEAD(rows);
    __builtin_prefetch(block + begin * LINE);
    if (begin + 1 < end) __builtin_prefetch(block + (begin + 1) * LINE);
    if (begin + 2 < end) __builtin_prefetch(block + (begin + 2) * LINE);
}

/* A half of group g or all of it: `vectors` from output `from` of the group on, of `rows` rows from `first` on, into rows of
 * `out`; rows, form and vectors are compile-time constants. The sums go from registers to their place: a copy would wait for
 * them, and hold up the next tile. */
INLINE void group_pass(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first, int rows,
                       int form, int from, int vectors, const struct fetch *ahead, float *out, int64_t stride) {
    const int64_t blocks = w->inputs / QBLOCK, bytes = bytes_of(form), numbers = g * blocks * GROUP;
    const int parts = parts_of(form), words = bits_of(form) == 8 ? 8 : 4, more = bits_of(form) - words;
    const int steps = parts * words, own_lines = bits_of(form) * vectors * WIDTH / LANES;
    const int64_t lines = ahead ? ahead->lines : 0; /* a pass over a half loads half of the lines */
    const int64_t line = lines * from / GROUP, last_line = lines * (from + vectors * WIDTH) / GROUP;
    const uint8_t *q = w->quants + (2 * g * blocks + from / LANES) * bytes;
    const uint16_t *s = w->scales + parts * numbers + from, *o = has_offsets(form) ? w->offsets + numbers + from : 0;
    const int8_t *xq = x->quants + first * x->inputs;
    const float *xs = x->scales + first * blocks, *xo = x->sums + first * blocks;
    const int32_t *xc = x->counts + first * blocks, *xf = x->firsts + first * blocks;
    floats acc[ROW_TILE][VECTORS];
    UNROLL_8 for (int t = 0; t < rows; t++) UNROLL_8 for (int v = 0; v < vectors; v++) acc[t][v] = splat(0.0f);
    for (int64_t k = 0; k < blocks; k++) {
        if (ahead) {
            for (int p = 0; p < parts; p++) __builtin_prefetch(ahead->scales + (parts * k + p) * GROUP);
            if (has_offsets(form)) __builtin_prefetch(ahead->offsets + k * GROUP);
        }
        UNROLL_8 for (int p = 0; p < parts; p++) { /* a part has words of its own, or half p of every byte */
            ints sum[ROW_TILE][VECTORS];
            int32_t count[ROW_TILE];
            UNROLL_8 for (int t = 0; t < rows; t++) {
                const int32_t whole = xc[t * blocks + k];
                count[t] = parts == 1 ? whole : p ? whole - xf[t * blocks + k] : xf[t * blocks + k];
                UNROLL_8 for (int v = 0; v < vectors; v++) sum[t][v] =
                    spread_ints(SUMS_BEGIN + SUM_START(form, count[t]));
            }
            UNROLL_8 for (int i = 0; i < words; i++) {
                ints four[ROW_TILE], later[ROW_TILE];
                /* Not all at once: the loads of the products would wait for them. */
                if (ahead && !p) {
                    fetch_line(ahead, k, line + i, last_line);
                    if (i < more) fetch_line(ahead, k, line + words + i, last_line);
                } else if (!ahead) {
                    fetch_lines(q + 2 * k * bytes, own_lines * (words * p + i) / steps,
                                own_lines * (words * p + i + 1) / steps, rows);
                }
                UNROLL_8 for (int t = 0; t < rows; t++) {
                    const int8_t *at = xq + t * x->inputs + k * QBLOCK + 4 * i;
                    four[t] = four_of(at + 16 * p);
                    if (in_nibbles(form) && parts == 1) later[t] = four_of(at + 16);
                }
                UNROLL_8 for (int v = 0; v < vectors; v++) {
                    const uint8_t *at = q + (2 * k + v * WIDTH / LANES) * bytes + v * WIDTH % LANES * 4;
                    const ints b = load_ints(at + LINE * i);
                    UNROLL_8 for (int t = 0; t < rows; t++) {
                        if (has_codes(form)) {
                            const void *table = form == OF_4_BIT_LEVELS ? (const void *)LEVELS : CODE_BYTES[form];
                            const ints low = looked_up(table, low_halves(b)), high = looked_up(table, high_halves(b));
                            sum[t][v] = form == OF_4_BIT_LEVELS
                                            ? dot_levels(dot_levels(sum[t][v], low, four[t]), high, later[t])
                                            : dot_two(sum[t][v], low, four[t], high, later[t]);
                        } else if (bits_of(form) == 6) {
                            sum[t][v] = dot_bytes(sum[t][v], six_bits(at + 3 * LINE * p, i), four[t]);
                        } else if (parts == 2) {
                            sum[t][v] = dot_bytes(sum[t][v], p ? high_halves(b) : low_halves(b), four[t]);
                        } else if (bits_of(form) == 5) {
                            const ints low = five_bits(at, i, 0), high = five_bits(at, i, 1);
                            sum[t][v] = dot_two(sum[t][v], low, four[t], high, later[t]);
                        } else if (in_nibbles(form)) {
                            sum[t][v] = dot_half(sum[t][v], low_halves(b), four[t]);
                            sum[t][v] = dot_half(sum[t][v], high_halves(b), later[t]);
                        } else {
                            sum[t][v] = dot_wide(sum[t][v], b, four[t]);
                        }
                    }
                }
            }
            UNROLL_8 for (int v = 0; v < vectors; v++) {
                const floats scale = half_floats(s + (parts * k + p) * GROUP + v * WIDTH);
                const floats whole = times(scale, splat(-WHOLE));
                UNROLL_8 for (int t = 0; t < rows; t++) {
                    const ints integer = whole_sum(sum[t][v], form, count[t]);
                    acc[t][v] = fused(scaled_sum(integer, scale, whole), splat(xs[t * blocks + k]), acc[t][v]);
                }
                if (has_offsets(form) && p == parts - 1) {
                    const floats offset = half_floats(o + k * GROUP + v * WIDTH);
                    UNROLL_8 for (int t = 0; t < rows; t++) acc[t][v] =
                        fused(offset, splat(xo[t * blocks + k]), acc[t][v]);
                }
            }
        }
    }
    UNROLL_8 for (int t = 0; t < rows; t++) UNROLL_8 for (int v = 0; v < vectors; v++) {
        if (w->bias) acc[t][v] = sum_floats(acc[t][v], load_floats(w->bias + g * GROUP + from + v * WIDTH));
        store_floats(out + t * stride + from + v * WIDTH, acc[t][v]);
    }
}

/* Outputs [GROUP g, GROUP (g + 1)). */
INLINE void group_tile(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first, int rows,
                       int form, const struct fetch *ahead, float *out, int64_t stride) {
    if (PASS(rows, form) == VECTORS) {
        group_pass(w, g, x, first, rows, form, 0, VECTORS, ahead, out, stride);
        return;
    }
    for (int from = 0; from < GROUP; from += LANES)
        group_pass(w, g, x, first, rows, form, from, VECTORS / 2, ahead, out, stride);
}
#endif

#if defined(__AVX512VNNI__)
/* The CPUs with a matrix unit have this one. */
#define HAS_TILES 1
#define STEP_ROWS (3 * TILE_ROWS) /* the most rows at once */
#include "amx.h"

#if !defined(TILES_FROM) /* a test may have tiles in every product */
#define TILES_FROM(w) ((w)->tile_rows)
#endif

INLINE int by_tiles(const struct block_weights *w, int64_t rows) {
    return __builtin_expect(TILES_FROM(w) != 0, 0) && rows >= TILES_FROM(w) && rows >= TILE_ROWS;
}
#else
#define HAS_TILES 0
#define STEP_ROWS ROW_TILE
#endif

/* At the end of a call, on each of its threads. */
INLINE void leave_products(void) {
#if HAS_TILES
    release_tiles();
#endif
}

#define OF_ROWS(n)                                                                                                     \
    case n:                                                                                                            \
        if (ahead->quants)                                                                                             \
            group_tile(w, g, x, first, n, form, ahead, out, stride);                                                   \
        else /* the numbers of what it loads are compile-time constants */                                             \
            group_tile(w, g, x, first, n, form, 0, out, stride);                                                       \
        break;

/* The same for up to ROW_TILE rows. */
INLINE void rows_tile(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first, int64_t rows,
                      int form, const struct fetch *ahead, float *out, int64_t stride) {
    switch (rows) {
        OF_ROWS(1)
        OF_ROWS(2)
#if ROW_TILE >= 4
        OF_ROWS(3)
        OF_ROWS(4)
#endif
#if ROW_TILE == 6
        OF_ROWS(5)
        OF_ROWS(6)
#endif
    }
}

/* A function for each form: of one that holds them all, the compiler would keep the sums in memory. */
typedef void rows_of_form(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first,
                          int64_t rows, const struct fetch *ahead, float *out, int64_t stride);
#define ROWS_OF(form)                                                                                                  \
    static __attribute__((noinline)) void rows_##form(const struct block_weights *w, int64_t g,                        \
                                                      const struct block_rows *x, int64_t first, int64_t rows,         \
                                                      const struct fetch *ahead, float *out, int64_t stride) {         \
        rows_tile(w, g, x, first, rows, form, ahead, out, stride);                                                     \
    }
EACH_FORM(ROWS_OF)

/* Outputs [GROUP g, GROUP (g + 1)) of as many rows as `tile_of` says. */
static void group_rows(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first,
                       int64_t rows, const struct fetch *ahead, float *out, int64_t stride) {
#define ENTRY(form) [form] = rows_##form,
    static rows_of_form *const of_forms[] = {EACH_FORM(ENTRY)};
#undef ENTRY
#if HAS_TILES
    if (rows > ROW_TILE) {
        group_of_tiles(w, g, x, first, rows, out, stride);
        return;
    }
#endif
    if (stride >= FAR_APART && rows > 1)
        for (int64_t at = 0; at < rows * stride; at += stride)
            for (int64_t i = 0; i < GROUP; i += LINE / 4) __builtin_prefetch(out + at + i, 1);
    of_forms[form_of(w)](w, g, x, first, rows, ahead, out, stride);
}

/* Before a loop of products of `rows` rows by such a matrix: `x` as they take it. If they are for tiles, the members lay out
 * the numbers of its first `all` rows by blocks, as a tile of rows reads them. Whoever passes `x` as it is multiplies without tiles. */
INLINE struct block_rows ready_rows(struct member *m, const struct block_weights *w, const struct block_rows *x,
                                    int64_t rows, int64_t all) {
    struct block_rows ready = *x;
#if HAS_TILES
    const int64_t blocks = x->inputs / QBLOCK;
    if (!by_tiles(w, rows)) return ready;
    TEAM_FOR(m, k, blocks) {
        float *scales = x->columns + k * x->room, *sums = scales + blocks * x->room;
        for (int64_t r = 0; r < all; r++) scales[r] = x->scales[r * blocks + k], sums[r] = x->sums[r * blocks + k];
    }
    ready.tiled = 1;
#endif
    (void)m;
    (void)w;
    (void)rows;
    (void)all;
    return ready;
}

INLINE int64_t groups_of(const struct block_weights *w) { return (w->outputs + GROUP - 1) / GROUP; }

#if HAS_TILES
/* The fewest rows that have a tile though they do not fill it: the vector unit takes longer for as many. With offsets it takes
 * longer only for more of them. */
INLINE int64_t least_in_tile(const struct block_weights *w) { return has_offsets(form_of(w)) ? 12 : 8; }
#endif

/* Rows of the next tile, or of the next tiles of a matrix unit, of the last `left` rows of a product, which has `at` rows before
 * them: a tile of few rows waits for its dot products, so the last two are about equal. */
INLINE int64_t tile_of(const struct block_weights *w, const struct block_rows *x, int64_t at, int64_t left) {
#if HAS_TILES
    if (x->tiled && by_tiles(w, at + left)) {
        if (left >= STEP_ROWS) return STEP_ROWS;
        if (left % TILE_ROWS >= least_in_tile(w)) return left;
        if (left >= TILE_ROWS) return left / TILE_ROWS * TILE_ROWS;
    }
#endif
    (void)w;
    (void)x;
    (void)at;
    if (left <= ROW_TILE) return left;
    return left < 2 * ROW_TILE ? (left + 1) / 2 : ROW_TILE;
}

/* What the tile of row r, of `rows` in all, starts to load. The first tile of a group would wait for memory, and the others
 * find the weights in a cache: so all of them share in loading group `next`, which comes afterwards, while they multiply. */
INLINE struct fetch fetch_of(const struct block_weights *w, int64_t r, int64_t rows, int64_t next) {
    const int64_t blocks = w->inputs / QBLOCK, bytes = 2 * bytes_of(form_of(w)), each = bytes / LINE;
    const int64_t tiles = (rows + ROW_TILE - 1) / ROW_TILE, tile = (r + ROW_TILE - 1) / ROW_TILE;
    const int64_t lines = (each + tiles - 1) / tiles;
    if (tiles == 1) return (struct fetch){0};
    return (struct fetch){.quants = w->quants + (next * bytes + tile * lines * LINE) * blocks,
                          .lines = tile * lines < each ? lines : 0,
                          .scales = w->scales + parts_of(form_of(w)) * next * blocks * GROUP,
                          .offsets = w->offsets ? w->offsets + next * blocks * GROUP : 0};
}

/* The group that a member probably multiplies after group g of `part`. */
INLINE int64_t after(const struct share *part, int64_t g) { return g + 1 < part->end ? g + 1 : part->follow; }

/* Group g of `rows` rows from `first` on, whole, as fp32 [rows][stride]. `at`: rows of the same product before them. `next`: the
 * group that the caller multiplies afterwards. */
INLINE void group_of_rows(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first,
                          int64_t at, int64_t rows, int64_t next, float *out, int64_t stride) {
    for (int64_t r = 0, n; r < rows; r += n) {
        n = tile_of(w, x, at + r, rows - r);
        const struct fetch ahead = fetch_of(w, r, rows, next);
        group_rows(w, g, x, first + r, n, &ahead, out + r * stride, stride);
    }
}

/* The same of rows [first, first + rows), for those columns that there are; row r goes to place[r], or to r where place is
 * null. */
INLINE void group_into(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first,
                       int64_t rows, int64_t next, float *out, int64_t stride, const int32_t *place) {
    const int64_t left = w->outputs - g * GROUP, count = left < GROUP ? left : GROUP;
    float y[STEP_ROWS][GROUP];
    if (count == GROUP && !place) {
        group_of_rows(w, g, x, first, first, rows, next, out + first * stride + g * GROUP, stride);
        return;
    }
    for (int64_t r = 0, n; r < rows; r += n) {
        n = tile_of(w, x, first + r, rows - r);
        const struct fetch ahead = fetch_of(w, r, rows, next);
        group_rows(w, g, x, first + r, n, &ahead, y[0], GROUP);
        for (int64_t t = first + r; t < first + r + n; t++)
            memcpy(out + (place ? place[t] : t) * stride + g * GROUP, y[t - first - r], (size_t)count * sizeof(float));
    }
}

/* Rows of `rows` that tiles multiply; the vector unit multiplies the others. */
INLINE int64_t rows_in_tiles(const struct block_weights *w, const struct block_rows *x, int64_t rows) {
    int64_t r = 0, n;
    for (; r < rows && (n = tile_of(w, x, r, rows - r)) > ROW_TILE; r += n) {
    }
    return r;
}

#define BYTES_BETWEEN (1 << 19) /* of weights that stay in L2 until the rows without a tile are multiplied */

/* The same of all rows and of the groups of `part`. A matrix unit that had nothing to do for some 900 cycles takes as many to
 * begin again, so the rows without a tile are multiplied after the tiles of several groups. */
INLINE void groups_into(const struct block_weights *w, const struct share *part, const struct block_rows *x,
                        int64_t rows, float *out, int64_t stride, const int32_t *place) {
    const int64_t in_tiles = rows_in_tiles(w, x, rows), first = in_tiles ? in_tiles : rows;
    const int64_t fit = BYTES_BETWEEN / (2 * bytes_of(form_of(w)) * (w->inputs / QBLOCK)), together = fit ? fit : 1;
    for (int64_t at = part->begin, to; at < part->end; at = to) {
        to = part->end - at < together ? part->end : at + together;
        for (int64_t g = at; g < to; g++) group_into(w, g, x, 0, first, after(part, g), out, stride, place);
        for (int64_t g = at; g < to && first < rows; g++)
            group_into(w, g, x, first, rows - first, after(part, g), out, stride, place);
    }
}

/* A product on its own: all rows are quantised before any member multiplies. */
static __attribute__((noinline)) void block_linear_body(struct member *m, void *context) {
    const struct block_linear_args *a = context;
    const struct block_weights *w = &a->weights;
    const struct block_rows plain = block_rows_at(a->scratch, a->rows, w->inputs);
    TEAM_FOR(m, r, a->rows)
    for (int64_t block = 0; block < w->inputs / QBLOCK; block++) {
        float part[QBLOCK];
        for (int64_t i = 0; i < QBLOCK; i += WIDTH)
            store_floats(part + i, load_lanes(a->x, r * w->inputs + block * QBLOCK + i, (int)a->bf16));
        quantise_blocks(part, QBLOCK, 1, &plain, r, block, 0);
    }
    const struct block_rows x = ready_rows(m, w, &plain, a->rows, a->rows);
    if (!a->bf16) {
        TEAM_FOR_RANGES(m, part, groups_of(w))
        groups_into(w, &part, &x, a->rows, a->out, w->outputs, 0);
        leave_products();
        return;
    }
    TEAM_FOR_RANGES(m, part, groups_of(w)) for (int64_t g = part.begin; g < part.end; g++) {
        const int64_t left = w->outputs - g * GROUP, count = left < GROUP ? left : GROUP;
        float y[STEP_ROWS][GROUP];
        for (int64_t r = 0, n; r < a->rows; r += n) {
            n = tile_of(w, &x, r, a->rows - r);
            const struct fetch ahead = fetch_of(w, r, a->rows, after(&part, g));
            group_rows(w, g, &x, r, n, &ahead, y[0], GROUP);
            for (int64_t t = 0; t < n; t++)
                for (int64_t i = 0; i < count; i++) store1(a->out, (r + t) * w->outputs + g * GROUP + i, y[t][i], 1);
        }
    }
    leave_products();
}

void VARIANT(lockstep_block_linear)(const struct block_linear_args *a) {
    team_run(block_linear_body, (void *)(intptr_t)a);
}

/* The same on the calling thread only, which starts no other. */
void VARIANT(lockstep_block_linear_alone)(const struct block_linear_args *a) {
    struct member alone = {.alone = 1, .chunks = 1, .threads = 1};
    block_linear_body(&alone, (void *)(intptr_t)a);
}

#endif
