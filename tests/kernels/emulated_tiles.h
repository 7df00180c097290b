/* The tile registers of x86-64 in plain C, for CPUs without them: the operations that kernels/native/amx.h names.
 *
 * After the pseudo code of Intel's manual (LDTILECFG, TILELOADD, TDPBSSD, TDPBF16PS, TILESTORED, TILERELEASE, TILEZERO), with palette 1:
 * eight tiles of 16 rows of 64 bytes. Whatever faults there ends the program here. Each thread has its own registers. Not
 * responsible for: start_row, which only an interrupted load or store sets.
 */
#ifndef LOCKSTEP_EMULATED_TILES_H
#define LOCKSTEP_EMULATED_TILES_H

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILE_CONFIGURE(config) tile_configure(config)
#define TILE_RELEASE() tile_release()
#define TILE_LOAD(t, from, stride) tile_load(t, from, stride)
#define TILE_STORE(t, to, stride) tile_store(t, to, stride)
#define TILE_DOT(sums, a, b) tile_dot(sums, a, b)
#define TILE_ZERO(t) tile_zero(t)
#define TILE_DOT_BF16(sums, a, b) tile_dot_bf16(sums, a, b)

static __thread struct {
    int configured;
    int rows[8], bytes[8];
    uint8_t data[8][16][64];
} tiles;
static _Atomic int threads_with_tiles;
static _Atomic int64_t tile_dots; /* since the start; a process says at its end that there were some */

__attribute__((destructor)) static void say_tile_dots(void) {
    if (tile_dots) fprintf(stderr, "tiles: in use\n");
}

static inline void tile_fault_if(int wrong, const char *what) {
    if (!wrong) return;
    fprintf(stderr, "tiles: %s\n", what);
    abort();
}

static inline void tile_configure(const void *config) {
    const uint8_t *c = config;
    tile_fault_if(c[0] != 1, "a palette other than 1");
    for (int i = 2; i < 64; i++)
        tile_fault_if((i < 16 || (i >= 32 && i < 48) || i >= 56) && c[i], "a reserved byte is not 0");
    threads_with_tiles += !tiles.configured;
    memset(&tiles, 0, sizeof tiles);
    for (int t = 0; t < 8; t++) {
        uint16_t bytes;
        memcpy(&bytes, c + 16 + 2 * t, sizeof bytes);
        tile_fault_if(c[48 + t] > 16 || bytes > 64 || !c[48 + t] != !bytes, "rows or bytes of a row");
        tiles.rows[t] = c[48 + t];
        tiles.bytes[t] = bytes;
    }
    tiles.configured = 1;
}

static inline void tile_release(void) {
    threads_with_tiles -= tiles.configured;
    memset(&tiles, 0, sizeof tiles);
}

static inline void tile_check(int t) {
    tile_fault_if(!tiles.configured, "a tile without a configuration");
    tile_fault_if(!tiles.rows[t], "a tile that the configuration has not");
}

static inline void tile_load(int t, const void *from, int64_t stride) {
    tile_check(t);
    memset(tiles.data[t], 0, sizeof tiles.data[t]);
    for (int r = 0; r < tiles.rows[t]; r++)
        memcpy(tiles.data[t][r], (const uint8_t *)from + r * stride, (size_t)tiles.bytes[t]);
}

static inline void tile_store(int t, void *to, int64_t stride) {
    tile_check(t);
    for (int r = 0; r < tiles.rows[t]; r++)
        memcpy((uint8_t *)to + r * stride, tiles.data[t][r], (size_t)tiles.bytes[t]);
}

static inline void tile_zero(int t) {
    tile_check(t);
    memset(tiles.data[t], 0, sizeof tiles.data[t]);
}

static inline void tile_check_operands(int sums, int a, int b) {
    tile_check(sums);
    tile_check(a);
    tile_check(b);
    tile_fault_if(sums == a || sums == b || a == b, "two operands are one tile");
    tile_fault_if(tiles.bytes[sums] % 4 || tiles.bytes[a] % 4 || tiles.bytes[b] % 4, "a row is not whole words");
    tile_fault_if(tiles.rows[sums] != tiles.rows[a] || tiles.bytes[sums] != tiles.bytes[b] ||
                      tiles.bytes[a] / 4 != tiles.rows[b],
                  "operands of shapes that do not fit");
}

/* TDPBSSD: sums.row[m].dword[n] += the four signed products of a.row[m].dword[k] and b.row[k].dword[n], for each k. */
static inline void tile_dot(int sums, int a, int b) {
    tile_dots++;
    tile_check_operands(sums, a, b);
    for (int m = 0; m < tiles.rows[sums]; m++) {
        uint32_t row[16];
        memcpy(row, tiles.data[sums][m], sizeof row);
        for (int k = 0; k < tiles.bytes[a] / 4; k++)
            for (int n = 0; n < tiles.bytes[sums] / 4; n++)
                for (int i = 0; i < 4; i++)
                    row[n] += (uint32_t)((int8_t)tiles.data[a][m][4 * k + i] * (int8_t)tiles.data[b][k][4 * n + i]);
        memset(tiles.data[sums][m], 0, 64);
        memcpy(tiles.data[sums][m], row, (size_t)tiles.bytes[sums]);
    }
}

static inline float tile_of_bf16(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* TDPBF16PS: the products of the first numbers of the pairs, and of the second ones, add up apart by fused operations; then
 * sums.row[m].fp32[n] += first + second. Without its flush of subnormal numbers to zero. */
static inline void tile_dot_bf16(int sums, int a, int b) {
    tile_check_operands(sums, a, b);
    for (int m = 0; m < tiles.rows[sums]; m++) {
        float row[16];
        memcpy(row, tiles.data[sums][m], sizeof row);
        for (int n = 0; n < tiles.bytes[sums] / 4; n++) {
            float parts[2] = {0.0f, 0.0f};
            for (int k = 0; k < tiles.bytes[a] / 4; k++)
                for (int i = 0; i < 2; i++)
                    parts[i] = fmaf(tile_of_bf16(tiles.data[a][m] + 4 * k + 2 * i),
                                    tile_of_bf16(tiles.data[b][k] + 4 * n + 2 * i), parts[i]);
            row[n] += parts[0] + parts[1];
        }
        memset(tiles.data[sums][m], 0, 64);
        memcpy(tiles.data[sums][m], row, (size_t)tiles.bytes[sums]);
    }
}

#endif
