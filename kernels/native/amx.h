/* Products over blocks of many rows on x86-64's matrix unit (AMX), with the bits of the unit that includes this (see blocks.h).
 *
 * A tile multiplies 16 rows of activations by 16 outputs over one block of 32 inputs, or over one of its two parts; few rows
 * that fill no tile are left to the vector unit (see tile_of). The sums are integers and hence exact; they go through memory
 * into the same fused operations, in the same order, as group_tile's. The packed weights are shared with the other units: four
 * neighbouring inputs of 16 outputs are a row of 64 bytes here as there. A panel of them is made signed bytes in L1, for up to
 * STEP_ROWS rows.
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
#define PANEL_BLOCKS 18 /* the most that are unpacked at once: 9 KB */

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

/* A panel of 16 outputs, and a tile of rows. */
struct panel_place {
    const uint8_t *panel;               /* [block][TILE_BYTES] */
    const uint16_t *scales;             /* [block][part][GROUP] */
    const uint16_t *offsets;            /* [block][GROUP] */
    const int8_t *quants;               /* [row][block][32] */
    const float *row_scales, *row_sums; /* [block][room] */
    int64_t room, inputs;
    int64_t count; /* blocks */
    float *out;    /* [row][stride]: reads the sums of the panels before this one, and writes those that include it */
    int64_t stride;
    const float *bias; /* of the outputs, where this panel is the last */
    int begins;        /* the panel is the first */
    /* What the next panel unpacks, [block][2][bytes], of which this tile starts to load `lines` lines with each block; and the
     * numbers of that panel, where this tile is the first. */
    const uint8_t *ahead;
    int64_t lines;
    const uint16_t *scales_ahead, *offsets_ahead;
};

/* Add the products of part k, of the parts of all blocks, whose sums are in memory. While tiles are in use, port 5 takes no fused
 * operation and no conversion, and these are what a product waits for. So integers become floats by an addition of WHOLE_BITS,
 * which port 5 takes. With offsets, which have one fused operation more, the tile starts with them: a load, no addition. */
INLINE void add_block(const struct panel_place *p, int64_t k, tile_sums sums, int form, floats *acc) {
    const floats scale = half_floats(p->scales + k * GROUP), whole = times(scale, splat(-WHOLE));
    const int64_t block = k / parts_of(form);
    const int last_part = (k + 1) % parts_of(form) == 0;
    const float *row_scales = p->row_scales + block * p->room, *row_sums = p->row_sums + block * p->room;
    floats offset = splat(0.0f);
    if (p->scales_ahead) __builtin_prefetch(p->scales_ahead + k * GROUP);
    if (last_part) {
        for (int64_t i = 0; i < p->lines; i++) __builtin_prefetch(p->ahead + (block * p->lines + i) * LINE, 0, 2);
        if (p->offsets_ahead) __builtin_prefetch(p->offsets_ahead + block * GROUP);
    }
    if (has_offsets(form) && last_part) offset = half_floats(p->offsets + block * GROUP);
    /* One register and a constant each: with a second register, a fused operation and its load are not one. */
    __asm__("" : "+r"(row_scales), "+r"(row_sums));
    UNROLL_16 for (int t = 0; t < TILE_ROWS; t++) {
        const ints integer = has_offsets(form) ? sums[t] : sums[t] + spread_ints(WHOLE_BITS);
        acc[t] = fused(scaled_sum(integer, scale, whole), splat(row_scales[t]), acc[t]);
        if (has_offsets(form) && last_part) acc[t] = fused(offset, splat(row_sums[t]), acc[t]);
    }
}

/* Add the products of a panel to `out`; form is a compile-time constant. While the sums of a block (or part) are added up, the
 * tiles of the next two are under way; a tile is stored one block later than its dot product, for which the store waits. */
INLINE void panel_tile(const struct panel_place *p, int form) {
    static const int32_t begin[LANES] __attribute__((aligned(64))) = {[0 ... LANES - 1] = WHOLE_BITS};
    const int64_t parts = parts_of(form), count = p->count * parts;
    const int64_t inputs = QBLOCK / parts, tile_bytes = TILE_BYTES / parts; /* of a part */
    tile_sums sums[2] __attribute__((aligned(64)));
    floats acc[TILE_ROWS];
#define MULTIPLY(t, a, b, k)                                                                                           \
    do {                                                                                                               \
        if ((k) >= count) break;                                                                                       \
        if (has_offsets(form))                                                                                         \
            TILE_LOAD(t, begin, 0);                                                                                    \
        else                                                                                                           \
            TILE_ZERO(t);                                                                                              \
        TILE_LOAD(a, p->quants + (k) * inputs, p->inputs);                                                             \
        TILE_LOAD(b, p->panel + (k) * tile_bytes, 64);                                                                 \
        TILE_DOT(t, a, b);                                                                                             \
    } while (0)
#define KEEP(t, k)                                                                                                     \
    do {                                                                                                               \
        if ((k) < count) TILE_STORE(t, sums[t], 64);                                                                   \
    } while (0)
    MULTIPLY(0, 2, 4, 0);
    MULTIPLY(1, 3, 5, 1);
    KEEP(0, 0);
    UNROLL_16 for (int t = 0; t < TILE_ROWS; t++) acc[t] =
        p->begins ? splat(0.0f) : load_floats(p->out + t * p->stride);
    for (int64_t k = 0; k < count; k += 2) {
        MULTIPLY(0, 2, 4, k + 2);
        KEEP(1, k + 1);
        add_block(p, k, sums[0], form, acc);
        MULTIPLY(1, 3, 5, k + 3);
        KEEP(0, k + 2);
        if (k + 1 < count) add_block(p, k + 1, sums[1], form, acc);
    }
#undef MULTIPLY
#undef KEEP
    if (p->bias) {
        const floats bias = load_floats(p->bias);
        UNROLL_16 for (int t = 0; t < TILE_ROWS; t++) acc[t] = sum_floats(acc[t], bias);
    }
    UNROLL_16 for (int t = 0; t < TILE_ROWS; t++) store_floats(p->out + t * p->stride, acc[t]);
}

