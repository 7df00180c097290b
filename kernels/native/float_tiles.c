/* Products of bf16 matrices on x86-64's matrix unit (AMX): out = x * weights^T + bias, summed in fp32 and rounded once.
 *
 * A tile multiplies up to 16 rows by 16 outputs over a step of 32 inputs. Every sum takes the steps of its row and
 * output in their order, whatever else is in the call. Invariant: a row's result has the same bits for any number of rows
 * and threads. Weights are packed once: the 32 inputs of 16 outputs are a tile, and the two tiles of 32 outputs lie side by
 * side, so a thread reads the weights of its outputs in one stream. Not responsible for: the permission to use tiles (see
 * amx.c).
 */
#include <stdint.h>

#if defined(__x86_64__)
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#include <immintrin.h>
#include <string.h>

#include "tiles.h"

enum {
    ROWS = 16,        /* of a tile */
    OUTPUTS = 16,     /* of a tile */
    GROUP = 32,       /* outputs of two tiles */
    STEP = 32,        /* inputs of a tile */
    TILE = 512,       /* numbers of a tile of weights */
    BLOCK_STEPS = 16, /* the most at once: the weights of a group lie in the first cache then */
    ROW_BLOCK = 256   /* the most rows at once: their sums lie in the second cache */
};

/* Mirrored in kernels/float_tiles.py. */
struct float_tiles_args {
    const uint16_t *weights; /* [ceil(outputs / 32)][inputs / 32][2][16 pairs of inputs][16 outputs][2] */
    const float *bias;       /* [32 * ceil(outputs / 32)], or null */
    const uint16_t *x;       /* [rows][inputs] */
    uint16_t *out;           /* [rows][outputs] */
    uint16_t *scratch;       /* for x in tiles: [ceil(rows / 16)][inputs / 32][16][32] */
    int64_t rows, inputs, outputs;
};

/* Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights. */
static void configure(int64_t rows) {
    struct tile_config config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.rows[t] = t < 6 ? (uint8_t)rows : STEP / 2;
        config.bytes[t] = 64;
    }
    TILE_CONFIGURE(&config);
}

typedef float sums_of_tile[ROWS][OUTPUTS];

/* Sums of one or two tiles of rows by the two tiles of a group, over `steps` steps. `sums` [tile of rows][half]. */
static void tile_rows_1(const uint16_t *x, const uint16_t *w, int64_t steps, int64_t x_tile, int first,
                        sums_of_tile *sums) {
    if (first) {
        TILE_ZERO(0);
        TILE_ZERO(1);
    } else {
        TILE_LOAD(0, sums[0], 64);
        TILE_LOAD(1, sums[1], 64);
    }
    for (int64_t k = 0; k < steps; k++) {
        TILE_LOAD(4, x + k * x_tile, 64);
        TILE_LOAD(6, w + 2 * k * TILE, 64);
        TILE_DOT_BF16(0, 4, 6);
        TILE_LOAD(7, w + (2 * k + 1) * TILE, 64);
        TILE_DOT_BF16(1, 4, 7);
    }
    TILE_STORE(0, sums[0], 64);
    TILE_STORE(1, sums[1], 64);
}

static void tile_rows_2(const uint16_t *x, const uint16_t *next, const uint16_t *w, int64_t steps, int64_t x_tile,
                        int first, sums_of_tile *sums) {
    if (first) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        TILE_LOAD(0, sums[0], 64);
        TILE_LOAD(1, sums[1], 64);
        TILE_LOAD(2, sums[2], 64);
        TILE_LOAD(3, sums[3], 64);
    }
    for (int64_t k = 0; k < steps; k++) {
        TILE_LOAD(4, x + k * x_tile, 64);
        TILE_LOAD(6, w + 2 * k * TILE, 64);
        TILE_DOT_BF16(0, 4, 6);
        TILE_LOAD(5, next + k * x_tile, 64);
        TILE_DOT_BF16(2, 5, 6);
        TILE_LOAD(7, w + (2 * k + 1) * TILE, 64);
        TILE_DOT_BF16(1, 4, 7);
        TILE_DOT_BF16(3, 5, 7);
    }
    TILE_STORE(0, sums[0], 64);
    TILE_STORE(1, sums[1], 64);
    TILE_STORE(2, sums[2], 64);
    TILE_STORE(3, sums[3], 64);
}

