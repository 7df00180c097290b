/* Products over blocks for the tests of tiles: on emulated tiles, and with nothing but C's own arithmetic.
 *
 * The library's own source computes the first, so only the operations on tiles differ from what is shipped.
 */
#pragma GCC target("arch=x86-64-v4,avx512vnni")
#define VARIANT(name) name##_emulated
#include "emulated_tiles.h"
#include "blocks.h"

static float of_half(uint16_t x) { return _cvtsh_ss(x); }

/* Input i of a lane's block: what lies in its words, whose bytes are `q`[word][64]. */
static int32_t integer_of(const uint8_t *q, int64_t kind, int64_t i) {
    const int64_t in_half = i % 16, word = in_half / 4, byte = i % 4;
    const uint8_t both = q[(word + (kind == BLOCKS_5_BIT)) * 64 + byte];
    const int32_t four = i < 16 ? both & 15 : both >> 4;
    if (kind == BLOCKS_8_BIT) return q[i / 4 * 64 + byte] - 128;
    if (kind == BLOCKS_5_BIT) return four | (q[byte] >> (2 * word + i / 16) & 1) << 4;
    if (kind != BLOCKS_6_BIT) return four;
    const uint8_t *part = q + i / 16 * 3 * 64 + byte;
    if (word < 3) return part[word * 64] & 63;
    return part[0] >> 6 | part[64] >> 6 << 2 | part[128] >> 6 << 4;
}

/* One output: integers of a block or a part exactly, then the floats of blocks.h, each named by C. */
static float output_of(const struct block_weights *w, const struct block_rows *x, int64_t row, int64_t n) {
    const int64_t blocks = w->inputs / QBLOCK, g = n / GROUP, half = n % GROUP / LANES, lane = n % LANES;
    static const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* values of e2m1 */
    static const int8_t levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    const int8_t *values = w->kind == BLOCKS_4_BIT_FLOATS ? twice : w->kind == BLOCKS_4_BIT_LEVELS ? levels : 0;
    const int64_t words = w->kind == BLOCKS_8_BIT ? 8 : w->kind == BLOCKS_5_BIT ? 5 : w->kind == BLOCKS_6_BIT ? 6 : 4;
    const int64_t parts = w->kind == BLOCKS_6_BIT || w->kind == BLOCKS_4_BIT_PARTS ? 2 : 1;
    const int32_t without = w->kind == BLOCKS_8_BIT ? 0 : w->kind == BLOCKS_5_BIT ? 16 : 8;
    const int32_t below = w->kind == BLOCKS_6_BIT ? 32 : w->offsets ? 0 : without;
    float acc = 0.0f;
    for (int64_t k = 0; k < blocks; k++) {
        const uint8_t *q = w->quants + ((g * blocks + k) * 2 + half) * words * 64;
        const int64_t at = g * blocks + k;
        for (int64_t p = 0; p < parts; p++) {
            int32_t sum = 0;
            for (int64_t i = p * QBLOCK / parts; i < (p + 1) * QBLOCK / parts; i++) {
                const int32_t integer = integer_of(q + lane * 4, w->kind, i);
                sum += (values ? values[integer] : integer - below) * x->quants[row * w->inputs + k * QBLOCK + i];
            }
            const volatile float scaled = (float)sum * of_half(w->scales[(at * parts + p) * GROUP + n % GROUP]);
            acc = fmaf(scaled, x->scales[row * blocks + k], acc);
        }
        if (w->offsets) acc = fmaf(of_half(w->offsets[at * GROUP + n % GROUP]), x->sums[row * blocks + k], acc);
    }
    return w->bias ? acc + w->bias[n] : acc;
}

void reference_block_linear(const struct block_linear_args *a) {
    struct block_rows x = block_rows_at(a->scratch, a->rows, a->weights.inputs);
    for (int64_t r = 0; r < a->rows; r++) {
        quantise_row((const float *)a->x + r * a->weights.inputs, &x, r);
        for (int64_t n = 0; n < a->weights.outputs; n++)
            ((float *)a->out)[r * a->weights.outputs + n] = output_of(&a->weights, &x, r, n);
    }
}

/* Threads whose tiles are configured: outside of a call, none may be. */
int32_t tiles_in_use(void) { return threads_with_tiles; }

/* Dot products of tiles so far. */
int64_t dots_of_tiles(void) { return tile_dots; }
