/* Products over blocks of many rows on x86-64's matrix unit (AMX), with the bits of the unit that includes this (see blocks.h).
 *
 * A tile multiplies 16 rows of activations by 16 outputs over one block of 32 inputs, or over one of its two parts; rows that
 * fill no tile are left to the vector unit. The sums are integers and hence exact; they go through memory into the same fused
 * operations, in the same order, as group_tile's. The packed weights are shared with the other units: four neighbouring
 * inputs of 16 outputs are a row of 64 bytes here as there. They are made signed bytes in L1 once for all rows of a call.
 *
 * Each thread configures its own tiles when its first product needs them, and releases them at the end of the call: tiles in
 * use make a context switch 8 KB dearer. Not responsible for: the permission to use tiles (see amx.c), and from how many rows
 * on they pay (see kernels/matrix_unit.py).
 */
#ifndef LOCKSTEP_AMX_H
#define LOCKSTEP_AMX_H

#include "tiles.h"

#define TILE_ROWS 16    /* of activations */
#define TILE_BYTES 512  /* of a block of 16 outputs, a byte for each weight */
#define PANEL_BLOCKS 32 /* the most that are unpacked at once: 16 KB, and 4 KB of the rows' numbers */

#define UNROLL_16 _Pragma("GCC unroll 16")

static __thread int64_t configured_inputs; /* of this thread's tiles; 0: it has none */

/* Tiles 0 and 1 are sums, 2 and 3 activations, 4 and 5 weights. */
static void configure_tiles(int64_t inputs) {
    if (configured_inputs == inputs) return;
    struct tile_config config = {.palette = 1};
    for (int t = 0; t < 6; t++) {
        config.rows[t] = (uint8_t)(t < 4 ? TILE_ROWS : inputs / 4);
        config.bytes[t] = (uint16_t)(t < 2 || t > 3 ? 64 : inputs);
    }
    TILE_CONFIGURE(&config);
    configured_inputs = inputs;
}

static void release_tiles(void) {
    if (!configured_inputs) return;
    TILE_RELEASE();
    configured_inputs = 0;
}

/* A block of 16 outputs as signed bytes, 8 rows of 64: row j has inputs 4 j to 4 j + 3. */
INLINE void unpack_block(const uint8_t *q, int form, uint8_t *unpacked) {
    const int bits = bits_of(form), words = in_nibbles(form) ? 4 : 8, middle = middle_of(form);
    for (int64_t line = 0; line < bytes_of(form); line += LINE) __builtin_prefetch(q + FETCH_AHEAD + line);
    UNROLL_8 for (int i = 0; i < words; i++) {
        ints low, high;
        if (bits == 6) {
            low = six_bits(q + i / 4 * 3 * LINE, i % 4);
        } else {
            const ints w = load_ints(q + LINE * i);
            low = bits == 8 ? signed_bytes(w) : bits == 5 ? five_bits(q, i, 0) : low_halves(w);
            high = bits == 5 ? five_bits(q, i, 1) : high_halves(w);
        }
        if (middle) low = plus_bytes(low, -middle);
        if (middle && in_nibbles(form)) high = plus_bytes(high, -middle);
        if (has_codes(form)) low = looked_up(CODE_VALUES[form], low), high = looked_up(CODE_VALUES[form], high);
        memcpy(unpacked + LINE * i, &low, sizeof low);
        if (in_nibbles(form)) memcpy(unpacked + TILE_BYTES / 2 + LINE * i, &high, sizeof high);
    }
}

typedef ints tile_sums[TILE_ROWS];

/* One half of a group over some blocks: where the numbers begin of its 16 outputs, and of the tile's first row. */
struct panel_place {
    uint8_t (*panel)[TILE_BYTES];
    const uint8_t *weights;  /* every second block; null: the panel is unpacked */
    const uint16_t *scales;  /* [block][part][GROUP] */
    const uint16_t *offsets; /* [block][GROUP] */
    const int8_t *quants;    /* [row][block][32] */
    /* [row][PANEL_BLOCKS] */
    const float *row_scales, *row_sums;
    int64_t inputs, count; /* blocks */
};

