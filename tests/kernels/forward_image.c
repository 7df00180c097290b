/* Reads whole forwards from stdin, runs each through the library's own choice of a unit, and writes their logits.
 *
 * A forward is six int64 (bytes of its memory, pointers in it, where its arguments, its scratch and its logits begin, bytes of
 * the logits), the memory, and two int64 for each pointer: where it is, and what it points to, both from the memory's begin. A
 * structure has the same layout on every 64-bit machine with this order of bytes. Exits with 2 for a CPU without products over
 * blocks. With a seed, a position and a number of tokens, a multiple of 64, it writes the noise of sampling instead.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct forward_args;

int32_t lockstep_cpu_level(void);
int64_t lockstep_forward_scratch(const struct forward_args *);
void lockstep_forward(const struct forward_args *);
void lockstep_gumbel(uint64_t seed, uint32_t position, int64_t n, float *out);

static void take(void *to, int64_t count) {
    if (fread(to, 1, (size_t)count, stdin) != (size_t)count) exit(3);
}

static void *room(int64_t count) {
    void *memory = aligned_alloc(64, (size_t)(count + 127) & ~(size_t)63);
    if (!memory) exit(4);
    return memory;
}

static int write_noise(char **argv) {
    const int64_t count = atoll(argv[2]);
    float *noise = room(count * 4);
    lockstep_gumbel(strtoull(argv[0], NULL, 10), (uint32_t)strtoul(argv[1], NULL, 10), count, noise);
    return fwrite(noise, 4, (size_t)count, stdout) == (size_t)count ? 0 : 3;
}

int main(int argc, char **argv) {
    int64_t head[6];
    if (lockstep_cpu_level() < 3) return 2;
    if (argc == 4) return write_noise(argv + 1);
    while (fread(head, sizeof head, 1, stdin) == 1) {
        uint8_t *memory = room(head[0]);
        take(memory, head[0]);
        for (int64_t i = 0; i < head[1]; i++) {
            int64_t at[2];
            take(at, sizeof at);
            uint8_t *target = memory + at[1];
            memcpy(memory + at[0], &target, sizeof target);
        }
        const struct forward_args *args = (const struct forward_args *)(memory + head[2]);
        void *scratch = room(lockstep_forward_scratch(args));
        memcpy(memory + head[3], &scratch, sizeof scratch);
        lockstep_forward(args);
        if (fwrite(memory + head[4], 1, (size_t)head[5], stdout) != (size_t)head[5]) return 3;
        free(scratch);
        free(memory);
    }
    return 0;
}
