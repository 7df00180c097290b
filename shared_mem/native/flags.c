/* All ordering of the shared segment: post, await, wait for a request, publish.
 *
 * Invariant: data first, flag last. A reader that sees a flag (acquire) sees all that its writer wrote before it (release). An
 * answer's flag is its sequence. An answer that was published with rows missing is late: a row that is added
 * later has its own flag: its kind, which changes once from DEFER to its value. The answer's last word, `late`, changes
 * from the sequence to 0 after the last of these rows.
 *
 * Sleeping. A side that waits spins first, then parks on a futex. To lose no wake-up both sides follow Dekker's pattern:
 *
 *     sleeper:  parked = 1;  fence(seq_cst);  futex_wait(word, value read before the last check)
 *     waker:    word = new;  fence(seq_cst);  if (parked) futex_wake(word)
 *
 * One fence is first in the single order of seq_cst fences. If it is the sleeper's, the waker sees parked = 1 and wakes. If
 * it is the waker's, the kernel's comparison inside futex_wait sees the new word and returns at once. Between comparison and
 * sleep the kernel holds the lock that futex_wake needs. With only release/acquire both sides could read the old value.
 * Futexes are shared (no FUTEX_PRIVATE_FLAG): the kernel knows them by file and offset, not by address.
 *
 * Pairs. Every order of this file that is not relaxed is in one row: function and order of the writer, then of the reader
 * that sees what came before it. tests/shared_mem/test_pairs.py compares the rows with the code.
 *
 *     REQ_SEQ     ls_post release            ls_wait_req acquire, ls_load64   the record; the end of the engine's reads of the mask
 *                                                                             half that the next post but one uses again
 *     REC seq     ls_post release            ls_records acquire               the contents of the entry
 *     REC seq 0   ls_post release fence      ls_records acquire fence         a reader that saw new contents sees 0 or a newer
 *                                                                             sequence after its copy
 *     ANS seq     ls_put_answer release      take_answer acquire              mask rows, kinds, tokens, `late`
 *     ANS kind    ls_add_rows release        take_answer acquire              one added row: mask and token
 *     ANS late    ls_add_rows release        take_answer acquire              all added rows, because kinds are read after it
 *     DOORBELL    ls_ring release            ls_await acquire                 answers: a look after the bell finds them
 *     ABORT       ls_set_abort seq_cst       ls_await acquire                 nothing but itself
 *     park        ls_wait_req seq_cst fence  ls_post seq_cst fence            GRAMMAR_PARKED and REQ_SEQ, as above
 *     park        ls_await seq_cst fence     ls_ring seq_cst fence            ENGINE_PARKED and DOORBELL, as above
 *     words       ls_store64 release         ls_load64 acquire                PERMISSIVE, heartbeats, `working`: each alone
 *     words       ls_store32 release         ls_load32 acquire                the same
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "flags.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LONG_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2,
               "only lock-free atomics are address-free, which memory shared by two processes needs");
_Static_assert(sizeof(_Atomic uint64_t) == 8 && sizeof(_Atomic uint32_t) == 4 && sizeof(_Atomic uint16_t) == 2,
               "an atomic word has the size of the word in the layout");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "the layout is little-endian, and a futex looks at the low half of a 64-bit word");

/* Longest single sleep of the engine. The abort word is not the word it sleeps on, so it must be polled. */
#define LS_PARK_SLICE_NS 2000000LL
#define LS_SPINS_PER_CLOCK 16
/* An engine without a post for so long is idle; the watcher of the worker then polls at the second interval. */
#define LS_IDLE_NS 100000000LL
#define LS_IDLE_LOOK_NS 10000000LL

#define ANS_SLOT_GEN 8
#define ANS_KIND 12

#define REC_SLOT_GEN 8
#define REC_COMMIT_POS 12
#define REC_COUNTS 16 /* n_commit | n_draft << 16 | stage << 24 */
#define REC_NEED_ROWS 20
#define REC_TOKENS 24

#define HEAD_COUNT 8
#define HEAD_SLOTS 16

typedef _Atomic uint64_t word64;
typedef _Atomic uint32_t word32;
typedef _Atomic uint16_t word16;
typedef _Atomic uint8_t word8;

static inline word64 *at64(const void *base, uint64_t offset) { return (word64 *)((uintptr_t)base + offset); }
static inline word32 *at32(const void *base, uint64_t offset) { return (word32 *)((uintptr_t)base + offset); }
static inline word16 *at16(const void *base, uint64_t offset) { return (word16 *)((uintptr_t)base + offset); }

