/* Litmus tests: the pairs of atomics that shared_mem/native/flags.c relies on, on the cores of this machine.
 *
 *     litmus NAME ROUNDS    prints how many rounds had the outcome that the orders forbid
 *
 * Two threads run a round each time that both have come to it. Invariant: the orders are those of flags.c, by the comments
 * there; `store_buffering_relaxed` has no fence, so its outcome is allowed, and shows that a machine can produce it.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>

struct line {
    _Alignas(128) _Atomic uint64_t word;
};
static struct line data[2], flag, parked, turn[2];
static uint64_t rounds, forbidden;

enum { RELAX = memory_order_relaxed };

static uint64_t get(struct line *line) { return atomic_load_explicit(&line->word, RELAX); }
static void put(struct line *line, uint64_t value) { atomic_store_explicit(&line->word, value, RELAX); }

/* Both threads are in round n after it. Yields, so that one core can run both. */
static void meet(int me, uint64_t n) {
    atomic_store_explicit(&turn[me].word, n, memory_order_release);
    for (int spins = 0; atomic_load_explicit(&turn[!me].word, memory_order_acquire) < n; spins++)
        if (spins > 200) sched_yield();
}

/* (A) data, then its flag with release; the reader loads the flag with acquire. */
static void passing_writer(uint64_t n) {
    put(&data[0], n);
    put(&data[1], n);
    atomic_store_explicit(&flag.word, n, memory_order_release);
}
static void passing_reader(uint64_t n) {
    const uint64_t seen = atomic_load_explicit(&flag.word, memory_order_acquire);
    const uint64_t second = get(&data[1]), first = get(&data[0]);
    forbidden += seen == n && (first != n || second != n);
}

/* (S) ls_post: the entry's sequence 0, release fence, contents, sequence with release. ls_records: acquire, copy, acquire
 * fence, the sequence again. */
static void seqlock_writer(uint64_t n) {
    put(&flag, 0);
    atomic_thread_fence(memory_order_release);
    put(&data[0], n);
    put(&data[1], n);
    atomic_store_explicit(&flag.word, n, memory_order_release);
}
static void seqlock_reader(uint64_t n) {
    (void)n;
    const uint64_t seen = atomic_load_explicit(&flag.word, memory_order_acquire);
    const uint64_t first = get(&data[0]), second = get(&data[1]);
    atomic_thread_fence(memory_order_acquire);
    if (seen && get(&flag) == seen) forbidden += first != seen || second != seen;
}

/* (D) sleeper and waker: one of them sees the other's store. */
static uint64_t saw[2];
static void buffering_sleeper(uint64_t n) {
    put(&parked, n);
    atomic_thread_fence(memory_order_seq_cst);
    saw[0] = get(&flag) == n;
}
static void buffering_waker(uint64_t n) {
    put(&flag, n);
    atomic_thread_fence(memory_order_seq_cst);
    saw[1] = get(&parked) == n;
}
static void relaxed_sleeper(uint64_t n) {
    put(&parked, n);
    saw[0] = get(&flag) == n;
}
static void relaxed_waker(uint64_t n) {
    put(&flag, n);
    saw[1] = get(&parked) == n;
}

static const struct test {
    const char *name;
    void (*run[2])(uint64_t);
    int buffering;
} tests[] = {
    {"message_passing", {passing_writer, passing_reader}, 0},
    {"seqlock", {seqlock_writer, seqlock_reader}, 0},
    {"store_buffering", {buffering_sleeper, buffering_waker}, 1},
    {"store_buffering_relaxed", {relaxed_sleeper, relaxed_waker}, 1},
};
static const struct test *test;

static void *thread(void *number) {
    const int me = (int)(intptr_t)number;
    for (uint64_t n = 1; n <= rounds; n++) {
        meet(me, 2 * n);
        test->run[me](n);
        meet(me, 2 * n + 1);
        if (!me && test->buffering) forbidden += !saw[0] && !saw[1];
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (!strcmp(argv[1], tests[i].name)) test = tests + i;
    rounds = strtoull(argv[2], NULL, 10);
    pthread_t other;
    if (!test || pthread_create(&other, NULL, thread, (void *)1)) return 2;
    thread((void *)0);
    pthread_join(other, NULL);
    printf("%llu\n", (unsigned long long)forbidden);
    return 0;
}
