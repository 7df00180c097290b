/* The operations on x86-64's tile registers, and their configuration. Not responsible for: what is computed with them. */
#ifndef LOCKSTEP_TILES_H
#define LOCKSTEP_TILES_H

#include <stdint.h>

/* gcc 12's own intrinsics say neither that a load reads memory nor that a configuration has 64 bytes, so stores before them
 * may be dropped. tests/kernels/emulated_tiles.h has the same names without the unit. */
#if !defined(TILE_DOT)
#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(config)) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::: "memory")
#define TILE_LOAD(t, from, stride)                                                                                     \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void *)(from)), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, to, stride)                                                                                      \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(stride)) : "memory")
/* sums += rows of a, signed bytes, times columns of b, signed bytes */
#define TILE_DOT(sums, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::: "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
/* sums += pairs of rows of a times pairs of columns of b, bf16; the first numbers of the pairs and the second add up apart */
#define TILE_DOT_BF16(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::: "memory")
#endif

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row, by tile */
    uint8_t rows[16];
} __attribute__((aligned(64)));

#endif