/* Rows from `row` on, of the outputs of a group: sums plus bias, rounded to nearest even. */
static void round_rows(const struct float_tiles_args *a, int64_t g, int64_t row, int64_t rows, sums_of_tile *sums) {
    const int64_t at = g * GROUP, left = a->outputs - at;
    const __mmask32 there = left < GROUP ? ((__mmask32)1 << left) - 1 : (__mmask32)-1;
    uint16_t *out = a->out + row * a->outputs + at;
    for (int64_t t = 0; t < rows; t++, out += a->outputs) {
        __m512 low = _mm512_load_ps(sums[0][t]), high = _mm512_load_ps(sums[1][t]);
        if (a->bias) {
            low = _mm512_add_ps(low, _mm512_loadu_ps(a->bias + at));
            high = _mm512_add_ps(high, _mm512_loadu_ps(a->bias + at + OUTPUTS));
        }
        const __m512bh rounded = _mm512_cvtne2ps_pbh(high, low);
        __m512i bits;
        memcpy(&bits, &rounded, sizeof bits);
        if (left >= GROUP)
            _mm512_storeu_si512(out, bits);
        else
            _mm512_mask_storeu_epi16(out, there, bits);
    }
}

/* Outputs [GROUP g, GROUP (g + 1)) of the rows in tiles [begin, end). `height` rows of a tile. */
static void group_of_rows(const struct float_tiles_args *a, int64_t g, int64_t begin, int64_t end, int64_t height) {
    const int64_t steps = a->inputs / STEP, x_tile = height * STEP, x_row = steps * x_tile;
    const int64_t blocks = (steps + BLOCK_STEPS - 1) / BLOCK_STEPS, most = (steps + blocks - 1) / blocks;
    sums_of_tile sums[ROW_BLOCK / ROWS][2] __attribute__((aligned(64)));
    for (int64_t k = 0; k < steps; k += most) {
        const int64_t count = steps - k < most ? steps - k : most;
        const uint16_t *w = a->weights + (g * steps + k) * 2 * TILE;
        for (int64_t i = begin; i < end; i += 2) {
            const uint16_t *x = a->scratch + i * x_row + k * x_tile;
            const int two = i + 1 < end, last = k + count == steps;
            if (two)
                tile_rows_2(x, x + x_row, w, count, x_tile, !k, sums[i - begin]);
            else
                tile_rows_1(x, w, count, x_tile, !k, sums[i - begin]);
            for (int64_t j = i; last && j <= i + two; j++) {
                const int64_t left = a->rows - j * ROWS;
                round_rows(a, g, j * ROWS, left < height ? left : height, sums[j - begin]);
            }
        }
    }
}

/* Tile i of rows, its steps one after the other. Rows that there are not are zeros. */
static void rows_into_tiles(const struct float_tiles_args *a, int64_t i, int64_t height) {
    const int64_t steps = a->inputs / STEP;
    uint16_t *to = a->scratch + i * steps * height * STEP;
    for (int64_t t = 0; t < height; t++) {
        const int64_t row = i * ROWS + t;
        for (int64_t k = 0; k < steps; k++) {
            uint16_t *line = to + (k * height + t) * STEP;
            if (row < a->rows)
                memcpy(line, a->x + row * a->inputs + k * STEP, STEP * sizeof *line);
            else
                memset(line, 0, STEP * sizeof *line);
        }
    }
}

static void multiply(const struct float_tiles_args *a, int alone) {
    const int64_t height = a->rows < ROWS ? a->rows : ROWS, tiles = (a->rows + ROWS - 1) / ROWS;
    const int64_t groups = (a->outputs + GROUP - 1) / GROUP, in_block = ROW_BLOCK / ROWS;
    const int64_t blocks = (tiles + in_block - 1) / in_block;
#pragma omp parallel if (!alone)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tiles; i++) rows_into_tiles(a, i, height);
        configure(height);
#pragma omp for schedule(dynamic, 4)
        for (int64_t item = 0; item < groups * blocks; item++) {
            const int64_t begin = item % blocks * in_block;
            group_of_rows(a, item / blocks, begin, begin + in_block < tiles ? begin + in_block : tiles, height);
        }
        TILE_RELEASE();
    }
}

/* On the threads of the OpenMP runtime that torch uses. */
void lockstep_float_tiles(const struct float_tiles_args *a) { multiply(a, 0); }

/* On the calling thread only, which may be the only one of a child process. */
void lockstep_float_tiles_alone(const struct float_tiles_args *a) { multiply(a, 1); }
#endif
