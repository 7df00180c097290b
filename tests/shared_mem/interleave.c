/* flags.c itself over a simulated memory: `interleave FIRST COUNT` runs so many seeds, in one thread of the system.
 *
 * Engine, grammar process, its slow thread and the engine's watcher are coroutines. Every atomic access of flags.c is a
 * place where the seed may let another one go on. A load may return an old value, as C11 allows: each store is a message
 * with a view, the newest message that its writer had seen at every other address; release and acquire hand views on, and
 * a relaxed access hands on none (the operational release/acquire model; Kaiser et al., ECOOP 2017). So an order that is
 * missing shows on a processor that would keep it. A futex compares and sleeps in one step, under a lock.
 *
 * Invariant: a seed repeats its run. Ends with status 1 and a line when a row, a record or an answer is not its own, when
 * every coroutine sleeps, or when a run does not end. What it does not cover: a load that sees a later store (load
 * buffering), stores that change places at one address, sizes beyond 2 slots, 2 rows, SEQS sequences and one kill.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static uint64_t sim_load(const void *at, int order);
static void sim_store(void *at, uint64_t value, int order);
static uint64_t sim_add(void *at, uint64_t value, int order);
static void sim_fence(int order);
static long sim_futex(void *word, int operation, uint32_t value);
static int sim_clock(struct timespec *t);

#undef atomic_load
#undef atomic_load_explicit
#undef atomic_store_explicit
#undef atomic_fetch_add_explicit
#undef atomic_thread_fence
#define atomic_load(p) atomic_load_explicit(p, memory_order_seq_cst)
#define atomic_load_explicit(p, order) ((__typeof__(*(p) + 0))sim_load(p, order))
#define atomic_store_explicit(p, value, order) sim_store(p, (uint64_t)(value), order)
#define atomic_fetch_add_explicit(p, value, order) sim_add(p, value, order)
#define atomic_thread_fence(order) sim_fence(order)
#define syscall(number, word, operation, value, ...) sim_futex(word, operation, value)
#define clock_gettime(clock, t) sim_clock(t)
#include "flags.c"
#undef syscall
#undef clock_gettime

enum { SLOTS = 2, ROWS = 2, SEQS = 5, WORDS = 2 };
enum { HEAD = 32, RECORD = 48, ENTRY = HEAD + SLOTS * RECORD, FORCED = 16, LATE = 24, ANSWER = 32, MOST_RECS = 2 };
enum { PLACES = 112, MESSAGES = 4096, MOST_OPS = 200000, STACK = 1 << 16, LONG_NS = 1 << 30 };
enum { ENGINE, GRAMMAR, SLOW, WATCHER, ACTORS };

static struct {
    _Alignas(128) uint8_t words[1024], rec[MOST_RECS * ENTRY], ans[SLOTS * ANSWER];
    _Alignas(8) uint8_t mask[2][SLOTS][ROWS][WORDS][4];
} memory; /* addresses alone: the values are in messages */

/* ---- the seed ---- */

static uint64_t seed, state;
static uint32_t switch_share, stale_share, stop_share; /* of 1024 */
static int with_late, with_deadlines, with_crash, num_recs;

static uint32_t draw(uint32_t below) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)((state * 2685821657736338717ULL) >> 33) % below;
}
static int chance(uint32_t of_1024) { return draw(1024) < of_1024; }

static void fail(const char *what, uint64_t seq) {
    printf("seed %llu, sequence %llu: %s\n", (unsigned long long)seed, (unsigned long long)seq, what);
    exit(1);
}

/* ---- memory: messages and views ---- */

typedef struct {
    uint16_t at[PLACES];
} view_t; /* place -> number of the newest message seen there */
static struct message {
    uint64_t value;
    view_t view;
    uint16_t older;
} messages[MESSAGES];
static uint16_t newest[PLACES], place_of[sizeof memory];
static uint32_t num_messages, num_places, ops;
static view_t fences, locks; /* of the single order of seq_cst fences; of the futex locks */

static struct actor {
    ucontext_t context;
    view_t seen, to_acquire, released; /* now; with what an acquire fence would add; at the last release fence */
    void *sleeps_on;
    int runs, timed;
    uint32_t stopped_until; /* of `ops`: the system runs it no earlier, unless no other can go on */
    const int *waits_for;
} actors[ACTORS];
static ucontext_t scheduler;
static int self;

