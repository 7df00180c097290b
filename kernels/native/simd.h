/* Vectors of a register's lanes in portable GNU C, for the CPU kernels.
 *
 * A vector of more lanes than a register has would lie in memory, where gcc moves it word by word. So 16 lanes, in which the
 * sums over a row are taken on every unit, are PIECES vectors.
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
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"

#define UNROLL _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

/* Lanes of a register. */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define PIECES (16 / WIDTH)

/* The vectors of `count` numbers, 16 at a time: i is the first number of each, and p its piece of the 16. */
#define FOR_LANES(i, p, count)                                                                                         \
    for (int64_t i##_of_16 = 0; i##_of_16 < (count); i##_of_16 += 16)                                                  \
    UNROLL for (int64_t p = 0, i = i##_of_16; p < PIECES; p++, i += WIDTH)

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t int32s __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uint32s __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t uint16s __attribute__((vector_size(2 * WIDTH)));
typedef int8_t int8s __attribute__((vector_size(WIDTH)));

INLINE floats splat(float x) { return x - (floats){0}; }

INLINE floats load_floats(const float *p) {
    floats x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store_floats(float *p, floats x) { memcpy(p, &x, sizeof x); }

INLINE void store_ints(int32_t *p, int32s x) { memcpy(p, &x, sizeof x); }

/* a * b + c, rounded once. The compiler fuses nothing by itself (-ffp-contract=off): which product of a * b + c * d it would
 * choose differs between units, and between its versions. x86-64 without FMA rounds twice, and runs no forward in one call. */
INLINE floats fused(floats a, floats b, floats c) {
#if WIDTH == 16
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif WIDTH == 8
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float fused1(float a, float b, float c) {
#if defined(__AVX2__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

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

INLINE floats select_floats(int32s mask, floats a, floats b) {
    return (floats)((mask & (int32s)a) | (~mask & (int32s)b));
}

/* x < limit ? a : b. Of select_floats the compiler makes arithmetic, and takes a product with a masked factor twice. */
INLINE floats where_below(floats x, floats limit, floats a, floats b) {
#if WIDTH == 16
    return (floats)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)limit, _CMP_LT_OS), (__m512)b, (__m512)a);
#elif WIDTH == 8
    return (floats)_mm256_blendv_ps((__m256)b, (__m256)a, _mm256_cmp_ps((__m256)x, (__m256)limit, _CMP_LT_OS));
#else
    return select_floats(x < limit, a, b);
#endif
}

/* a > b ? a : b, hence b where one of them is no number. */
INLINE floats larger(floats a, floats b) {
#if WIDTH == 16
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif WIDTH == 8
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_floats(a > b, a, b);
#endif
}

INLINE floats smaller(floats a, floats b) {
#if WIDTH == 16
    return (floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif WIDTH == 8
    return (floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select_floats(a < b, a, b);
#endif
}

/* Across 16 lanes, in the order of a tree: 8 + 8, 4 + 4, ... Each step needs half of the lanes of the one before. */
#if defined(__AVX2__)
#if defined(__AVX512F__)
#define HALF(x, i) _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)x[0]), i))
#else
#define HALF(x, i) ((__m256)x[i])
#endif
#define FOLD(x, op, same)                                                                                              \
    __m256 x8 = _mm256_##op##_ps(HALF(x, 0), HALF(x, 1));                                                              \
    __m128 x4 = _mm_##op##_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));                               \
    x4 = _mm_##op##_ps(x4, _mm_movehl_ps(x4, x4));                                                                     \
    return _mm_cvtss_f32(_mm_##op##_ss(x4, _mm_movehdup_ps(x4)))
#else
INLINE floats plus(floats a, floats b) { return a + b; }

#define FOLD(x, op, same)                                                                                              \
    floats x4 = same(same(x[0], x[2]), same(x[1], x[3]));                                                              \
    x4 = same(x4, __builtin_shuffle(x4, (int32s){2, 3, 0, 1}));                                                        \
    return same(x4, __builtin_shuffle(x4, (int32s){1, 0, 3, 2}))[0]
#endif

INLINE float max16(const floats x[PIECES]) { FOLD(x, max, larger); }

INLINE float sum16(const floats x[PIECES]) { FOLD(x, add, plus); }

/* Lane i of the result is x[i] across its lanes, in the order of max16 and sum16. */
#if defined(__AVX512F__)
/* Half the shuffles of sixteen folds: each vector has the lanes that are left of two, then of four, eight and sixteen. */
#define FOLD_EACH(x, op, of_one)                                                                                       \
    __m512 by4[4], by8[2];                                                                                             \
    for (int i = 0; i < 4; i++) {                                                                                      \
        __m512 by2[2];                                                                                                 \
        for (int j = 0; j < 2; j++) {                                                                                  \
            const __m512 one = (__m512)x[8 * j + i][0], other = (__m512)x[8 * j + 4 + i][0];                           \
            by2[j] = op(_mm512_shuffle_f32x4(one, other, 0x44), _mm512_shuffle_f32x4(one, other, 0xee));               \
        }                                                                                                              \
        by4[i] = op(_mm512_shuffle_f32x4(by2[0], by2[1], 0x88), _mm512_shuffle_f32x4(by2[0], by2[1], 0xdd));           \
    }                                                                                                                  \
    for (int i = 0; i < 2; i++)                                                                                        \
        by8[i] = op(_mm512_shuffle_ps(by4[2 * i], by4[2 * i + 1], 0x44),                                               \
                    _mm512_shuffle_ps(by4[2 * i], by4[2 * i + 1], 0xee));                                              \
    y[0] = (floats)op(_mm512_shuffle_ps(by8[0], by8[1], 0x88), _mm512_shuffle_ps(by8[0], by8[1], 0xdd))
#else
#define FOLD_EACH(x, op, of_one)                                                                                       \
    float each[16];                                                                                                    \
    for (int i = 0; i < 16; i++) each[i] = of_one(x[i]);                                                               \
    memcpy(y, each, sizeof each)
#endif

INLINE void max_of_each(const floats x[16][PIECES], floats y[PIECES]) { FOLD_EACH(x, _mm512_max_ps, max16); }

INLINE void sum_of_each(const floats x[16][PIECES], floats y[PIECES]) { FOLD_EACH(x, _mm512_add_ps, sum16); }

/* The numbers of the lanes of piece p. */
INLINE uint32s lanes_of(int p) {
    static const uint32_t NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    uint32s x;
    memcpy(&x, NUMBERS + p * WIDTH, sizeof x);
    return x;
}

INLINE floats magnitude(floats x) { return (floats)((int32s)x & 0x7fffffff); }

/* exp(x) for x <= 0, within 2 ulp; below -87 it is 0. Cephes' range reduction and polynomial. */
INLINE floats exp_floats(floats x) {
    const floats least = splat(-87.0f), given = x;
    x = larger(least, x);              /* x where it is no number */
    floats magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to the nearest integer */
    floats n = fused(x, splat(1.44269504088896341f), magic) - magic;
    floats r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), x));
    floats p = fused(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p * r, r, r) + splat(1.0f);
    int32s e = (__builtin_convertvector(n, int32s) + 127) << 23;
    return where_below(given, least, splat(0.0f), p * (floats)e);
}

/* tanh(x), within 2 ulp. Cephes' polynomial near 0. The C library's has other bits on other machines. */
INLINE floats tanh_floats(floats x) {
    const floats size = magnitude(x), e = exp_floats(splat(-2.0f) * size), z = x * x;
    const floats large = (splat(1.0f) - e) / (splat(1.0f) + e);
    floats p = fused(splat(-5.70498872745e-3f), z, splat(2.06390887954e-2f));
    p = fused(p, z, splat(-5.37397155531e-2f));
    p = fused(p, z, splat(1.33314422036e-1f));
    p = fused(p, z, splat(-3.33332819422e-1f));
    const int32s sign = (int32s)x ^ (int32s)size;
    return (floats)((int32s)where_below(size, splat(0.625f), fused(p * z, size, size), large) | sign);
}

/* Natural logarithm of normal, positive x, within 2 ulp (Cephes logf). */
INLINE floats log_floats(floats x) {
    int32s bits = (int32s)x;
    int32s e = ((bits >> 23) & 0xff) - 126;
    floats m = (floats)((bits & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
    int32s low = m < splat(0.707106781186547524f);
    e = e + low; /* low is -1 where true */
    m = m + select_floats(low, m, splat(0.0f)) - splat(1.0f);
    floats z = m * m;
    floats p = fused(splat(7.0376836292e-2f), m, splat(-1.1514610310e-1f));
    p = fused(p, m, splat(1.1676998740e-1f));
    p = fused(p, m, splat(-1.2420140846e-1f));
    p = fused(p, m, splat(1.4249322787e-1f));
    p = fused(p, m, splat(-1.6668057665e-1f));
    p = fused(p, m, splat(2.0000714765e-1f));
    p = fused(p, m, splat(-2.4999993993e-1f));
    p = fused(p, m, splat(3.3333331174e-1f));
    floats fe = __builtin_convertvector(e, floats);
    floats y = fused(splat(-0.5f), z, fused(p * m, z, fe * splat(-2.12194440e-4f)));
    return fused(fe, splat(0.693359375f), m + y);
}

#endif
