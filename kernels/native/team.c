/* The one team of this process; see team.h.
 *
 * Who writes what: `ticket` is written by members that take a chunk, and by the one that ends a loop; `done` by members that
 * end a chunk; `call` by the caller, which opens and closes it, and by members that join and leave. A chunk's writes are
 * published by the addition to `done` (release), which the loop's last member acquires before it publishes the next
 * loop in `ticket` (release); whoever waits acquires `ticket`. The caller's arguments are published by `call`.
 */
#define _GNU_SOURCE
#include "team.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

extern int omp_get_max_threads(void);

enum { MAX_THREADS = 256, SPINS = 2000, CHUNKS_PER_THREAD = 2 };
/* SPINS: pauses before a thread sleeps, 20 to 80 us. A chunk takes less; a thread that was put aside takes longer. */

#define OPEN ((uint64_t)1 << 31)
#define MEMBERS (OPEN - 1)

static struct {
    _Alignas(64) _Atomic uint64_t ticket; /* number of the loop in the upper half, its next chunk in the lower */
    _Alignas(64) _Atomic int64_t done;    /* chunks of the loop that have ended */
    _Alignas(64) _Atomic uint64_t call; /* number of the call in the upper half, OPEN, members other than the caller */
    _Atomic uint32_t loop_word, call_word,
        left_word; /* futexes: change when a loop ends, a call opens, a member leaves */
    _Atomic int32_t loop_sleepers, call_sleepers, left_sleepers;
    /* Of the open call. Writer: its caller, before it opens it. */
    void (*body)(struct member *, void *);
    void *context;
    uint32_t first_loop;
    _Atomic int32_t num_members; /* the caller included */
    pthread_mutex_t busy;        /* held by the caller */
    int num_threads;             /* that were started; guarded by `busy` */
    pid_t process;               /* that started them */
} team = {.busy = PTHREAD_MUTEX_INITIALIZER};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep while `word` is `seen`. Spurious returns are allowed. */
static void sleep_on(_Atomic uint32_t *word, uint32_t seen, _Atomic int32_t *sleepers) {
    atomic_fetch_add(sleepers, 1); /* before the word is read again: who changes it after that sees a sleeper */
    if (atomic_load(word) == seen) syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
    atomic_fetch_sub(sleepers, 1);
}

static void change(_Atomic uint32_t *word, _Atomic int32_t *sleepers) {
    atomic_fetch_add(word, 1);
    if (atomic_load(sleepers)) syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0);
}

/* Wait until the loop has ended, because another member has its last chunk. */
static void await_loop(uint32_t loop) {
    for (int spins = 0;; spins++) {
        uint32_t seen = atomic_load(&team.loop_word);
        if ((uint32_t)(atomic_load_explicit(&team.ticket, memory_order_acquire) >> 32) != loop) return;
        if (spins < SPINS)
            relax();
        else
            sleep_on(&team.loop_word, seen, &team.loop_sleepers);
    }
}

/* The first item of a chunk, or the number of items where there is no such chunk. */
static inline int64_t first_item(const struct share *s, int64_t chunk) {
    const int64_t first = chunk * s->size + (chunk < s->larger ? chunk : s->larger);
    return first < s->count ? first : s->count;
}