/* Add the products of part k, of the parts of all blocks, whose sums are in memory. While tiles are in use, port 5 takes no fused
 * operation and no conversion, and these are what a product waits for; so the sums begin with WHOLE_BITS. */
INLINE void add_block(const struct panel_place *p, int64_t k, tile_sums sums, int form, floats *acc) {
    const floats scale = half_floats(p->scales + k * GROUP), whole = times(scale, splat(-WHOLE));
    const int64_t block = k / parts_of(form);
    const float *row_scales = p->row_scales + block, *row_sums = p->row_sums + block;
    /* One register and a constant each: with a second register, a fused operation and its load are not one. */
    __asm__("" : "+r"(row_scales), "+r"(row_sums));
    UNROLL_16 for (int t = 0; t < TILE_ROWS; t++) {
        const floats scaled = scaled_sum(sums[t], scale, whole);
        acc[t] = fused(scaled, splat(row_scales[t * PANEL_BLOCKS]), acc[t]);
    }
    if (has_offsets(form) && (k + 1) % parts_of(form) == 0) {
        const floats offset = half_floats(p->offsets + block * GROUP);
        UNROLL_16 for (int t = 0; t < TILE_ROWS; t++) acc[t] = fused(offset, splat(row_sums[t * PANEL_BLOCKS]), acc[t]);
    }
}

/* Add the products of a panel to `acc` [16][16]; form is a compile-time constant. While two blocks (or parts) are
 * added up, the tiles of the next two are under way, and the two after them are unpacked by the first tile. */
INLINE void panel_tile(const struct panel_place *p, int form, float *acc_memory) {
    static const int32_t begin[LANES] __attribute__((aligned(64))) = {[0 ... LANES - 1] = WHOLE_BITS};
    const int64_t parts = parts_of(form), bytes = 2 * bytes_of(form), count = p->count * parts;
    const int64_t inputs = QBLOCK / parts, tile_bytes = TILE_BYTES / parts; /* of a part */
    tile_sums sums[2] __attribute__((aligned(64)));
    floats acc[TILE_ROWS];
#define UNPACK(k)                                                                                                      \
    do {                                                                                                               \
        if (!p->weights || (k) >= count || (k) % parts) break;                                                         \
        unpack_block(p->weights + (k) / parts * bytes, form, p->panel[(k) / parts]);                                   \
    } while (0)
#define MULTIPLY(t, a, b, k)                                                                                           \
    do {                                                                                                               \
        if ((k) >= count) break;                                                                                       \
        TILE_LOAD(t, begin, 0);                                                                                        \
        TILE_LOAD(a, p->quants + (k) * inputs, p->inputs);                                                             \
        TILE_LOAD(b, p->panel[0] + (k) * tile_bytes, 64);                                                              \
        TILE_DOT(t, a, b);                                                                                             \
    } while (0)
#define KEEP(t, k)                                                                                                     \
    do {                                                                                                               \
        if ((k) < count) TILE_STORE(t, sums[t], 64);                                                                   \
    } while (0)
    for (int64_t k = 0; k < 4; k++) UNPACK(k);
    MULTIPLY(0, 2, 4, 0);
    MULTIPLY(1, 3, 5, 1);
    KEEP(0, 0);
    KEEP(1, 1);
    UNROLL_16 for (int t = 0; t < TILE_ROWS; t++) acc[t] = load_floats(acc_memory + t * LANES);
    for (int64_t k = 0; k < count; k += 2) {
        MULTIPLY(0, 2, 4, k + 2);
        MULTIPLY(1, 3, 5, k + 3);
        UNPACK(k + 4);
        add_block(p, k, sums[0], form, acc);
        KEEP(0, k + 2);
        UNPACK(k + 5);
        if (k + 1 < count) add_block(p, k + 1, sums[1], form, acc);
        KEEP(1, k + 3);
    }
#undef UNPACK
#undef MULTIPLY
#undef KEEP
    UNROLL_16 for (int t = 0; t < TILE_ROWS; t++) store_floats(acc_memory + t * LANES, acc[t]);
}