#define PANEL_OF(form)                                                                                                 \
    static __attribute__((noinline)) void unpack_##form(const uint8_t *q, int64_t count, uint8_t *panel) {             \
        for (int64_t k = 0; k < count; k++) unpack_block(q + k * 2 * bytes_of(form), form, panel + k * TILE_BYTES);    \
    }                                                                                                                  \
    static __attribute__((noinline)) void panel_##form(const struct panel_place *p) { panel_tile(p, form); }
EACH_FORM(PANEL_OF)

/* Outputs [GROUP g, GROUP (g + 1)) of `rows` rows from `first` on, up to STEP_ROWS. If the last ones fill no tile, theirs begins
 * at rows before them, whose products are computed again and dropped: fewer than a tile need rows of x before `first`. */
static __attribute__((noinline)) void group_of_tiles(const struct block_weights *w, int64_t g,
                                                     const struct block_rows *x, int64_t first, int64_t rows,
                                                     float *out, int64_t stride) {
#define UNPACK(form) [form] = unpack_##form,
#define MULTIPLY(form) [form] = panel_##form,
    static void (*const unpack[])(const uint8_t *, int64_t, uint8_t *) = {EACH_FORM(UNPACK)};
    static void (*const multiply[])(const struct panel_place *) = {EACH_FORM(MULTIPLY)};
#undef UNPACK
#undef MULTIPLY
    const int form = form_of(w);
    const int64_t blocks = w->inputs / QBLOCK, bytes = bytes_of(form), parts = parts_of(form);
    /* About equal panels: the first sums of a panel are waited for. */
    const int64_t panels = (blocks + PANEL_BLOCKS - 1) / PANEL_BLOCKS;
    uint8_t panel[PANEL_BLOCKS * TILE_BYTES] __attribute__((aligned(64)));
    float last[TILE_ROWS][GROUP] __attribute__((aligned(64))); /* of a tile that begins at such rows */
    const int64_t over = rows % TILE_ROWS, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t turns = GROUP / LANES * tiles, each = 2 * bytes / LINE, lines = (each + turns - 1) / turns;
    configure_tiles(QBLOCK / parts);
    for (int64_t i = 0; i < panels; i++) {
        const int64_t k = blocks * i / panels, count = blocks * (i + 1) / panels - k;
        const int64_t numbers = (g * blocks + k) * GROUP;
        const int64_t next = numbers + count * GROUP;
        int64_t turn = 0;
        for (int64_t half = 0; half < GROUP / LANES; half++) {
            const float *bias = w->bias && i == panels - 1 ? w->bias + g * GROUP + half * LANES : 0;
            unpack[form](w->quants + (2 * (g * blocks + k) + half) * bytes, count, panel);
            for (int64_t t = 0; t < tiles; t++, turn++) {
                const int shares = over && t == tiles - 1;
                const int64_t r = shares ? rows - TILE_ROWS : t * TILE_ROWS;
                const struct panel_place place = {
                    .panel = panel,
                    .scales = w->scales + parts * numbers + half * LANES,
                    .offsets = has_offsets(form) ? w->offsets + numbers + half * LANES : 0,
                    .quants = x->quants + (first + r) * x->inputs + k * QBLOCK,
                    .row_scales = x->columns + k * x->room + first + r,
                    .row_sums = x->columns + (blocks + k) * x->room + first + r,
                    .room = x->room,
                    .inputs = w->inputs,
                    .count = count,
                    .out = (shares ? last[0] : out + r * stride) + half * LANES,
                    .stride = shares ? GROUP : stride,
                    .bias = bias,
                    .begins = !k,
                    .ahead = w->quants + next / GROUP * 2 * bytes + turn * lines * count * LINE,
                    .lines = turn * lines < each ? lines : 0,
                    .scales_ahead = turn ? 0 : w->scales + parts * next,
                    .offsets_ahead = turn || !has_offsets(form) ? 0 : w->offsets + next};
                multiply[form](&place);
            }
        }
    }
    for (int64_t t = TILE_ROWS - over; over && t < TILE_ROWS; t++)
        memcpy(out + (rows - TILE_ROWS + t) * stride, last[t], sizeof last[t]);
}

#endif
