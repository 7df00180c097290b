/* The operations on tiles, by the names of amx.h or, with INTRINSICS, by the compiler's own: both make the same code. */
#if defined(INTRINSICS)
#include <immintrin.h>
#define TILE_RELEASE() _tile_release()
#define TILE_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define TILE_DOT(sums, a, b) _tile_dpbssd(sums, a, b)
#define TILE_ZERO(t) _tile_zero(t)
#else
#pragma GCC target("arch=x86-64-v4,avx512vnni")
#define VARIANT(name) static name##_unused
#include "blocks.h"
#endif

__attribute__((section(".text.tiles"))) void tiles(const char *from, char *to, long stride) {
    TILE_ZERO(1);
    TILE_LOAD(4, from, stride);
    TILE_LOAD(7, to, stride);
    TILE_DOT(1, 4, 7);
    TILE_STORE(1, to, stride);
    TILE_RELEASE();
}