#define PANEL_OF(form)                                                                                                 \
    static __attribute__((noinline)) void panel_##form(const struct panel_place *p, float *acc) {                      \
        panel_tile(p, form, acc);                                                                                      \
    }
EACH_FORM(PANEL_OF)

/* Outputs [GROUP g, GROUP (g + 1)) of `rows` rows from `first` on: whole tiles, up to STEP_ROWS rows. */
static __attribute__((noinline)) void group_of_tiles(const struct block_weights *w, int64_t g,
                                                     const struct block_rows *x, int64_t first, int64_t rows,
                                                     float *out, int64_t stride) {
#define ENTRY(form) [form] = panel_##form,
    static void (*const of_forms[])(const struct panel_place *, float *) = {EACH_FORM(ENTRY)};
#undef ENTRY
    const int form = form_of(w);
    const int64_t blocks = w->inputs / QBLOCK, bytes = bytes_of(form), parts = parts_of(form);
    const int64_t tiles = rows / TILE_ROWS;
    /* About equal panels: the first sums of a panel are waited for. */
    const int64_t panels = (blocks + PANEL_BLOCKS - 1) / PANEL_BLOCKS, most = (blocks + panels - 1) / panels;
    uint8_t panel[PANEL_BLOCKS][TILE_BYTES] __attribute__((aligned(64)));
    float acc[STEP_ROWS / TILE_ROWS][TILE_ROWS][LANES] __attribute__((aligned(64)));
    float row_scales[TILE_ROWS][PANEL_BLOCKS], row_sums[TILE_ROWS][PANEL_BLOCKS];
    configure_tiles(QBLOCK / parts);
    for (int64_t half = 0; half < GROUP / LANES; half++) {
        memset(acc, 0, (size_t)tiles * sizeof acc[0]);
        for (int64_t k = 0; k < blocks; k += most)
            for (int64_t i = 0; i < tiles; i++) {
                const int64_t row = first + i * TILE_ROWS, numbers = (g * blocks + k) * GROUP;
                /* At one distance for every matrix, so that a place in them is a constant. What is copied after a row's last
                 * block is not used; it is still within the rows' memory (see block_rows_at). */
                for (int64_t t = 0; t < TILE_ROWS; t++) {
                    memcpy(row_scales[t], x->scales + (row + t) * blocks + k, sizeof row_scales[t]);
                    memcpy(row_sums[t], x->sums + (row + t) * blocks + k, sizeof row_sums[t]);
                }
                const struct panel_place place = {.panel = panel,
                                                  .weights = i ? 0 : w->quants + (2 * (g * blocks + k) + half) * bytes,
                                                  .scales = w->scales + parts * numbers + half * LANES,
                                                  .offsets =
                                                      has_offsets(form) ? w->offsets + numbers + half * LANES : 0,
                                                  .quants = x->quants + row * x->inputs + k * QBLOCK,
                                                  .row_scales = row_scales[0],
                                                  .row_sums = row_sums[0],
                                                  .inputs = w->inputs,
                                                  .count = blocks - k < most ? blocks - k : most};
                of_forms[form](&place, acc[i][0]);
            }
        for (int64_t i = 0; i < tiles; i++)
            for (int64_t t = 0; t < TILE_ROWS; t++) {
                floats y = load_floats(acc[i][t]);
                if (w->bias) y += load_floats(w->bias + g * GROUP + half * LANES);
                store_floats(out + (i * TILE_ROWS + t) * stride + half * LANES, y);
            }
    }
}

#endif
