/* What one core does at most: products of bytes in registers and tiles, without memory. Prints a name and MAC/ns a line.
 *
 * Built by bench_products.py for the CPU that it runs on. Not responsible for: products over blocks.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 40, REPEATS = 4000 };

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

#define PEAK(name, macs, body)                                                                                         \
    do {                                                                                                               \
        double best = 1e30;                                                                                            \
        for (int r = 0; r < ROUNDS; r++) {                                                                             \
            double begin = now_ns();                                                                                   \
            for (int i = 0; i < REPEATS; i++) body double took = now_ns() - begin;                                     \
            best = took < best ? took : best;                                                                          \
        }                                                                                                              \
        printf("%s %.0f\n", name, (double)(macs) * REPEATS / best);                                                    \
    } while (0)

#if defined(__x86_64__)
/* Twelve sums hide the latency of an instruction; what the registers hold does not change its time. */
#define TWELVE(op)                                                                                                     \
    __asm__ volatile(op("0") op("1") op("2") op("3") op("4") op("5") op("6") op("7") op("8") op("9") op("10")          \
                         op("11")::                                                                                    \
                             : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",         \
                               "xmm10", "xmm11", "xmm12")

#if defined(__AVX512VNNI__)
#define DOT(sum) "vpdpbusd %%zmm15, %%zmm14, %%zmm" sum "\n\t"
#define VECTOR_MACS (12 * 64)
#elif defined(__AVXVNNI__)
#define DOT(sum) "%{vex%} vpdpbusd %%ymm15, %%ymm14, %%ymm" sum "\n\t"
#define VECTOR_MACS (12 * 32)
#elif defined(__AVX2__)
#define DOT(sum) "vpmaddubsw %%ymm15, %%ymm14, %%ymm12\n\tvpaddw %%ymm12, %%ymm" sum ", %%ymm" sum "\n\t"
#define VECTOR_MACS (12 * 32)
#endif

static void vector_peak(void) {
#if defined(DOT)
    PEAK("vector", VECTOR_MACS, { TWELVE(DOT); });
#endif
}

#if defined(__AMX_INT8__)
/* A block of 32 inputs fills half of a tile's width. */
static void matrix_peak(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return;
    for (int t = 0; t < 8; t++) {
        config.rows[t] = t < 6 ? 16 : 8;
        config.bytes[t] = t < 4 || t > 5 ? 64 : 32;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
    PEAK("matrix", 4 * 16 * 16 * 32, {
        __asm__ volatile("tdpbssd %%tmm6, %%tmm4, %%tmm0\n\ttdpbssd %%tmm7, %%tmm5, %%tmm1\n\t"
                         "tdpbssd %%tmm7, %%tmm4, %%tmm2\n\ttdpbssd %%tmm6, %%tmm5, %%tmm3" ::
                             : "memory");
    });
    __asm__ volatile("tilerelease" ::: "memory");
}
#else
static void matrix_peak(void) {}
#endif
#else
static void vector_peak(void) {}
static void matrix_peak(void) {}
#endif

int main(void) {
    vector_peak();
    matrix_peak();
    return 0;
}
