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
    const int8_t *rows; /* of the first row, as are the other four */
    const float *row_scales, *row_sums;
    const int32_t *row_counts, *row_firsts;
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
INLINE void fetch_ahead(const uint8_t *q, int64_t bytes, int rows) {
    for (int64_t line = 0; line < 2 * bytes; line += 64) __builtin_prefetch(q + FETCH_AHEAD(rows) + line);
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

INLINE uint8x16_t masked_bits(uint8x16_t x, int up, uint8_t mask) {
    return vandq_u8(vshlq_u8(x, vdupq_n_s8((int8_t)up)), vdupq_n_u8(mask));
}

/* The bytes of the inputs 4 word + i of a block, word 0 to 7; `block`: of these outputs. */
INLINE uint8x16_t word_bytes(const uint8_t *block, int form, int word) {
    const int bits = bits_of(form), half = word / 4, of_half = word % 4;
    if (bits == 8) return wide(block + 64 * word);
    if (bits < 6) {
        const uint8x16_t both = vld1q_u8(block + 64 * (of_half + bits - 4)); /* the fifth bits come first */
        const uint8x16_t nibble = half ? high_bytes(both, form) : low_bytes(both, form);
        if (bits == 4) return nibble;
        return vorrq_u8(nibble, masked_bits(vld1q_u8(block), 4 - (2 * of_half + half), 0x10));
    }
    const uint8_t *part = block + half * 3 * 64; /* three words have 6 bits each, and two of the fourth */
    if (of_half < 3) return masked_bits(vld1q_u8(part + 64 * of_half), 0, 0x3f);
    return vorrq_u8(vorrq_u8(masked_bits(vld1q_u8(part), -6, 0x03), masked_bits(vld1q_u8(part + 64), -4, 0x0c)),
                    masked_bits(vld1q_u8(part + 2 * 64), -2, 0x30));
}

/* What the sums of a row's block begin with: of all inputs, or of either half. */
INLINE void sum_starts(const struct tile_place *p, int form, int64_t number, int32_t start[2]) {
    const int32_t count = p->row_counts[number], first = parts_of(form) == 2 ? p->row_firsts[number] : count;
    start[0] = SUM_START(form, first);
    start[1] = SUM_START(form, count - first);
}

/* Outputs [from, from + 4 vectors) of `rows` rows by dot products. */
INLINE void dot_pass(const struct tile_place *p, int rows, int form, int from, int vectors) {
    const int64_t blocks = p->inputs / QBLOCK, bytes = bytes_of(form);
    const int parts = parts_of(form);
    float32x4_t acc[ROW_TILE][VECTORS];
    load_acc(p, rows, from, vectors, acc);
    for (int64_t k = p->begin; k < p->end; k++) {
        int8x16_t x[ROW_TILE][2];
        int32x4_t sum[2][ROW_TILE][VECTORS]; /* of a block in parts: of either half */
        const uint8_t *q = p->quants + 2 * k * bytes;
        if (!from) fetch_ahead(q, bytes, rows);
        UNROLL_4 for (int t = 0; t < rows; t++) {
            int32_t start[2];
            sum_starts(p, form, t * blocks + k, start);
            x[t][0] = vld1q_s8(p->rows + t * p->inputs + k * QBLOCK);
            x[t][1] = vld1q_s8(p->rows + t * p->inputs + k * QBLOCK + 16);
            UNROLL_4 for (int h = 0; h < parts; h++) UNROLL_8 for (int v = 0; v < vectors; v++) sum[h][t][v] =
                vdupq_n_s32(start[h]);
        }
#define WORD(half, lane)                                                                                               \
    UNROLL_8 for (int v = 0; v < vectors; v++) {                                                                       \
        const int output = from + VECTOR * v;                                                                          \
        const uint8x16_t w = word_bytes(q + output / LANES * bytes + output % LANES * 4, form, 4 * half + lane);       \
        int32x4_t(*to)[VECTORS] = sum[parts == 2 ? half : 0];                                                          \
        UNROLL_4 for (int t = 0; t < rows; t++) to[t][v] = DOT(to[t][v], w, x[t][half], lane);                         \
    }
        WORD(0, 0);
        WORD(0, 1);
        WORD(0, 2);
        WORD(0, 3);
        WORD(1, 0);
        WORD(1, 1);
        WORD(1, 2);
        WORD(1, 3);
#undef WORD
        UNROLL_8 for (int v = 0; v < vectors; v++) {
            const int64_t number = k * GROUP + from + VECTOR * v;
            UNROLL_4 for (int h = 0; h < parts; h++) {
                const float32x4_t scale = halves_at(p->scales + (parts * k + h) * GROUP + from + VECTOR * v);
                UNROLL_4 for (int t = 0; t < rows; t++) acc[t][v] =
                    add_block(acc[t][v], sum[h][t][v], scale, p->row_scales[t * blocks + k]);
            }
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
    const int pairs = (rows + 1) / 2, parts = parts_of(form);
    float32x4_t acc[ROW_TILE][VECTORS];
    load_acc(p, rows, from, vectors, acc);
    for (int64_t k = p->begin; k < p->end; k++) {
        int8x16_t x[ROW_TILE / 2][4];
        int32x4_t sum[2][ROW_TILE / 2][VECTORS];
        const uint8_t *q = p->quants + 2 * k * bytes;
        if (!from) fetch_ahead(q, bytes, rows);
        UNROLL_4 for (int i = 0; i < pairs; i++) {
            const int one = 2 * i, other = one + 1 < rows ? one + 1 : one;
            const int8_t *a = p->rows + one * p->inputs + k * QBLOCK, *b = p->rows + other * p->inputs + k * QBLOCK;
            int32_t of_one[2], of_other[2];
            sum_starts(p, form, one * blocks + k, of_one);
            sum_starts(p, form, other * blocks + k, of_other);
            pair_rows(a, b, x[i]);
            pair_rows(a + 16, b + 16, x[i] + 2);
            UNROLL_4 for (int h = 0; h < parts; h++) {
                const int32x2_t start = {of_one[h], of_other[h]};
                UNROLL_8 for (int v = 0; v < 2 * vectors; v++) sum[h][i][v] = vcombine_s32(start, start);
            }
        }
        UNROLL_4 for (int j = 0; j < 4; j++) UNROLL_8 for (int v = 0; v < vectors; v++) {
            const int output = from + VECTOR * v;
            const uint8_t *block = q + output / LANES * bytes + output % LANES * 4;
            const uint8x16_t a = word_bytes(block, form, 2 * j), b = word_bytes(block, form, 2 * j + 1);
            const uint8x16_t w[2] = {low_words(a, b), high_words(a, b)};
            int32x4_t(*to)[VECTORS] = sum[parts == 2 ? j / 2 : 0];
            UNROLL_4 for (int h = 0; h < 2; h++) UNROLL_4 for (int i = 0; i < pairs; i++) to[i][2 * v + h] =
                vusmmlaq_s32(to[i][2 * v + h], w[h], x[i][j]);
        }
        UNROLL_8 for (int v = 0; v < vectors; v++) {
            const int64_t number = k * GROUP + from + VECTOR * v;
            UNROLL_4 for (int h = 0; h < parts; h++) {
                const float32x4_t scale = halves_at(p->scales + (parts * k + h) * GROUP + from + VECTOR * v);
                UNROLL_4 for (int t = 0; t < rows; t++) {
                    const int32x4_t a = sum[h][t / 2][2 * v], b = sum[h][t / 2][2 * v + 1];
                    acc[t][v] = add_block(acc[t][v], t % 2 ? vuzp2q_s32(a, b) : vuzp1q_s32(a, b), scale,
                                          p->row_scales[t * blocks + k]);
                }
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
                               .scales = w->scales + parts_of(form) * g * blocks * GROUP,
                               .offsets = has_offsets(form) ? w->offsets + g * blocks * GROUP : 0,
                               .rows = x->quants + first * x->inputs,
                               .row_scales = x->scales + first * blocks,
                               .row_sums = x->sums + first * blocks,
                               .row_counts = x->counts + first * blocks,
                               .row_firsts = x->firsts + first * blocks,
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
