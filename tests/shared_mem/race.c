/* Both ends of the step plane as two threads over one mapping, for the sanitizers: `race ROUNDS`.
 *
 * The engine posts, awaits, and reads the mask rows in place; the grammar process answers some records at once and some
 * late, row by row. Mask rows are plain memory, so ThreadSanitizer sees whether the flags order them. Invariant: ends with
 * status 1 and a line when a row is not that of its sequence. Waits have no time limit to speak of: nothing depends on
 * which thread is faster.
 */
#include "flags.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 3, ROWS = 2, RECS = 4, WORDS = 64 };
enum { HEAD = 128, RECORD = 64, ENTRY = HEAD + SLOTS * RECORD, FORCED = 16, LATE = 24, ANSWER = 128 };

#define LONG_NS 3600000000000LL

static _Alignas(128) uint8_t words[1024], rec[RECS * ENTRY + 128], ans[SLOTS * ANSWER];
static uint32_t mask[2][SLOTS][ROWS][WORDS];
static const struct ls_view view = {words, rec, ans, ENTRY, SLOTS, ROWS, RECS, HEAD, RECORD, ANSWER, FORCED, LATE};
static uint64_t rounds;

static void fail(const char *what, uint64_t seq) {
    fprintf(stderr, "sequence %llu: %s\n", (unsigned long long)seq, what);
    exit(1);
}

static void fill(uint64_t seq, int32_t slot, int32_t row) {
    for (int w = 0; w < WORDS; w++) mask[seq & 1][slot][row][w] = (uint32_t)(seq * 8 + (uint64_t)row);
}

static void check(uint64_t seq, int32_t slot, int32_t row) {
    for (int w = 0; w < WORDS; w++)
        if (mask[seq & 1][slot][row][w] != (uint32_t)(seq * 8 + (uint64_t)row)) fail("a row is not its own", seq);
}

static void answer(uint64_t seq, int32_t slot, int32_t gen) {
    uint8_t kinds[ROWS] = {LS_KIND_DEFER, LS_KIND_DEFER};
    int32_t forced[ROWS] = {-1, -1};
    const int late = (seq + (uint64_t)slot) % 3 == 0;
    struct ls_publish_args a = {&view, kinds, forced, seq, slot, gen, late};
    for (int32_t row = 0; row < ROWS; row++) {
        if (late && !row && ls_publish(&a)) fail("a newer answer is there", seq);
        fill(seq, slot, row);
        kinds[row] = LS_KIND_APPLY;
        forced[row] = (int32_t)seq;
        a.late = row + 1 < ROWS;
        if (late && ls_add_rows(&a)) fail("another answer is there", seq);
    }
    if (!late && ls_publish(&a)) fail("a newer answer is there", seq);
}

static void *grammar(void *unused) {
    int32_t slots[SLOTS], gens[SLOTS], pos[SLOTS], n_commit[SLOTS], n_draft[SLOTS], stage[SLOTS], first[SLOTS];
    uint32_t need[SLOTS];
    int32_t tokens[SLOTS * 2 * ROWS];
    for (uint64_t last = 0; last < rounds;) {
        const uint64_t newest = ls_wait_req(&view, last, LONG_NS, 1000, NULL);
        while (last < newest) {
            struct ls_records_args a = {&view, slots, gens,   pos,    n_commit, n_draft, stage,
                                        need,  first, tokens, ++last, 0,        0};
            ls_records(&a);
            if (a.status != LS_OK || a.count != SLOTS) fail("the record is not there", last);
            for (int32_t k = 0; k < a.count; k++) {
                if ((uint64_t)pos[k] != last || tokens[k * 2 * ROWS] != (int32_t)last) fail("a record is torn", last);
                answer(last, slots[k], gens[k]);
            }
        }
    }
    return unused;
}

int main(int argc, char **argv) {
    rounds = argc == 2 ? strtoull(argv[1], NULL, 10) : 0;
    pthread_t other;
    if (!rounds || pthread_create(&other, NULL, grammar, NULL)) return 2;
    int32_t slots[SLOTS] = {2, 0, 1}, gens[SLOTS], pos[SLOTS], n_commit[SLOTS], n_draft[SLOTS], tokens[SLOTS][2 * ROWS];
    uint32_t need[SLOTS] = {3, 3, 3};
    uint8_t kinds[SLOTS * ROWS];
    int32_t forced[SLOTS * ROWS];
    struct ls_counter counter = {0, 0};
    uint64_t awaited;
    for (uint64_t seq = 1; seq <= rounds; seq++) {
        for (int i = 0; i < SLOTS; i++) {
            gens[i] = pos[i] = tokens[i][0] = tokens[i][1] = (int32_t)seq;
            n_commit[i] = n_draft[i] = 1;
        }
        struct ls_post_args p = {&view, &counter,      slots, gens, pos, n_commit, n_draft,
                                 need,  &tokens[0][0], SLOTS, 0,    0,   0};
        ls_post(&p);
        struct ls_await_args a = {.view = &view,
                                  .seq = &counter.current,
                                  .slots = slots,
                                  .slot_gens = gens,
                                  .kinds = kinds,
                                  .forced = forced,
                                  .awaited = &awaited,
                                  .batch = SLOTS,
                                  .timeout_ns = LONG_NS,
                                  .spin_ns = seq % 2 ? 1000 : 0};
        do { /* late answers are complete when the last row is added */
            ls_await(&a);
            if (a.missing) fail("an answer is missing", seq);
        } while (a.late);
        for (int i = 0; i < SLOTS; i++)
            for (int32_t row = 0; row < ROWS; row++) {
                if (kinds[i * ROWS + row] != LS_KIND_APPLY || forced[i * ROWS + row] != (int32_t)seq)
                    fail("a row is lost", seq);
                check(seq, slots[i], row);
            }
    }
    pthread_join(other, NULL);
    return 0;
}
