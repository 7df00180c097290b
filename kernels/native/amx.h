/* Products over blocks of many rows on x86-64's matrix unit (AMX), with the bits of the unit that includes this (see blocks.h).
 *
 * A tile multiplies up to 16 rows of activations by 16 outputs over one block of 32 inputs. Its sums are integers and hence
 * exact; they go through memory into the same fused operations, in the same order, as group_tile's. The packed weights are
 * shared with the other units: four neighbouring inputs of 16 outputs are a row of 64 bytes here as there. They are made
 * signed bytes in L1 once for all rows of a call.
 *
 * Each thread configures its own tiles when its first product needs them, and releases them at the end of the call: tiles in
 * use make a context switch 8 KB dearer. Not responsible for: the permission to use tiles (see amx.c), and from how many rows
 * on they pay (see kernels/matrix_unit.py).
 */
#ifndef LOCKSTEP_AMX_H
#define LOCKSTEP_AMX_H

/* gcc 12's own intrinsics say neither that a load reads memory nor that a configuration has 64 bytes, so stores before them
 * may be dropped. tests/kernels/emulated_tiles.h has the same names without the unit. */
#if !defined(TILE_DOT)
#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(config)) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::: "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define TILE_LOAD(t, from, stride)                                                                                     \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void *)(from)), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, to, stride)                                                                                      \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(stride)) : "memory")
/* sums += rows of a, signed bytes, times columns of b, signed bytes */
#define TILE_DOT(sums, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::: "memory")
#endif

#define TILE_ROWS 16      /* the most rows of a tile */
#define LEAST_TILE_ROWS 4 /* a tile of fewer rows takes as long as one of 16 */
#define TILE_BYTES 512    /* of a block of 16 outputs, a byte for each weight */
#define TILES_AT_ONCE 4   /* blocks whose sums are under way while those before them are added up */
#define PANEL_BLOCKS 32   /* unpacked at once: 16 KB */

#define UNROLL_16 _Pragma("GCC unroll 16")

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row, by tile */
    uint8_t rows[16];
} __attribute__((aligned(64)));

static __thread int64_t configured_rows; /* of this thread's tiles; 0: it has none */

/* Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights. */
static void configure_tiles(int64_t rows) {
    if (configured_rows == rows) return;
    struct tile_config config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.rows[t] = t < 6 ? (uint8_t)rows : QBLOCK / 4;
        config.bytes[t] = t < 4 || t > 5 ? 64 : QBLOCK;
    }
    TILE_CONFIGURE(&config);
    configured_rows = rows;
}

static void release_tiles(void) {
    if (!configured_rows) return;
    TILE_RELEASE();
    configured_rows = 0;
}

/* Blocks of 16 outputs as signed bytes, 8 rows of 64 each: row j has inputs 4 j to 4 j + 3. `q`: every second block. */
INLINE void unpack_panel(const uint8_t *q, int64_t count, int form, uint8_t *panel) {
    const int64_t bytes = form == OF_4_BITS ? TILE_BYTES / 2 : TILE_BYTES;
    for (int64_t b = 0; b < count; b++, q += 2 * bytes, panel += TILE_BYTES)
        UNROLL_8 for (int i = 0; i < bytes / 64; i++) {
            const ints w = load_ints(q + 64 * i);
            const ints low = form == OF_4_BITS ? low_halves(w) : w ^ spread_ints((int32_t)0x80808080),
                       high = high_halves(w);
            memcpy(panel + 64 * i, &low, sizeof low);
            if (form == OF_4_BITS) memcpy(panel + TILE_BYTES / 2 + 64 * i, &high, sizeof high);
        }
}

typedef int32_t tile_sums[TILE_ROWS][LANES];

/* The sums of up to TILES_AT_ONCE blocks; x: the first row's integers of the first block. */
INLINE void multiply_blocks(const int8_t *x, int64_t inputs, const uint8_t *panel, int64_t count, tile_sums *sums) {
#define MULTIPLY(t, a, b)                                                                                              \
    if (t < count) {                                                                                                   \
        TILE_ZERO(t);                                                                                                  \
        TILE_LOAD(a, x + t * QBLOCK, inputs);                                                                          \
        TILE_LOAD(b, panel + t * TILE_BYTES, 64);                                                                      \
        TILE_DOT(t, a, b);                                                                                             \
    }
#define KEEP(t)                                                                                                        \
    if (t < count) TILE_STORE(t, sums[t], 64);
    MULTIPLY(0, 4, 6) MULTIPLY(1, 5, 7) MULTIPLY(2, 4, 6) MULTIPLY(3, 5, 7) KEEP(0) KEEP(1) KEEP(2) KEEP(3)
#undef MULTIPLY
#undef KEEP
}

/* Where the numbers of a panel's blocks begin: of 16 outputs, and of the tile's first row. */
struct panel_place {
    const uint8_t *panel;
    const uint16_t *scales, *offsets; /* [block][GROUP] */
    const int8_t *quants;             /* [row][block][32] */
    const float *row_scales, *row_sums;
    int64_t inputs, count; /* blocks */
};

