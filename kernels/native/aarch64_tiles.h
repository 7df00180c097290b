/* Products over blocks of a few rows on aarch64: dot products of bytes, and products of byte matrices (i8mm).
 *
 * `sdot` adds four products to each of four sums: four outputs of one row. `usmmla` adds eight to each: two outputs of two
 * rows. Both read the weights as they are packed (see blocks.h). For `usmmla`, the words of two neighbouring vectors are
 * interleaved, which makes eight inputs of an output neighbours. Integer sums are exact, and the fused operations on a
 * block's sums have the order of group_tile in blocks.h, so both have the bits of the other units.
 *
 * A pass over the blocks holds the sums of as many outputs as 32 registers take, so more rows need more passes over a group.
 * A panel of blocks stays in the first cache for its passes.
 */
#ifndef LOCKSTEP_AARCH64_TILES_H
#define LOCKSTEP_AARCH64_TILES_H

#define VECTOR 4        /* outputs of a register */
#define VECTORS 8       /* of a group */
#define PANEL_BLOCKS 32 /* 32 KB of weights of 8 bits */

#define UNROLL_4 _Pragma("GCC unroll 4")

/* A group's blocks [begin, end) of some rows, and where their sums are kept between panels. */
struct tile_place {
    const uint8_t *quants;
    const uint16_t *scales, *offsets;
    const int8_t *rows; /* of the first row, as are the other three */
    const float *row_scales, *row_sums;
    const int32_t *row_counts;
    int64_t inputs, begin, end;
    float (*acc)[GROUP];
};