static void join(view_t *view, const view_t *other) {
    for (int p = 0; p < PLACES; p++) view->at[p] = view->at[p] < other->at[p] ? other->at[p] : view->at[p];
}

static uint32_t place(const void *address) {
    const uint64_t at = (uint64_t)((const uint8_t *)address - (const uint8_t *)&memory);
    if (at >= sizeof memory) fail("an address is outside of the segment", at);
    if (!place_of[at]) {
        if (++num_places == PLACES || num_messages == MESSAGES) fail("the run does not end", at);
        place_of[at] = (uint16_t)num_places;
        messages[num_messages] = (struct message){0};
        newest[num_places] = (uint16_t)num_messages++;
        /* Numbers of messages grow, so the first one at a place is seen by everybody. */
    }
    return place_of[at];
}

static void go_on_elsewhere(void) { swapcontext(&actors[self].context, &scheduler); }

static void operation(void) {
    if (++ops > MOST_OPS) fail("the run does not end", ops);
    if (chance(switch_share)) go_on_elsewhere();
}

static int acquires(int order) { return order != memory_order_relaxed && order != memory_order_release; }
static int releases(int order) { return order >= memory_order_release; }

static uint64_t sim_load(const void *address, int order) {
    operation();
    struct actor *me = &actors[self];
    const uint32_t p = place(address);
    uint16_t found = newest[p];
    while (found > me->seen.at[p] && messages[found].older && chance(stale_share)) found = messages[found].older;
    if (found < me->seen.at[p]) found = me->seen.at[p];
    if (me->seen.at[p] < found) me->seen.at[p] = found;
    join(&me->to_acquire, &messages[found].view);
    if (acquires(order)) join(&me->seen, &messages[found].view);
    return messages[found].value;
}

static void append(uint32_t p, uint64_t value, int order, const view_t *carried) {
    if (num_messages == MESSAGES) fail("the run does not end", 0);
    struct actor *me = &actors[self];
    struct message *made = &messages[num_messages];
    made->value = value, made->older = newest[p];
    newest[p] = me->seen.at[p] = me->to_acquire.at[p] = (uint16_t)num_messages++;
    made->view = releases(order) ? me->seen : me->released;
    made->view.at[p] = newest[p];
    if (carried) join(&made->view, carried);
}

static void sim_store(void *address, uint64_t value, int order) {
    operation();
    append(place(address), value, order, NULL);
}

static uint64_t sim_add(void *address, uint64_t value, int order) {
    operation();
    const uint32_t p = place(address);
    const struct message *last = &messages[newest[p]];
    join(&actors[self].to_acquire, &last->view);
    if (acquires(order)) join(&actors[self].seen, &last->view);
    append(p, last->value + value, order, &last->view);
    return last->value;
}

static void sim_fence(int order) {
    operation();
    struct actor *me = &actors[self];
    if (order == memory_order_relaxed) return;
    if (order != memory_order_release) join(&me->seen, &me->to_acquire);
    if (order == memory_order_seq_cst) {
        join(&me->seen, &fences);
        fences = me->seen;
        join(&me->to_acquire, &me->seen);
    }
    if (order != memory_order_acquire) me->released = me->seen;
}

/* ---- time, sleep, locks ---- */

static int64_t clock_ns;

static int sim_clock(struct timespec *t) {
    clock_ns += 1 + draw(with_deadlines ? 400 : 4);
    t->tv_sec = clock_ns / 1000000000LL, t->tv_nsec = clock_ns % 1000000000LL;
    return 0;
}

static void lock(void) { /* and unlock: what is done inside is one step */
    struct actor *me = &actors[self];
    join(&me->seen, &locks);
    join(&me->to_acquire, &locks);
    locks = me->seen;
}

static long sim_futex(void *word, int operation_, uint32_t value) {
    operation();
    lock();
    if (operation_ == FUTEX_WAKE) {
        for (int i = 0; i < ACTORS; i++)
            if (actors[i].sleeps_on == word) actors[i].sleeps_on = NULL;
        return 0;
    }
    /* One step: without an operation between the comparison and the sleep. */
    const uint32_t share = switch_share;
    switch_share = 0;
    const uint32_t now = (uint32_t)sim_load(word, memory_order_relaxed);
    switch_share = share;
    if (now != value) return -1;
    actors[self].sleeps_on = word;
    actors[self].timed = self == ENGINE && (with_deadlines || with_crash);
    go_on_elsewhere();
    lock();
    return 0;
}

