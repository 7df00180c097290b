/* Runs LLVMFuzzerTestOneInput where libFuzzer is not: `program [-flag=value ...] [file or folder ...]`.
 *
 * Reads the inputs of all files and folders, runs each, and then inputs that are made of them by changes at random, until
 * -runs or -max_total_time (seconds) is over; with neither, only the given inputs. -seed=N repeats the same inputs. One
 * input that ends the process (a sanitizer's report, abort) is written to -artifact_prefix=P first. Other flags of
 * libFuzzer are ignored. Not responsible for: coverage, hangs.
 */
#define _GNU_SOURCE
#include "input.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_INPUTS = 4096, MAX_BYTES = 4096 };

static struct {
    uint8_t *data;
    size_t size;
} inputs[MAX_INPUTS];
static size_t num_inputs;
static uint8_t current[MAX_BYTES];
static size_t current_size;
static char artifact[4096];
static uint64_t state = 1;

void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static uint64_t next(void) { /* xorshift64* (Vigna 2016) */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545F4914F6CDD1Dull;
}

static size_t below(size_t limit) { return limit ? (size_t)(next() % limit) : 0; }

static void keep_input(void) {
    const int file = open(artifact, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file < 0 || write(file, current, current_size) != (ssize_t)current_size) return;
    close(file);
    dprintf(STDERR_FILENO, "Test unit written to %s\n", artifact);
}

static void aborted(int number) {
    keep_input();
    signal(number, SIG_DFL);
    raise(number);
}

static void run(void) {
    /* A copy of exactly that size, so that a read after the input is seen. */
    uint8_t *copy = malloc(current_size ? current_size : 1);
    if (!copy) abort();
    memcpy(copy, current, current_size);
    LLVMFuzzerTestOneInput(copy, current_size);
    free(copy);
}

static void read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return;
    if (num_inputs < MAX_INPUTS) {
        uint8_t *data = malloc(MAX_BYTES);
        if (!data) abort();
        inputs[num_inputs].data = data;
        inputs[num_inputs++].size = fread(data, 1, MAX_BYTES, file);
    }
    fclose(file);
}

static int compare(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void read_path(const char *path) {
    struct stat about;
    if (stat(path, &about)) return;
    if (!S_ISDIR(about.st_mode)) {
        read_file(path);
        return;
    }
    DIR *folder = opendir(path);
    if (!folder) return;
    char *names[MAX_INPUTS];
    size_t count = 0;
    for (struct dirent *entry; (entry = readdir(folder)) && count < MAX_INPUTS;) {
        char *name = NULL;
        if (entry->d_name[0] == '.') continue;
        if (asprintf(&name, "%s/%s", path, entry->d_name) < 0) abort();
        names[count++] = name;
    }
    closedir(folder);
    qsort(names, count, sizeof *names, compare);
    for (size_t i = 0; i < count; i++) {
        read_file(names[i]);
        free(names[i]);
    }
}

static void make_input(void) {
    current_size = 0;
    if (num_inputs && next() % 16) {
        const size_t i = below(num_inputs);
        current_size = inputs[i].size;
        memcpy(current, inputs[i].data, current_size);
    }
    for (size_t changes = 1 + below(8); changes; changes--) {
        const size_t at = below(current_size + 1);
        switch (next() % 6) {
        case 0: /* one bit */
            if (at < current_size) current[at] ^= (uint8_t)(1u << next() % 8);
            break;
        case 1: /* one byte */
            if (at < current_size) current[at] = (uint8_t)next();
            break;
        case 2: { /* a word with a meaning */
            static const uint64_t words[] = {0, 1, 2, 5, 6, 15, 16, 17, 255, 1ull << 31, 1ull << 32, 1ull << 63, ~0ull};
            const uint64_t word = words[below(sizeof words / sizeof *words)];
            const size_t size = (size_t)1 << next() % 4;
            if (at + size <= current_size) memcpy(current + at, &word, size);
            break;
        }
        case 3: /* more bytes */
            for (size_t n = below(64); n && current_size < MAX_BYTES; n--) current[current_size++] = (uint8_t)next();
            break;
        case 4: /* a part of another input */
            if (num_inputs) {
                const size_t i = below(num_inputs), from = below(inputs[i].size), n = below(inputs[i].size - from + 1);
                if (at + n <= MAX_BYTES) {
                    memcpy(current + at, inputs[i].data + from, n);
                    if (at + n > current_size) current_size = at + n;
                }
            }
            break;
        default: /* the end */
            current_size = at;
        }
    }
}

int main(int argc, char **argv) {
    uint64_t runs = 0, seconds = 0, done = 0;
    const char *prefix = "./";
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') read_path(argv[i]);
        sscanf(argv[i], "-runs=%lu", &runs);
        sscanf(argv[i], "-max_total_time=%lu", &seconds);
        sscanf(argv[i], "-seed=%lu", &state);
        if (!strncmp(argv[i], "-artifact_prefix=", 17)) prefix = argv[i] + 17;
    }
    state = state ? state * 0x9E3779B97F4A7C15ull : 1;
    snprintf(artifact, sizeof artifact, "%scrash-input", prefix);
    if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(keep_input);
    signal(SIGABRT, aborted);
    for (size_t i = 0; i < num_inputs; i++, done++) {
        memcpy(current, inputs[i].data, current_size = inputs[i].size);
        run();
    }
    struct timespec begun, now, told = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &begun);
    while ((runs || seconds) && (!runs || done < runs)) {
        if (done % 1024 == 0) {
            clock_gettime(CLOCK_MONOTONIC, &now);
            if (seconds && (uint64_t)(now.tv_sec - begun.tv_sec) >= seconds) break;
            if (now.tv_sec != told.tv_sec) fprintf(stderr, "executions %lu\n", done);
            told = now;
        }
        make_input();
        run();
        done++;
    }
    fprintf(stderr, "executed %lu\n", done);
    return 0;
}