INLINE float32x4_t halves_at(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

/* Add a block's sums of one row to its outputs. */
INLINE float32x4_t add_block(float32x4_t acc, int32x4_t sum, float32x4_t scale, float row_scale) {
    return vfmaq_n_f32(acc, vmulq_f32(vcvtq_f32_s32(sum), scale), row_scale);
}

INLINE void load_acc(const struct tile_place *p, int rows, int from, int vectors, float32x4_t acc[][VECTORS]) {
    UNROLL_4 for (int t = 0; t < rows; t++) UNROLL_8 for (int v = 0; v < vectors; v++) acc[t][v] =
        vld1q_f32(p->acc[t] + from + VECTOR * v);
}

INLINE void store_acc(const struct tile_place *p, int rows, int from, int vectors, float32x4_t acc[][VECTORS]) {
    UNROLL_4 for (int t = 0; t < rows; t++) UNROLL_8 for (int v = 0; v < vectors; v++)
        vst1q_f32(p->acc[t] + from + VECTOR * v, acc[t][v]);
}

/* The hardware's own prefetch begins anew at every page. */
INLINE void fetch_ahead(const uint8_t *q, int64_t bytes) {
    for (int64_t line = 0; line < 2 * bytes; line += 64) __builtin_prefetch(q + FETCH_AHEAD + line);
}

#define HALVES_START(count) (-MIDDLE * (count))
#if defined(__ARM_FEATURE_MATMUL_INT8)
/* Unsigned bytes of weights, WIDE_ABOVE or FLOATS_ABOVE too large: the sums begin with what that adds. */
#define DOT(sum, w, x, lane) vusdotq_laneq_s32(sum, w, x, lane)
#define WIDE_START(count) (-WIDE_ABOVE * (count))
#define FLOATS_START(count) (-FLOATS_ABOVE * (count))
#define CODE_TABLE CODE_BYTES
INLINE uint8x16_t wide(const uint8_t *p) { return vld1q_u8(p); }
#else
#define DOT(sum, w, x, lane) vdotq_laneq_s32(sum, vreinterpretq_s8_u8(w), x, lane)
#define WIDE_START(count) (0 * (count))
#define FLOATS_START(count) (0 * (count))
#define CODE_TABLE CODE_VALUES
INLINE uint8x16_t wide(const uint8_t *p) { return veorq_u8(vld1q_u8(p), vdupq_n_u8(128)); }
#endif

/* The bytes that 4 bits of each weight stand for. */
INLINE uint8x16_t half_bytes(uint8x16_t codes, int form) {
    return has_codes(form) ? vqtbl1q_u8(vld1q_u8((const uint8_t *)CODE_TABLE[form]), codes) : codes;
}
INLINE uint8x16_t low_bytes(uint8x16_t both, int form) { return half_bytes(vandq_u8(both, vdupq_n_u8(15)), form); }
INLINE uint8x16_t high_bytes(uint8x16_t both, int form) { return half_bytes(vshrq_n_u8(both, 4), form); }

/* Outputs [from, from + 4 vectors) of `rows` rows by dot products. */
INLINE void dot_pass(const struct tile_place *p, int rows, int form, int from, int vectors) {
    const int64_t blocks = p->inputs / QBLOCK, bytes = bytes_of(form);
    float32x4_t acc[ROW_TILE][VECTORS];
    load_acc(p, rows, from, vectors, acc);
    for (int64_t k = p->begin; k < p->end; k++) {
        int8x16_t x[ROW_TILE][2];
        int32x4_t sum[ROW_TILE][VECTORS];
        const uint8_t *q = p->quants + 2 * k * bytes;
        if (!from) fetch_ahead(q, bytes);
        UNROLL_4 for (int t = 0; t < rows; t++) {
            x[t][0] = vld1q_s8(p->rows + t * p->inputs + k * QBLOCK);
            x[t][1] = vld1q_s8(p->rows + t * p->inputs + k * QBLOCK + 16);
            UNROLL_8 for (int v = 0; v < vectors; v++) sum[t][v] =
                vdupq_n_s32(SUM_START(form, p->row_counts[t * blocks + k]));
        }
#define WORD(half, lane)                                                                                               \
    UNROLL_8 for (int v = 0; v < vectors; v++) {                                                                       \
        const int output = from + VECTOR * v;                                                                          \
        const uint8_t *at = q + output / LANES * bytes + output % LANES * 4 + (4 * half + lane) * 64;                  \
        if (has_4_bits(form)) {                                                                                        \
            const uint8x16_t both = vld1q_u8(at), low = low_bytes(both, form), high = high_bytes(both, form);          \
            UNROLL_4 for (int t = 0; t < rows; t++) sum[t][v] = DOT(sum[t][v], low, x[t][0], lane);                    \
            UNROLL_4 for (int t = 0; t < rows; t++) sum[t][v] = DOT(sum[t][v], high, x[t][1], lane);                   \
        } else {                                                                                                       \
            const uint8x16_t w = wide(at);                                                                             \
            UNROLL_4 for (int t = 0; t < rows; t++) sum[t][v] = DOT(sum[t][v], w, x[t][half], lane);                   \
        }                                                                                                              \
    }
        WORD(0, 0);
        WORD(0, 1);
        WORD(0, 2);
        WORD(0, 3);
        if (!has_4_bits(form)) {
            WORD(1, 0);
            WORD(1, 1);
            WORD(1, 2);
            WORD(1, 3);
        }
#undef WORD
        UNROLL_8 for (int v = 0; v < vectors; v++) {
            const int64_t number = k * GROUP + from + VECTOR * v;
            const float32x4_t scale = halves_at(p->scales + number);
            UNROLL_4 for (int t = 0; t < rows; t++) acc[t][v] =
                add_block(acc[t][v], sum[t][v], scale, p->row_scales[t * blocks + k]);
            if (!has_offsets(form)) continue;
            const float32x4_t offset = halves_at(p->offsets + number);
            UNROLL_4 for (int t = 0; t < rows; t++) acc[t][v] =
                vfmaq_n_f32(acc[t][v], offset, p->row_sums[t * blocks + k]);
        }
    }
    store_acc(p, rows, from, vectors, acc);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
INLINE uint8x16_t low_words(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}
INLINE uint8x16_t high_words(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}

/* Eight bytes of each of two rows, twice: the inputs of two products. */
INLINE void pair_rows(const int8_t *a, const int8_t *b, int8x16_t x[2]) {
    const int64x2_t of_a = vreinterpretq_s64_s8(vld1q_s8(a)), of_b = vreinterpretq_s64_s8(vld1q_s8(b));
    x[0] = vreinterpretq_s8_s64(vzip1q_s64(of_a, of_b));
    x[1] = vreinterpretq_s8_s64(vzip2q_s64(of_a, of_b));
}

/* The same by products of matrices, for two rows and more; the last of an odd number is paired with itself.
 *
 * A sum has output n of both rows, then output n + 1 of both; sum[pair][2 v] and sum[pair][2 v + 1] are four outputs. */
INLINE void matrix_pass(const struct tile_place *p, int rows, int form, int from, int vectors) {
    const int64_t blocks = p->inputs / QBLOCK, bytes = bytes_of(form);
    const int pairs = (rows + 1) / 2;
    float32x4_t acc[ROW_TILE][VECTORS];
    load_acc(p, rows, from, vectors, acc);
    for (int64_t k = p->begin; k < p->end; k++) {
        int8x16_t x[ROW_TILE / 2][4];
        int32x4_t sum[ROW_TILE / 2][VECTORS];
        const uint8_t *q = p->quants + 2 * k * bytes;
        if (!from) fetch_ahead(q, bytes);
        UNROLL_4 for (int i = 0; i < pairs; i++) {
            const int one = 2 * i, other = one + 1 < rows ? one + 1 : one;
            const int8_t *a = p->rows + one * p->inputs + k * QBLOCK, *b = p->rows + other * p->inputs + k * QBLOCK;
            const int32_t *counts = p->row_counts + k;
            const int32x2_t start = {SUM_START(form, counts[one * blocks]), SUM_START(form, counts[other * blocks])};
            pair_rows(a, b, x[i]);
            pair_rows(a + 16, b + 16, x[i] + 2);
            UNROLL_8 for (int v = 0; v < 2 * vectors; v++) sum[i][v] = vcombine_s32(start, start);
        }
        UNROLL_4 for (int j = 0; j < bytes / 128; j++) UNROLL_8 for (int v = 0; v < vectors; v++) {
            const int output = from + VECTOR * v;
            const uint8_t *at = q + output / LANES * bytes + output % LANES * 4 + j * 128;
            const uint8x16_t a = vld1q_u8(at), b = vld1q_u8(at + 64);
            const uint8x16_t w[2] = {low_words(a, b), high_words(a, b)};
            UNROLL_4 for (int h = 0; h < 2; h++) {
                const uint8x16_t low = has_4_bits(form) ? low_bytes(w[h], form) : w[h];
                UNROLL_4 for (int i = 0; i < pairs; i++) sum[i][2 * v + h] =
                    vusmmlaq_s32(sum[i][2 * v + h], low, x[i][j]);
                if (!has_4_bits(form)) continue;
                const uint8x16_t high = high_bytes(w[h], form);
                UNROLL_4 for (int i = 0; i < pairs; i++) sum[i][2 * v + h] =
                    vusmmlaq_s32(sum[i][2 * v + h], high, x[i][j + 2]);
            }
        }
        UNROLL_8 for (int v = 0; v < vectors; v++) {
            const int64_t number = k * GROUP + from + VECTOR * v;
            const float32x4_t scale = halves_at(p->scales + number);
            UNROLL_4 for (int t = 0; t < rows; t++) {
                const int32x4_t a = sum[t / 2][2 * v], b = sum[t / 2][2 * v + 1];
                acc[t][v] = add_block(acc[t][v], t % 2 ? vuzp2q_s32(a, b) : vuzp1q_s32(a, b), scale,
                                      p->row_scales[t * blocks + k]);
            }
            if (!has_offsets(form)) continue;
            const float32x4_t offset = halves_at(p->offsets + number);
            UNROLL_4 for (int t = 0; t < rows; t++) acc[t][v] =
                vfmaq_n_f32(acc[t][v], offset, p->row_sums[t * blocks + k]);
        }
    }
    store_acc(p, rows, from, vectors, acc);
}
#endif

/* Outputs [GROUP g, GROUP (g + 1)) of `rows` rows from `first` on, into rows of `out`; rows and form are compile-time
 * constants. Each pass loads ahead only what it reads itself. */
INLINE void group_tile(const struct block_weights *w, int64_t g, const struct block_rows *x, int64_t first, int rows,
                       int form, const struct fetch *ahead, float *out, int64_t stride) {
    (void)ahead;
    const int64_t blocks = w->inputs / QBLOCK, bytes = bytes_of(form);
    const int vectors = rows == 1 ? 8 : rows == 2 ? 4 : 2;
    float acc[ROW_TILE][GROUP] = {{0}};
    struct tile_place place = {.quants = w->quants + 2 * g * blocks * bytes,
                               .scales = w->scales + g * blocks * GROUP,
                               .offsets = has_offsets(form) ? w->offsets + g * blocks * GROUP : 0,
                               .rows = x->quants + first * x->inputs,
                               .row_scales = x->scales + first * blocks,
                               .row_sums = x->sums + first * blocks,
                               .row_counts = x->counts + first * blocks,
                               .inputs = w->inputs,
                               .acc = acc};
    for (; place.begin < blocks; place.begin = place.end) {
        place.end = blocks - place.begin < PANEL_BLOCKS ? blocks : place.begin + PANEL_BLOCKS;
        for (int from = 0; from < GROUP; from += VECTOR * vectors) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
            if (rows > 1) {
                matrix_pass(&place, rows, form, from, vectors);
                continue;
            }
#endif
            dot_pass(&place, rows, form, from, vectors);
        }
    }
    UNROLL_4 for (int t = 0; t < rows; t++) for (int n = 0; n < GROUP; n += VECTOR) {
        const float32x4_t y = vld1q_f32(acc[t] + n);
        vst1q_f32(out + t * stride + n, w->bias ? vaddq_f32(y, vld1q_f32(w->bias + g * GROUP + n)) : y);
    }
}

#endif
