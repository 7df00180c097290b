/* The bytes of an input, taken from its front; zeros after its end. */
#ifndef LOCKSTEP_FUZZ_INPUT_H
#define LOCKSTEP_FUZZ_INPUT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct input {
    const uint8_t *data;
    size_t size;
};

static inline void take(struct input *in, void *out, size_t count) {
    const size_t there = count < in->size ? count : in->size;
    memset(out, 0, count);
    if (there) memcpy(out, in->data, there);
    in->data += there;
    in->size -= there;
}

static inline uint8_t take8(struct input *in) {
    uint8_t value;
    take(in, &value, sizeof value);
    return value;
}

static inline uint64_t take64(struct input *in) {
    uint64_t value;
    take(in, &value, sizeof value);
    return value;
}

/* Memory of exactly that size, so that AddressSanitizer sees an access next to it. */
static inline void *room(size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 128, bytes ? bytes : 1)) abort();
    return memory;
}

static inline uint32_t aligned(uint32_t value, uint32_t to) { return (value + to - 1) / to * to; }

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                              \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

#endif
