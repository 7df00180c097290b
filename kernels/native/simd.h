/* Vectors of a register's lanes, and of 16, in portable GNU C, for the CPU kernels.
 *
 * Where a register has fewer than 16 lanes, gcc keeps a v16f in memory and moves it word by word. So what computes with many
 * numbers has vectors of one register, and a v16f is what a function gets or gives: a lane's result is the same with both.
 * Invariant: every result depends only on its own row, in a fixed order of operations, so a row computed alone and in a
 * batch is the same to the last bit. Not responsible for: threads.
 */
#ifndef LOCKSTEP_SIMD_H
#define LOCKSTEP_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef int8_t v16c __attribute__((vector_size(16)));

#define UNROLL _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

/* Lanes of a register, and vectors of so many. */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define PIECES (16 / WIDTH) /* of a v16f */

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t int32s __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uint32s __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t uint16s __attribute__((vector_size(2 * WIDTH)));
typedef int8_t int8s __attribute__((vector_size(WIDTH)));

INLINE v16f splat(float x) { return (v16f){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE v16f load_f32(const void *p) {
    v16f x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE floats spread_floats(float x) { return x - (floats){0}; }

INLINE floats load_floats(const float *p) {
    floats x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store_floats(float *p, floats x) { memcpy(p, &x, sizeof x); }

/* The compiler widens a register's lanes in several steps; the instruction does it in one. */
INLINE floats floats_of_bf16(const uint16_t *p) {
#if WIDTH == 16
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif WIDTH == 8
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    uint16s h;
    memcpy(&h, p, sizeof h);
    return (floats)(__builtin_convertvector(h, uint32s) << 16);
#endif
}

INLINE floats floats_of_int8(const int8_t *p) {
#if WIDTH == 16
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif WIDTH == 8
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    int8s x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, int32s), floats);
#endif
}

/* A register's lanes; dtype is a compile-time constant at every call site. */
INLINE floats load_lanes(const void *base, int64_t index, int bf16) {
    return bf16 ? floats_of_bf16((const uint16_t *)base + index) : load_floats((const float *)base + index);
}

/* 16 lanes. */
INLINE v16f load(const void *base, int64_t index, int bf16) {
    floats x[PIECES];
    UNROLL for (int p = 0; p < PIECES; p++) x[p] = load_lanes(base, index + p * WIDTH, bf16);
    return load_f32(x);
}

INLINE float load1(const void *base, int64_t index, int bf16) {
    if (!bf16) return ((const float *)base)[index];
    uint32_t u = (uint32_t)((const uint16_t *)base)[index] << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Round to nearest even, as torch does; NaN stays NaN. */
INLINE uint16_t to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

INLINE void store1(void *base, int64_t index, float x, int bf16) {
    if (bf16)
        ((uint16_t *)base)[index] = to_bf16(x);
    else
        ((float *)base)[index] = x;
}

/* Round to nearest even, as to_bf16. */
INLINE uint32s bf16_bits(floats x) {
    const uint32s u = (uint32s)x, nan = (uint32s)(x != x), r = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    return (nan & 0x7fc0u) | (~nan & r);
}

INLINE void store_lanes(void *base, int64_t index, floats x, int bf16) {
    if (bf16) {
        const uint16s h = __builtin_convertvector(bf16_bits(x), uint16s);
        memcpy((uint16_t *)base + index, &h, sizeof h);
    } else
        store_floats((float *)base + index, x);
}

INLINE void store(void *base, int64_t index, v16f x, int bf16) {
    floats pieces[PIECES];
    memcpy(pieces, &x, sizeof x);
    UNROLL for (int p = 0; p < PIECES; p++) store_lanes(base, index + p * WIDTH, pieces[p], bf16);
}

INLINE v16f select16(v16i mask, v16f a, v16f b) { return (v16f)((mask & (v16i)a) | (~mask & (v16i)b)); }

/* Across the lanes, in the order of a tree: 8 + 8, 4 + 4, ... */
#define FOLD16(x, op)                                                                                                  \
    do {                                                                                                               \
        x = op(x, __builtin_shuffle(x, (v16i){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));                 \
        x = op(x, __builtin_shuffle(x, (v16i){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));                 \
        x = op(x, __builtin_shuffle(x, (v16i){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));                 \
        x = op(x, __builtin_shuffle(x, (v16i){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));                 \
    } while (0)

/* a > b ? a : b, hence b where one of them is no number. */
INLINE v16f larger(v16f a, v16f b) {
#if defined(__AVX512F__)
    return (v16f)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select16(a > b, a, b);
#endif
}

INLINE v16f plus(v16f a, v16f b) { return a + b; }

#if defined(__AVX2__)
INLINE __m256 half_of(v16f x, int half) {
#if defined(__AVX512F__)
    return half ? _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)x), 1))
                : _mm512_castps512_ps256((__m512)x);
#else
    __m256 both[2];
    memcpy(both, &x, sizeof x);
    return both[half];
#endif
}

/* The same tree; each step needs half of the lanes of the one before. */
#define FOLD_HALVES(x, op)                                                                                             \
    __m256 x8 = _mm256_##op##_ps(half_of(x, 0), half_of(x, 1));                                                        \
    __m128 x4 = _mm_##op##_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));                               \
    x4 = _mm_##op##_ps(x4, _mm_movehl_ps(x4, x4));                                                                     \
    x4 = _mm_##op##_ss(x4, _mm_movehdup_ps(x4))
#endif

INLINE float max16(v16f x) {
#if defined(__AVX2__)
    FOLD_HALVES(x, max);
    return _mm_cvtss_f32(x4);
#else
    FOLD16(x, larger);
    return x[0];
#endif
}

INLINE float sum16(v16f x) {
#if defined(__AVX2__)
    FOLD_HALVES(x, add);
    return _mm_cvtss_f32(x4);
#else
    FOLD16(x, plus);
    return x[0];
#endif
}

#if defined(__AVX512F__)
/* Lane i of the result is vector i across its lanes: half the shuffles of sixteen folds, and the results are a vector. */
#define FOLD_EACH(x, op)                                                                                               \
    __m512 by2[8], by4[4], by8[2];                                                                                     \
    for (int i = 0; i < 8; i++)                                                                                        \
        by2[i] = op(_mm512_unpacklo_ps((__m512)x[2 * i][0], (__m512)x[2 * i + 1][0]),                                  \
                    _mm512_unpackhi_ps((__m512)x[2 * i][0], (__m512)x[2 * i + 1][0]));                                 \
    for (int i = 0; i < 4; i++)                                                                                        \
        by4[i] = op(_mm512_shuffle_ps(by2[2 * i], by2[2 * i + 1], 0x44),                                               \
                    _mm512_shuffle_ps(by2[2 * i], by2[2 * i + 1], 0xee));                                              \
    for (int i = 0; i < 2; i++)                                                                                        \
        by8[i] = op(_mm512_shuffle_f32x4(by4[2 * i], by4[2 * i + 1], 0x88),                                            \
                    _mm512_shuffle_f32x4(by4[2 * i], by4[2 * i + 1], 0xdd));                                           \
    return (v16f)op(_mm512_shuffle_f32x4(by8[0], by8[1], 0x88), _mm512_shuffle_f32x4(by8[0], by8[1], 0xdd))

INLINE v16f max_of_each(const floats x[16][PIECES]) { FOLD_EACH(x, _mm512_max_ps); }

/* In any order: for sums that are exact. */
INLINE v16f sum_of_each(const floats x[16][PIECES]) { FOLD_EACH(x, _mm512_add_ps); }
#else
INLINE v16f max_of_each(const floats x[16][PIECES]) {
    float y[16];
    for (int i = 0; i < 16; i++) y[i] = max16(load_f32(x[i]));
    return load_f32(y);
}

INLINE v16f sum_of_each(const floats x[16][PIECES]) {
    float y[16];
    for (int i = 0; i < 16; i++) y[i] = sum16(load_f32(x[i]));
    return load_f32(y);
}
#endif

/* f of every lane, by `of`, which computes it for those of a register. */
#define EACH_PIECE(x, of)                                                                                              \
    do {                                                                                                               \
        floats piece[PIECES];                                                                                          \
        memcpy(piece, &x, sizeof x);                                                                                   \
        UNROLL for (int i = 0; i < PIECES; i++) piece[i] = of(piece[i]);                                               \
        memcpy(&x, piece, sizeof x);                                                                                   \
    } while (0)

/* The numbers of the lanes of piece p. */
INLINE uint32s lanes_of(int p) {
    static const uint32_t NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    uint32s x;
    memcpy(&x, NUMBERS + p * WIDTH, sizeof x);
    return x;
}

INLINE floats select_floats(int32s mask, floats a, floats b) {
    return (floats)((mask & (int32s)a) | (~mask & (int32s)b));
}

/* a > b ? a : b, hence b where one of them is no number. */
INLINE floats larger_floats(floats a, floats b) {
#if WIDTH == 16
    return larger(a, b);
#elif WIDTH == 8
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_floats(a > b, a, b);
#endif
}

INLINE floats smaller_floats(floats a, floats b) {
#if WIDTH == 16
    return (floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif WIDTH == 8
    return (floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select_floats(a < b, a, b);
#endif
}

/* exp(x) for x <= 0, within 2 ulp; below -87 it is 0. Cephes' range reduction and polynomial. */
INLINE floats exp_floats(floats x) {
    int32s dead = x < spread_floats(-87.0f);
    x = select_floats(dead, spread_floats(-87.0f), x);
    floats t = x * spread_floats(1.44269504088896341f);
    floats magic = spread_floats(12582912.0f); /* 1.5 * 2^23: adding it rounds to the nearest integer */
    floats n = (t + magic) - magic;
    floats r = x - n * spread_floats(0.693359375f) - n * spread_floats(-2.12194440e-4f);
    floats p = spread_floats(1.9875691500e-4f);
    p = p * r + spread_floats(1.3981999507e-3f);
    p = p * r + spread_floats(8.3334519073e-3f);
    p = p * r + spread_floats(4.1665795894e-2f);
    p = p * r + spread_floats(1.6666665459e-1f);
    p = p * r + spread_floats(5.0000001201e-1f);
    p = p * r * r + r + spread_floats(1.0f);
    int32s e = (__builtin_convertvector(n, int32s) + 127) << 23;
    return select_floats(dead, spread_floats(0.0f), p * (floats)e);
}

INLINE v16f exp16(v16f x) {
    EACH_PIECE(x, exp_floats);
    return x;
}

/* Natural logarithm of normal, positive x, within 2 ulp (Cephes logf). */
INLINE floats log_floats(floats x) {
    int32s bits = (int32s)x;
    int32s e = ((bits >> 23) & 0xff) - 126;
    floats m = (floats)((bits & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
    int32s low = m < spread_floats(0.707106781186547524f);
    e = e + low; /* low is -1 where true */
    m = m + select_floats(low, m, spread_floats(0.0f)) - spread_floats(1.0f);
    floats z = m * m;
    floats p = spread_floats(7.0376836292e-2f);
    p = p * m + spread_floats(-1.1514610310e-1f);
    p = p * m + spread_floats(1.1676998740e-1f);
    p = p * m + spread_floats(-1.2420140846e-1f);
    p = p * m + spread_floats(1.4249322787e-1f);
    p = p * m + spread_floats(-1.6668057665e-1f);
    p = p * m + spread_floats(2.0000714765e-1f);
    p = p * m + spread_floats(-2.4999993993e-1f);
    p = p * m + spread_floats(3.3333331174e-1f);
    floats fe = __builtin_convertvector(e, floats);
    floats y = p * m * z + fe * spread_floats(-2.12194440e-4f) - spread_floats(0.5f) * z;
    return m + y + fe * spread_floats(0.693359375f);
}

INLINE v16f log16(v16f x) {
    EACH_PIECE(x, log_floats);
    return x;
}

#endif