static void wait_for(const int *condition) { /* a lock of the process's own orders what comes before and after it */
    lock();
    while (!*condition) {
        actors[self].waits_for = condition;
        go_on_elsewhere();
        actors[self].waits_for = NULL;
    }
    lock();
}

/* ---- both ends ---- */

static struct ls_view view;
static struct ls_counter counter;
static struct {
    int32_t gens[SLOTS];
    int posted[SLOTS];
} truth[SEQS + 1];
static int32_t gens[SLOTS];
static int busy_slot, slow_has_task, slow_is_free, slow_row, lost, drained, restored, ended;
static uint64_t slow_seq, start_seq;

static uint32_t row_of(uint64_t seq, int32_t slot, int32_t row) {
    return (uint32_t)(seq * 4 + (uint64_t)slot * 2 + row);
}

static void fill(uint64_t seq, int32_t slot, int32_t row) {
    for (int w = 0; w < WORDS; w++)
        sim_store(memory.mask[seq & 1][slot][row][w], row_of(seq, slot, row), memory_order_relaxed);
}

static void check_masks(const struct ls_await_args *a, uint64_t seq) {
    for (int32_t i = 0; i < a->batch; i++)
        for (int32_t row = 0; row < ROWS; row++) {
            const uint8_t kind = a->kinds[i * ROWS + row];
            if (kind == LS_KIND_DEFER) continue;
            if (kind != LS_KIND_APPLY) fail("a kind is not its own", seq);
            if ((uint32_t)a->forced[i * ROWS + row] != row_of(seq, a->slots[i], row))
                fail("a token is not its own", seq);
            for (int w = 0; w < WORDS; w++)
                if ((uint32_t)sim_load(memory.mask[seq & 1][a->slots[i]][row][w], memory_order_relaxed) !=
                    row_of(seq, a->slots[i], row))
                    fail("a row is not its own", seq);
        }
}

static void await(struct ls_await_args *a, uint64_t seq) {
    for (;;) {
        ls_await(a);
        if (a->missing && !with_deadlines && !lost) fail("an answer is missing", seq);
        check_masks(a, seq);
        if (a->missing || lost) return;
        if (!a->late) break;
        if (with_deadlines && chance(100)) return;
    }
    for (int32_t k = 0; k < a->batch * ROWS; k++)
        if (a->kinds[k] == LS_KIND_DEFER) fail("a row is lost", seq);
}

static void engine(void) {
    int32_t slots[SLOTS], lane_gens[SLOTS], pos[SLOTS], ones[SLOTS] = {1, 1}, tokens[SLOTS][2 * ROWS];
    int32_t forced[SLOTS * ROWS];
    uint32_t need[SLOTS] = {3, 3};
    uint8_t kinds[SLOTS * ROWS];
    uint64_t awaited;
    for (uint64_t seq = 1; seq <= SEQS; seq++) {
        const int32_t batch = 1 + (int32_t)draw(SLOTS), from = (int32_t)draw(SLOTS);
        for (int32_t i = 0; i < batch; i++) {
            slots[i] = (from + i) % SLOTS;
            if (chance(300)) gens[slots[i]]++;
            lane_gens[i] = truth[seq].gens[slots[i]] = gens[slots[i]];
            truth[seq].posted[slots[i]] = 1;
            pos[i] = tokens[i][0] = tokens[i][1] = (int32_t)seq;
        }
        struct ls_post_args p = {&view, &counter,      slots, lane_gens, pos, ones, ones,
                                 need,  &tokens[0][0], batch, 0,         0,   0};
        ls_post(&p);
        if (p.status != LS_OK || counter.current != seq) fail("a post was refused", seq);
        struct ls_await_args a = {.view = &view,
                                  .seq = &counter.current,
                                  .slots = slots,
                                  .slot_gens = lane_gens,
                                  .kinds = kinds,
                                  .forced = forced,
                                  .awaited = &awaited,
                                  .batch = batch,
                                  .timeout_ns = !with_deadlines ? LONG_NS
                                                : chance(512)   ? 3000
                                                                : 400,
                                  .spin_ns = chance(512) ? 0 : 20};
        await(&a, seq);
        if (lost) {
            drained = 1;
            wait_for(&restored);
        }
    }
    ended = 1;
}