static inline word8 *at8(const void *base, uint64_t offset) { return (word8 *)((uintptr_t)base + offset); }

static inline uint32_t get32(const void *base, uint64_t offset) {
    return atomic_load_explicit(at32(base, offset), memory_order_relaxed);
}
static inline void put32(void *base, uint64_t offset, uint32_t value) {
    atomic_store_explicit(at32(base, offset), value, memory_order_relaxed);
}

static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` is a no-op on most cores; isb gives way to the sibling */
#else
    __asm__ volatile("" ::: "memory");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Returns on a wake-up, on a changed word, at the time, on a signal, or for no reason: the caller looks again. */
static void futex_wait_until(word32 *word, uint32_t seen, int64_t until_ns) {
    struct timespec t = {.tv_sec = until_ns / 1000000000LL, .tv_nsec = until_ns % 1000000000LL};
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, &t, NULL, FUTEX_BITSET_MATCH_ANY);
}

static void futex_wake(word32 *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static inline uint8_t *ring_entry(const struct ls_view *v, uint64_t seq) {
    return v->rec + (seq % v->num_recs) * v->rec_entry_stride;
}
static inline uint8_t *record_of(const struct ls_view *v, uint8_t *entry, uint32_t slot) {
    return entry + v->rec_head_bytes + (uint64_t)slot * v->rec_stride;
}
static inline uint8_t *answer_of(const struct ls_view *v, uint32_t slot) {
    return v->ans + (uint64_t)slot * v->ans_stride;
}

int32_t ls_abi(void) { return LS_ABI; }

/* ---- engine step ---- */

static int32_t check_lane(const struct ls_post_args *a, int32_t i) {
    int32_t rows = (int32_t)a->view->num_rows;
    if ((uint32_t)a->slots[i] >= a->view->num_slots) return LS_BAD_SLOT;
    if (a->n_commit[i] < 0 || a->n_commit[i] > rows) return LS_BAD_N_COMMIT;
    if (a->n_draft[i] < 0 || a->n_draft[i] >= rows) return LS_BAD_N_DRAFT;
    if (a->commit_pos[i] < 0) return LS_BAD_COMMIT_POS;
    return LS_OK;
}

static void write_record(const struct ls_post_args *a, int32_t i, uint8_t *record, uint64_t seq) {
    const int32_t *tokens = a->tokens + (int64_t)i * 2 * a->view->num_rows;
    int32_t count = a->n_commit[i] + a->n_draft[i];
    atomic_store_explicit(at64(record, 0), seq, memory_order_relaxed);
    put32(record, REC_SLOT_GEN, (uint32_t)a->slot_gens[i]);
    put32(record, REC_COMMIT_POS, (uint32_t)a->commit_pos[i]);
    put32(record, REC_COUNTS,
          (uint32_t)a->n_commit[i] | (uint32_t)a->n_draft[i] << 16 | (uint32_t)(a->stage & 0xff) << 24);
    put32(record, REC_NEED_ROWS, a->need_rows[i]);
    for (int32_t t = 0; t < count; t++) put32(record, REC_TOKENS + 4u * (uint32_t)t, (uint32_t)tokens[t]);
}

void ls_post(void *post_args) {
    struct ls_post_args *a = post_args;
    const struct ls_view *v = a->view;
    uint32_t count = 0;
    /* Nothing is published in the error and empty cases, and an await on `current` must not take an old answer for its own. */
    a->counter->current = 0;
    a->bad_lane = -1;
    for (int32_t i = 0; i < a->batch; i++) {
        if (a->slots[i] < 0) continue;
        a->status = check_lane(a, i);
        if (a->status != LS_OK) {
            a->bad_lane = i;
            return;
        }
        count++;
    }
    if (count > v->num_slots) { /* the same slot in two lanes; the head has no room for more */
        a->status = LS_BAD_SLOT;
        return;
    }
    a->status = count ? LS_OK : LS_EMPTY;
    if (!count) return;

    uint64_t seq = a->counter->last + 1;
    uint8_t *entry = ring_entry(v, seq);
    /* A seqlock's writer: a reader that is num_recs after must notice that its entry is being overwritten. */
    atomic_store_explicit(at64(entry, 0), 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    uint32_t k = 0;
    for (int32_t i = 0; i < a->batch; i++) {
        if (a->slots[i] < 0) continue;
        uint32_t slot = (uint32_t)a->slots[i];
        atomic_store_explicit(at16(entry, HEAD_SLOTS + 2 * k++), (uint16_t)slot, memory_order_relaxed);
        write_record(a, i, record_of(v, entry, slot), seq);
    }
    put32(entry, HEAD_COUNT, count);
    atomic_store_explicit(at64(entry, 0), seq, memory_order_release);

    a->counter->last = a->counter->current = seq;
    atomic_store_explicit(at64(v->words, LS_REQ_SEQ), seq, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (get32(v->words, LS_GRAMMAR_PARKED)) futex_wake(at32(v->words, LS_REQ_SEQ));
}

static void defer_lane(struct ls_await_args *a, int32_t i) {
    int64_t row = (int64_t)i * a->view->num_rows;
    for (uint32_t r = 0; r < a->view->num_rows; r++) {
        a->kinds[row + r] = LS_KIND_DEFER;
        a->forced[row + r] = -1;
    }
    a->missing++;
}

/* 1 when lane i is done. The rows that an answer has when its sequence is stored are written again only after a newer post,
 * and newer posts come from the thread that runs this. A row that is added to a late answer changes once, flag last. An
 * answer with a newer sequence, or for another owner of the slot, counts as missing: its rows may be in the other buffer. */
static int take_answer(struct ls_await_args *a, uint64_t seq, int32_t i) {
    const struct ls_view *v = a->view;
    int64_t row = (int64_t)i * v->num_rows;
    if (a->slots[i] < 0) {
        for (uint32_t r = 0; r < v->num_rows; r++) {
            a->kinds[row + r] = LS_KIND_ALL;
            a->forced[row + r] = -1;
        }
        return 1;
    }
    if (seq == 0 || (uint32_t)a->slots[i] >= v->num_slots) {
        defer_lane(a, i);
        return 1;
    }
    const uint8_t *answer = answer_of(v, (uint32_t)a->slots[i]);
    uint64_t answered = atomic_load_explicit(at64(answer, 0), memory_order_acquire);
    if ((int64_t)(answered - seq) < 0) return 0;
    if (answered != seq || get32(answer, ANS_SLOT_GEN) != (uint32_t)a->slot_gens[i]) {
        defer_lane(a, i);
        return 1;
    }
    /* Read before the kinds: when no row is missing any more, the loop below sees all of them. */
    a->late += atomic_load_explicit(at64(answer, v->ans_late), memory_order_acquire) == seq;
    for (uint32_t r = 0; r < v->num_rows; r++) {
        /* The engine has numbers of its own after LS_KIND_ERROR: a kind that there is not is an error of the row. */
        const uint8_t kind = atomic_load_explicit(at8(answer, ANS_KIND + r), memory_order_acquire);
        a->kinds[row + r] = kind < LS_KINDS ? kind : LS_KIND_ERROR;
        a->forced[row + r] = (int32_t)get32(answer, v->ans_forced + 4 * r);
    }
    return 1;
}

static int32_t take_from(struct ls_await_args *a, uint64_t seq, int32_t i) {
    while (i < a->batch && take_answer(a, seq, i)) i++;
    return i;
}

int32_t ls_take(void *await_args) {
    struct ls_await_args *a = await_args;
    a->missing = a->late = 0;
    a->waited_ns = 0;
    *a->awaited = *a->seq;
    return a->batch - take_from(a, *a->seq, 0);
}

void ls_await(void *await_args) {
    struct ls_await_args *a = await_args;
    const struct ls_view *v = a->view;
    const uint64_t seq = *a->seq;
    a->missing = a->late = 0;
    a->waited_ns = 0;
    *a->awaited = seq;
    /* Lanes are taken in order; all must be there before the step goes on, so the order costs nothing. */
    int32_t i = take_from(a, seq, 0);
    if (i == a->batch) return;

    const int64_t start = now_ns();
    const int64_t deadline = a->deadline_ns ? a->deadline_ns : start + a->timeout_ns;
    word32 *bell = at32(v->words, LS_DOORBELL);
    word32 *parked = at32(v->words, LS_ENGINE_PARKED);
    int64_t now = start;
    for (;;) {
        /* Read before the answers: an answer that comes after them has rung a newer bell, and the futex sees that. */
        uint32_t rung = atomic_load_explicit(bell, memory_order_acquire);
        i = take_from(a, seq, i);
        if (i == a->batch || atomic_load_explicit(at64(v->words, LS_ABORT), memory_order_acquire)) break;
        now = now_ns();
        if (now >= deadline) break;
        if (now - start < a->spin_ns) {
            for (int k = 0; k < LS_SPINS_PER_CLOCK; k++) {
                cpu_relax();
                i = take_from(a, seq, i);
                if (i == a->batch) break;
            }
            continue;
        }
        int64_t until = now + LS_PARK_SLICE_NS;
        atomic_store_explicit(parked, 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
        futex_wait_until(bell, rung, until < deadline ? until : deadline);
        atomic_store_explicit(parked, 0, memory_order_relaxed);
    }
    i = take_from(a, seq, i); /* an answer that came during the last tick is not late */
    while (i < a->batch) {
        if (!take_answer(a, seq, i)) defer_lane(a, i);
        i++;
    }
    a->waited_ns = now_ns() - start;
}

void ls_set_abort(const struct ls_view *v, uint64_t value) {
    atomic_store_explicit(at64(v->words, LS_ABORT), value, memory_order_seq_cst);
    if (value) futex_wake(at32(v->words, LS_DOORBELL));
}

/* ---- grammar process ---- */

static inline void say_working(uint64_t *working, int64_t since) {
    if (working) ls_store64(working, (uint64_t)since);
}

uint64_t ls_wait_req(const struct ls_view *v, uint64_t last, int64_t timeout_ns, int64_t spin_ns, uint64_t *working) {
    word64 *req = at64(v->words, LS_REQ_SEQ);
    word32 *parked = at32(v->words, LS_GRAMMAR_PARKED);
    const int64_t start = now_ns();
    const int64_t deadline = start + timeout_ns;
    uint64_t seq;
    ls_stamp(at64(v->words, LS_HB_GRAMMAR));
    say_working(working, 0);
    for (;;) {
        seq = atomic_load_explicit(req, memory_order_acquire);
        if ((int64_t)(seq - last) > 0) break;
        int64_t now = now_ns();
        if (now >= deadline) break;
        if (now - start < spin_ns) {
            for (int k = 0; k < LS_SPINS_PER_CLOCK; k++) {
                cpu_relax();
                if (atomic_load_explicit(req, memory_order_relaxed) != seq) break;
            }
            continue;
        }
        atomic_store_explicit(parked, 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
        futex_wait_until((word32 *)req, (uint32_t)seq, deadline);
        atomic_store_explicit(parked, 0, memory_order_relaxed);
    }
    ls_stamp(at64(v->words, LS_HB_GRAMMAR));
    say_working(working, now_ns());
    return seq;
}

int32_t ls_overdue(const struct ls_view *v, const uint64_t *working, struct ls_watch *watch, int64_t limit_ns,
                   int64_t timeout_ns) {
    const int64_t start = now_ns();
    int64_t now = start;
    while (now - start < timeout_ns) {
        const int64_t since = (int64_t)ls_load64(working);
        if (since && now - since >= limit_ns) return 1;
        const uint64_t seq = ls_load64(at64(v->words, LS_REQ_SEQ));
        if (seq != watch->seq || !watch->posted_ns) {
            watch->seq = seq;
            watch->posted_ns = now;
        }
        const int idle = now - watch->posted_ns >= LS_IDLE_NS;
        int64_t nap = since ? limit_ns - (now - since) : idle ? LS_IDLE_LOOK_NS : limit_ns / 2;
        /* A caller checks between two calls whether it must end. */
        if (nap > timeout_ns - (now - start)) nap = timeout_ns - (now - start);
        struct timespec t = {.tv_sec = nap / 1000000000LL, .tv_nsec = nap % 1000000000LL};
        nanosleep(&t, NULL);
        now = now_ns();
    }
    return 0;
}

/* The first of the rows 0..n_draft that is wanted, if all rows after it are wanted too; else -1. */
static int32_t first_wanted(uint32_t need_rows, uint32_t n_draft) {
    const uint32_t beyond = 2u << n_draft, wanted = need_rows & (beyond - 1);
    if (!wanted) return -1;
    const uint32_t lowest = wanted & -wanted;
    return wanted + lowest == beyond ? __builtin_ctz(lowest) : -1;
}

/* A seqlock's reader: copy, then look whether the entry is still the same. Counts are bounded while they may be torn. */
void ls_records(struct ls_records_args *a) {
    const struct ls_view *v = a->view;
    uint8_t *entry = ring_entry(v, a->seq);
    a->count = 0;
    a->status = LS_NOT_IN_RING;
    if (atomic_load_explicit(at64(entry, 0), memory_order_acquire) != a->seq) return;
    uint32_t count = get32(entry, HEAD_COUNT);
    if (count > v->num_slots) return;
    for (uint32_t k = 0; k < count; k++) {
        uint32_t slot = atomic_load_explicit(at16(entry, HEAD_SLOTS + 2 * k), memory_order_relaxed);
        if (slot >= v->num_slots) return;
        uint8_t *record = record_of(v, entry, slot);
        uint32_t counts = get32(record, REC_COUNTS);
        uint32_t n_commit = counts & 0xffff, n_draft = counts >> 16 & 0xff;
        if (n_commit > v->num_rows || n_draft >= v->num_rows) return;
        if (atomic_load_explicit(at64(record, 0), memory_order_relaxed) != a->seq) return;
        a->slots[k] = (int32_t)slot;
        a->slot_gens[k] = (int32_t)get32(record, REC_SLOT_GEN);
        a->commit_pos[k] = (int32_t)get32(record, REC_COMMIT_POS);
        a->n_commit[k] = (int32_t)n_commit;
        a->n_draft[k] = (int32_t)n_draft;
        a->stage[k] = (int32_t)(counts >> 24);
        a->need_rows[k] = get32(record, REC_NEED_ROWS);
        a->first[k] = a->stage[k] == LS_PROPOSE ? 0 : first_wanted(a->need_rows[k], n_draft);
        int32_t *tokens = a->tokens + (uint64_t)k * 2 * v->num_rows;
        for (uint32_t t = 0; t < n_commit + n_draft; t++) tokens[t] = (int32_t)get32(record, REC_TOKENS + 4 * t);
    }
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(at64(entry, 0), memory_order_relaxed) != a->seq) return;
    a->count = (int32_t)count;
    a->status = LS_OK;
}

int32_t ls_put_answer(const struct ls_publish_args *a) {
    const struct ls_view *v = a->view;
    uint8_t *answer = answer_of(v, (uint32_t)a->slot);
    /* Only this thread writes the slot's answer. An older sequence would take back what the engine may already read. */
    if ((int64_t)(atomic_load_explicit(at64(answer, 0), memory_order_relaxed) - a->seq) >= 0) return 1;
    put32(answer, ANS_SLOT_GEN, (uint32_t)a->slot_gen);
    atomic_store_explicit(at64(answer, v->ans_late), a->late ? a->seq : 0, memory_order_relaxed);
    for (uint32_t r = 0; r < v->num_rows; r++) {
        atomic_store_explicit(at8(answer, ANS_KIND + r), a->kinds[r], memory_order_relaxed);
        put32(answer, v->ans_forced + 4 * r, (uint32_t)a->forced[r]);
    }
    atomic_store_explicit(at64(answer, 0), a->seq, memory_order_release);
    return 0;
}

void ls_ring(const struct ls_view *v) {
    atomic_fetch_add_explicit(at64(v->words, LS_DOORBELL), 1, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (get32(v->words, LS_ENGINE_PARKED)) futex_wake(at32(v->words, LS_DOORBELL));
}

int32_t ls_publish(const struct ls_publish_args *a) {
    const int32_t stale = ls_put_answer(a);
    if (!stale) ls_ring(a->view);
    return stale;
}

/* Rings no bell: the engine took the answer when its sequence was stored. */
int32_t ls_add_rows(const struct ls_publish_args *a) {
    const struct ls_view *v = a->view;
    uint8_t *answer = answer_of(v, (uint32_t)a->slot);
    if (atomic_load_explicit(at64(answer, 0), memory_order_relaxed) != a->seq) return 1;
    for (uint32_t r = 0; r < v->num_rows; r++) {
        word8 *kind = at8(answer, ANS_KIND + r);
        if (a->kinds[r] == LS_KIND_DEFER || atomic_load_explicit(kind, memory_order_relaxed) != LS_KIND_DEFER) continue;
        put32(answer, v->ans_forced + 4 * r, (uint32_t)a->forced[r]);
        atomic_store_explicit(kind, a->kinds[r], memory_order_release);
    }
    if (!a->late) atomic_store_explicit(at64(answer, v->ans_late), 0, memory_order_release);
    return 0;
}

/* ---- single words ---- */

uint64_t ls_load64(const void *address) { return atomic_load_explicit(at64(address, 0), memory_order_acquire); }
void ls_store64(void *address, uint64_t value) { atomic_store_explicit(at64(address, 0), value, memory_order_release); }
uint32_t ls_load32(const void *address) { return atomic_load_explicit(at32(address, 0), memory_order_acquire); }
void ls_store32(void *address, uint32_t value) { atomic_store_explicit(at32(address, 0), value, memory_order_release); }
void ls_stamp(void *address) { ls_store64(address, (uint64_t)now_ns()); }

int64_t ls_age_ns(const void *address) {
    uint64_t stamp = ls_load64(address);
    /* Unsigned: the other process may have written any number. */
    return stamp ? (int64_t)((uint64_t)now_ns() - stamp) : -1;
}
