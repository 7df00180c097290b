/* Reads products over blocks from stdin, computes each through the library's own choice of a unit, and writes the results.
 *
 * A product is eight int64 (kind, outputs, inputs, rows, then bytes of quants, scales, offsets and bias), those bytes, and the
 * rows in fp32; its result is fp32 [rows][outputs]. Exits with 2 for a CPU without products over blocks. With an argument, it
 * writes only the level of the CPU (see dispatch.c).
 */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define VARIANT(name) name##_of_this_program
#include "blocks.h"

#include <stdio.h>
#include <stdlib.h>

int32_t lockstep_cpu_level(void);
void lockstep_block_linear(const struct block_linear_args *);

static void *bytes(int64_t count) {
    if (!count) return NULL;
    void *memory = aligned_alloc(64, (size_t)(count + 63) & ~(size_t)63);
    if (!memory || fread(memory, 1, (size_t)count, stdin) != (size_t)count) exit(3);
    return memory;
}

int main(int argc, char **argv) {
    int64_t head[8];
    (void)argv;
    if (argc > 1) return printf("%d\n", lockstep_cpu_level()) < 0;
    if (lockstep_cpu_level() < 3) return 2;
    while (fread(head, sizeof head, 1, stdin) == 1) {
        const int64_t rows = head[3];
        struct block_linear_args a = {.rows = rows};
        a.weights.kind = head[0];
        a.weights.outputs = head[1];
        a.weights.inputs = head[2];
        a.weights.quants = bytes(head[4]);
        a.weights.scales = bytes(head[5]);
        a.weights.offsets = bytes(head[6]);
        a.weights.bias = bytes(head[7]);
        a.x = bytes(rows * head[2] * 4);
        a.out = calloc((size_t)(rows * head[1]), 4);
        a.scratch = calloc((size_t)block_rows_bytes(rows, head[2]), 1);
        lockstep_block_linear(&a);
        if (fwrite(a.out, 4, (size_t)(rows * head[1]), stdout) != (size_t)(rows * head[1])) return 3;
    }
    return 0;
}