static void answer(uint64_t seq, int32_t slot, int32_t gen) {
    uint8_t kinds[ROWS] = {LS_KIND_DEFER, LS_KIND_DEFER};
    int32_t forced[ROWS] = {-1, -1};
    struct ls_publish_args a = {&view, kinds, forced, seq, slot, gen, 0};
    if (busy_slot == slot) wait_for(&slow_is_free); /* one thread at a time works on a slot */
    const int32_t on_time = with_late && (slow_is_free || busy_slot < 0) && chance(512) ? (int32_t)draw(ROWS) : ROWS;
    for (int32_t row = 0; row < on_time; row++) {
        fill(seq, slot, row);
        kinds[row] = LS_KIND_APPLY;
        forced[row] = (int32_t)row_of(seq, slot, row);
    }
    a.late = on_time < ROWS;
    if (ls_publish(&a)) fail("a newer answer is there", seq);
    if (a.late) {
        busy_slot = slot, slow_seq = seq, slow_row = on_time, slow_is_free = 0, slow_has_task = 1;
        lock();
    }
}

static void grammar(void) {
    int32_t slots[SLOTS], got_gens[SLOTS], pos[SLOTS], n_commit[SLOTS], n_draft[SLOTS], stage[SLOTS], first[SLOTS];
    int32_t tokens[SLOTS * 2 * ROWS];
    uint32_t need[SLOTS];
    for (uint64_t last = start_seq; last < SEQS;) {
        const uint64_t newest_seq = ls_wait_req(&view, last, LONG_NS, chance(512) ? 0 : 20, NULL);
        while (last < newest_seq) {
            const uint64_t seq = ++last;
            struct ls_records_args a = {&view, slots, got_gens, pos, n_commit, n_draft, stage,
                                        need,  first, tokens,   seq, 0,        0};
            ls_records(&a);
            if (a.status != LS_OK) {
                if (!with_deadlines) fail("the record is not there", seq);
                continue;
            }
            if (a.count != truth[seq].posted[0] + truth[seq].posted[1]) fail("a record is torn", seq);
            for (int32_t k = 0; k < a.count; k++) {
                const int32_t *t = tokens + k * 2 * ROWS;
                if (!truth[seq].posted[slots[k]] || got_gens[k] != truth[seq].gens[slots[k]] ||
                    pos[k] != (int32_t)seq || n_commit[k] != 1 || n_draft[k] != 1 || need[k] != 3 ||
                    t[0] != (int32_t)seq || t[1] != (int32_t)seq)
                    fail("a record is torn", seq);
            }
            for (int32_t k = 0; k < a.count; k++) answer(seq, slots[k], got_gens[k]);
        }
    }
}

static void slow(void) {
    for (;;) {
        wait_for(&slow_has_task);
        uint8_t kinds[ROWS];
        int32_t forced[ROWS];
        struct ls_publish_args a = {&view, kinds, forced, slow_seq, busy_slot, 0, 1};
        for (int32_t row = 0; row < ROWS; row++) {
            kinds[row] = row < slow_row ? LS_KIND_APPLY : LS_KIND_DEFER;
            forced[row] = (int32_t)row_of(slow_seq, busy_slot, row);
        }
        for (int32_t row = slow_row; row < ROWS; row++) {
            fill(slow_seq, busy_slot, row);
            kinds[row] = LS_KIND_APPLY;
            a.late = row + 1 < ROWS;
            if (ls_add_rows(&a)) fail("another answer is there", slow_seq);
        }
        slow_has_task = 0, busy_slot = -1, slow_is_free = 1;
        lock();
    }
}

static void begin(int actor);

static void look_again(void) {
    if (++ops > MOST_OPS) fail("the run does not end", ops);
    go_on_elsewhere();
}

static void watcher(void) {
    const uint32_t at = draw(900);
    while (ops < at && !ended) look_again();
    if (ended) return;
    actors[GRAMMAR].runs = actors[SLOW].runs = 0; /* SIGKILL: no store of theirs follows */
    actors[GRAMMAR].sleeps_on = NULL;
    lost = 1;
    ls_set_abort(&view, 1);
    while (!drained && !ended) look_again();
    if (ended) return;
    lock();
    start_seq = counter.last;
    slow_has_task = 0, busy_slot = -1, slow_is_free = 1;
    for (int i = GRAMMAR; i <= SLOW; i++) begin(i), actors[i].seen = actors[i].to_acquire = actors[WATCHER].seen;
    ls_set_abort(&view, 0);
    lost = 0, restored = 1;
    lock();
}