int team_take(struct member *m, struct share *s) {
    if (m->alone || s->count <= 0) {
        int first = s->end < s->count;
        s->begin = 0;
        s->end = s->follow = s->count > 0 ? s->count : 0;
        return first;
    }
    if (s->end && atomic_fetch_add_explicit(&team.done, 1, memory_order_acq_rel) + 1 == s->chunks) {
        atomic_store_explicit(&team.done, 0, memory_order_relaxed);
        atomic_store_explicit(&team.ticket, (uint64_t)(s->loop + 1) << 32, memory_order_release);
        change(&team.loop_word, &team.loop_sleepers);
    }
    uint64_t ticket = atomic_load_explicit(&team.ticket, memory_order_acquire);
    while ((uint32_t)(ticket >> 32) == s->loop) {
        const int64_t next = (int64_t)(ticket & 0xffffffff);
        if (next >= s->chunks) {
            await_loop(s->loop);
            break;
        }
        if (atomic_compare_exchange_weak_explicit(&team.ticket, &ticket, ticket + 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            s->begin = first_item(s, next);
            s->end = first_item(s, next + 1);
            s->follow = first_item(s, next + m->threads);
            return 1;
        }
    }
    m->loop = s->loop + 1;
    return 0;
}

/* Join the open call, unless it is `last`, do its work, and leave. 0: there was none to join. */
static int join(uint32_t *last) {
    uint64_t call = atomic_load_explicit(&team.call, memory_order_acquire);
    do {
        if (!(call & OPEN) || (uint32_t)(call >> 32) == *last) return 0;
        if ((int64_t)(call & MEMBERS) + 1 >= atomic_load(&team.num_members))
            return 0; /* threads from a time when there were to be more */
    } while (!atomic_compare_exchange_weak_explicit(&team.call, &call, call + 1, memory_order_acq_rel,
                                                    memory_order_acquire));
    *last = (uint32_t)(call >> 32);
    struct member m = {.loop = team.first_loop,
                       .chunks = CHUNKS_PER_THREAD * team.num_members,
                       .threads = team.num_members,
                       .alone = 0};
    team.body(&m, team.context);
    call = atomic_fetch_sub_explicit(&team.call, 1, memory_order_acq_rel) - 1;
    if (!(call & OPEN) && !(call & MEMBERS)) change(&team.left_word, &team.left_sleepers);
    return 1;
}

static void *work(void *unused) {
    uint32_t last = 0;
    for (int spins = 0;; spins++) {
        uint32_t seen = atomic_load(&team.call_word);
        if (join(&last))
            spins = 0;
        else if (spins < SPINS)
            relax();
        else
            sleep_on(&team.call_word, seen, &team.call_sleepers);
    }
    return unused;
}

/* Have `wanted` threads next to the caller, or as many as the system gives. A forked child has none of its parent's. */
static void start_threads(int wanted) {
    if (team.process != getpid()) {
        team.process = getpid();
        team.num_threads = 0;
        atomic_store(&team.call, 0);
        team.call_sleepers = team.loop_sleepers = team.left_sleepers = 0;
    }
    if (team.num_threads >= wanted) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's thread */
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (team.num_threads < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, work, 0)) break;
        pthread_setname_np(thread, "lockstep-team");
        team.num_threads++;
    }
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* Close the call, and wait for the members that are still in it: they may read the caller's memory. */
static void close_call(void) {
    atomic_fetch_and_explicit(&team.call, ~OPEN, memory_order_acq_rel);
    for (int spins = 0;; spins++) {
        uint32_t seen = atomic_load(&team.left_word);
        if (!(atomic_load_explicit(&team.call, memory_order_acquire) & MEMBERS)) return;
        if (spins < SPINS)
            relax();
        else
            sleep_on(&team.left_word, seen, &team.left_sleepers);
    }
}

void team_run(void (*body)(struct member *, void *), void *context) {
    int threads = omp_get_max_threads();
    threads = threads > MAX_THREADS ? MAX_THREADS : threads;
    if (threads < 2 || pthread_mutex_trylock(&team.busy)) {
        struct member alone = {.loop = 0, .chunks = 1, .threads = 1, .alone = 1};
        body(&alone, context);
        return;
    }
    start_threads(threads - 1);
    struct member m = {.loop = (uint32_t)(atomic_load_explicit(&team.ticket, memory_order_relaxed) >> 32),
                       .chunks = CHUNKS_PER_THREAD * threads,
                       .threads = threads,
                       .alone = 0};
    team.num_members = threads;
    team.body = body;
    team.context = context;
    team.first_loop = m.loop;
    uint64_t number = (atomic_load_explicit(&team.call, memory_order_relaxed) >> 32) + 1;
    atomic_store_explicit(&team.call, (number << 32) | OPEN, memory_order_release);
    change(&team.call_word, &team.call_sleepers);
    body(&m, context);
    close_call();
    pthread_mutex_unlock(&team.busy);
}