/* Add the products of a panel to `acc` [rows][16]; rows and form are compile-time constants. */
INLINE void panel_tile(const struct panel_place *p, int rows, int form, float *acc_memory) {
    const int64_t blocks = p->inputs / QBLOCK;
    tile_sums sums[2][TILES_AT_ONCE] __attribute__((aligned(64)));
    v16f acc[TILE_ROWS];
    UNROLL_16 for (int t = 0; t < rows; t++) acc[t] = load_f32(acc_memory + t * LANES);
    multiply_blocks(p->quants, p->inputs, p->panel, p->count, sums[0]);
    for (int64_t first = 0, now = 0; first < p->count; first += TILES_AT_ONCE, now = !now) {
        const int64_t next = first + TILES_AT_ONCE, left = p->count - first;
        if (next < p->count)
            multiply_blocks(p->quants + next * QBLOCK, p->inputs, p->panel + next * TILE_BYTES, p->count - next,
                            sums[!now]);
        for (int64_t b = 0; b < TILES_AT_ONCE && b < left; b++) {
            const int64_t k = first + b;
            const v16f scale = half_floats(p->scales + k * GROUP);
            UNROLL_16 for (int t = 0; t < rows; t++) {
                const v16f whole = floats_of(load_ints(sums[now][b][t]));
                acc[t] = fused(times(whole, scale), spread_floats(p->row_scales[t * blocks + k]), acc[t]);
            }
            if (form != OF_8_BITS) {
                const v16f offset = half_floats(p->offsets + k * GROUP);
                UNROLL_16 for (int t = 0; t < rows; t++) acc[t] =
                    fused(offset, spread_floats(p->row_sums[t * blocks + k]), acc[t]);
            }
        }
    }
    UNROLL_16 for (int t = 0; t < rows; t++) store_floats(acc_memory + t * LANES, acc[t]);
}

#define OF_TILE_ROWS(n)                                                                                                \
    case n:                                                                                                            \
        panel_tile(p, n, form, acc);                                                                                   \
        break;

INLINE void panel_rows(const struct panel_place *p, int64_t rows, int form, float *acc) {
    switch (rows) {
        OF_TILE_ROWS(4)
        OF_TILE_ROWS(5)
        OF_TILE_ROWS(6)
        OF_TILE_ROWS(7)
        OF_TILE_ROWS(8)
        OF_TILE_ROWS(9)
        OF_TILE_ROWS(10)
        OF_TILE_ROWS(11)
        OF_TILE_ROWS(12)
        OF_TILE_ROWS(13)
        OF_TILE_ROWS(14)
        OF_TILE_ROWS(15)
        OF_TILE_ROWS(16)
    }
}

static __attribute__((noinline)) void panel_of_4_bits(const struct panel_place *p, int64_t rows, float *acc) {
    panel_rows(p, rows, OF_4_BITS, acc);
}

static __attribute__((noinline)) void panel_of_8_bits(const struct panel_place *p, int64_t rows, float *acc) {
    panel_rows(p, rows, OF_8_BITS, acc);
}

static __attribute__((noinline)) void panel_of_8_bits_offset(const struct panel_place *p, int64_t rows, float *acc) {
    panel_rows(p, rows, OF_8_BITS_OFFSET, acc);
}

/* Outputs [GROUP g, GROUP (g + 1)) of `rows` rows from `first` on, LEAST_TILE_ROWS to STEP_ROWS of them. All tiles have the
 * same number of rows, so one configuration serves; the last begins earlier where the rows do not divide. */
static __attribute__((noinline)) void group_of_tiles(const struct block_weights *w, int64_t g,
                                                     const struct block_rows *x, int64_t first, int64_t rows,
                                                     float *out, int64_t stride) {
    const int form = w->kind == BLOCKS_4_BIT ? OF_4_BITS : w->offsets ? OF_8_BITS_OFFSET : OF_8_BITS;
    const int64_t blocks = w->inputs / QBLOCK, bytes = form == OF_4_BITS ? TILE_BYTES / 2 : TILE_BYTES;
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, height = (rows + tiles - 1) / tiles;
    uint8_t panel[PANEL_BLOCKS * TILE_BYTES] __attribute__((aligned(64)));
    float acc[STEP_ROWS / TILE_ROWS][TILE_ROWS][LANES] __attribute__((aligned(64)));
    int64_t begin[STEP_ROWS / TILE_ROWS]; /* of each tile, from `first` on */
    for (int64_t i = 0; i < tiles; i++) begin[i] = i * height < rows - height ? i * height : rows - height;
    configure_tiles(height);
    for (int64_t half = 0; half < GROUP / LANES; half++) {
        memset(acc, 0, sizeof acc);
        for (int64_t k = 0; k < blocks; k += PANEL_BLOCKS) {
            const int64_t count = blocks - k < PANEL_BLOCKS ? blocks - k : PANEL_BLOCKS;
            const int64_t numbers = (g * blocks + k) * GROUP + half * LANES;
            const uint8_t *q = w->quants + (2 * (g * blocks + k) + half) * bytes;
            if (form == OF_4_BITS)
                unpack_panel(q, count, OF_4_BITS, panel);
            else
                unpack_panel(q, count, OF_8_BITS, panel);
            for (int64_t i = 0; i < tiles; i++) {
                const int64_t row = first + begin[i];
                const struct panel_place place = {.panel = panel,
                                                  .scales = w->scales + numbers,
                                                  .offsets = form == OF_8_BITS ? 0 : w->offsets + numbers,
                                                  .quants = x->quants + row * x->inputs + k * QBLOCK,
                                                  .row_scales = x->scales + row * blocks + k,
                                                  .row_sums = x->sums + row * blocks + k,
                                                  .inputs = w->inputs,
                                                  .count = count};
                if (form == OF_4_BITS)
                    panel_of_4_bits(&place, height, acc[i][0]);
                else if (form == OF_8_BITS)
                    panel_of_8_bits(&place, height, acc[i][0]);
                else
                    panel_of_8_bits_offset(&place, height, acc[i][0]);
            }
        }
        for (int64_t i = 0; i < tiles; i++)
            for (int64_t t = 0; t < height; t++) {
                v16f y = load_f32(acc[i][t]);
                if (w->bias) y += load_f32(w->bias + g * GROUP + half * LANES);
                store_floats(out + (begin[i] + t) * stride + half * LANES, y);
            }
    }
}

#endif