/* ---- the scheduler ---- */

static void (*const mains[ACTORS])(void) = {engine, grammar, slow, watcher};
static uint8_t stacks[ACTORS][STACK];

static void run_self(void) {
    mains[self]();
    actors[self].runs = 0;
    go_on_elsewhere();
}

static void begin(int actor) {
    struct actor *a = &actors[actor];
    memset(&a->seen, 0, sizeof a->seen);
    a->to_acquire = a->released = a->seen;
    a->sleeps_on = NULL, a->waits_for = NULL, a->timed = 0, a->runs = 1, a->stopped_until = 0;
    getcontext(&a->context);
    a->context.uc_stack.ss_sp = stacks[actor], a->context.uc_stack.ss_size = STACK, a->context.uc_link = NULL;
    makecontext(&a->context, run_self, 0);
}

static int is_ready(const struct actor *a) { return a->runs && !a->sleeps_on && !(a->waits_for && !*a->waits_for); }

static void run_seed(void) {
    state = seed * 0x9E3779B97F4A7C15ULL + 1;
    for (int i = 0; i < 8; i++) draw(2);
    static const uint32_t shares[] = {30, 120, 400, 900}, stale[] = {0, 100, 400, 800}, stops[] = {0, 20, 60};
    switch_share = shares[draw(4)], stale_share = stale[draw(4)], stop_share = stops[draw(3)];
    const uint32_t mode = draw(5);
    with_late = mode != 0 && chance(800), with_deadlines = mode == 2 || mode == 3, with_crash = mode == 4;
    num_recs = with_deadlines ? 1 + (int)draw(2) : MOST_RECS;
    view = (struct ls_view){memory.words,       memory.rec, memory.ans, ENTRY,  SLOTS,  ROWS,
                            (uint32_t)num_recs, HEAD,       RECORD,     ANSWER, FORCED, LATE};
    memset(place_of, 0, sizeof place_of), memset(newest, 0, sizeof newest), memset(truth, 0, sizeof truth);
    memset(&fences, 0, sizeof fences), memset(&locks, 0, sizeof locks);
    messages[0] = (struct message){0};
    num_messages = 1, num_places = ops = 0, clock_ns = 1000000;
    counter = (struct ls_counter){0, 0}, gens[0] = gens[1] = 1;
    busy_slot = -1, slow_is_free = 1, slow_has_task = lost = drained = restored = ended = 0, start_seq = 0;
    for (int i = 0; i < ACTORS; i++) begin(i);
    actors[WATCHER].runs = with_crash;
    while (actors[ENGINE].runs) {
        int ready[ACTORS], count = 0;
        if (chance(stop_share)) actors[draw(ACTORS)].stopped_until = ops + draw(400);
        for (int i = 0; i < ACTORS; i++)
            if (is_ready(&actors[i]) && ops >= actors[i].stopped_until) ready[count++] = i;
        for (int i = 0; !count && i < ACTORS; i++)
            if (is_ready(&actors[i])) ready[count++] = i;
        /* The engine's sleep has an end of its own, which comes at any moment. */
        const int sleeps = actors[ENGINE].sleeps_on && actors[ENGINE].timed;
        if (sleeps && (chance(200) || !count)) {
            actors[ENGINE].sleeps_on = NULL;
            ready[0] = ENGINE, count = 1;
        }
        if (!count) fail("every process sleeps", counter.last);
        self = ready[draw((uint32_t)count)];
        swapcontext(&scheduler, &actors[self].context);
    }
}

int main(int argc, char **argv) {
    const uint64_t first = argc == 3 ? strtoull(argv[1], NULL, 10) : 0,
                   count = argc == 3 ? strtoull(argv[2], NULL, 10) : 0;
    if (!count) return 2;
    uint64_t total = 0;
    for (seed = first; seed < first + count; seed++) {
        run_seed();
        total += ops;
    }
    printf("%llu runs, %llu operations\n", (unsigned long long)count, (unsigned long long)total);
    return 0;
}
