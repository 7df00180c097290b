/* Products over blocks for the tests of tiles: on emulated tiles, and with nothing but C's own arithmetic.
 *
 * The library's own source computes the first, so only the operations on tiles differ from what is shipped.
 */
#pragma GCC target("arch=x86-64-v4,avx512vnni")
#define VARIANT(name) name##_emulated
#include "emulated_tiles.h"
#include "blocks.h"

static float of_half(uint16_t x) { return _cvtsh_ss(x); }

/* One output: integers of a block exactly, then the floats of blocks.h, each named by C. */
static float output_of(const struct block_weights *w, const struct block_rows *x, int64_t row, int64_t n) {
    const int64_t blocks = w->inputs / QBLOCK, g = n / GROUP, half = n % GROUP / LANES, lane = n % LANES;
    static const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* values of e2m1 */
    static const int8_t levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    const int8_t *values = w->kind == BLOCKS_4_BIT_FLOATS ? twice : w->kind == BLOCKS_4_BIT_LEVELS ? levels : 0;
    const int64_t words = w->kind == BLOCKS_8_BIT ? 8 : 4;
    const int32_t below = w->offsets ? 0 : 8;
    float acc = 0.0f;
    for (int64_t k = 0; k < blocks; k++) {
        const uint8_t *q = w->quants + ((g * blocks + k) * 2 + half) * words * 64;
        int32_t sum = 0;
        for (int64_t i = 0; i < QBLOCK; i++) {
            const int64_t word = i / 4;
            const uint8_t byte = q[word % words * 64 + lane * 4 + i % 4];
            const int32_t half = word < 4 ? byte & 15 : byte >> 4;
            const int32_t weight = words == 8 ? byte - 128 : values ? values[half] : half - below;
            sum += weight * x->quants[row * w->inputs + k * QBLOCK + i];
        }
        const int64_t at = (g * blocks + k) * GROUP + n % GROUP;
        const volatile float scaled = (float)sum * of_half(w->scales[at]);
        acc = fmaf(scaled, x->scales[row * blocks + k], acc);
        if (w->offsets) acc = fmaf(of_half(w->offsets[at]), x->sums[row * blocks + k], acc);
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
