/* How loops of items that cost the same are shared: `team_chunks` checks every number of items and threads up to a bound.
 *
 * Invariant: ends with status 1 and a line when chunks leave an item out or overlap, when their sizes differ by more than one
 * or rise, or when `follow` is not where the chunk begins that a member takes next if all are equally fast.
 */
#include "team.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ITEMS = 40, MOST_THREADS = 5, MOST_CHUNKS = 2 * MOST_THREADS };

static int wanted;

/* What OpenMP would say; the library is not linked here. */
int omp_get_max_threads(void);
int omp_get_max_threads(void) { return wanted; }

struct call {
    int64_t count, begin[MOST_ITEMS], end[MOST_ITEMS], follow[MOST_ITEMS]; /* by a chunk's first item; -1: none */
};

static void body(struct member *m, void *context) {
    struct call *c = context;
    TEAM_FOR_RANGES(m, part, c->count) {
        c->begin[part.begin] = part.begin;
        c->end[part.begin] = part.end;
        c->follow[part.begin] = part.follow;
    }
}

static void require(int holds, const char *what, int64_t count) {
    if (holds) return;
    fprintf(stderr, "%lld items, %d threads: %s\n", (long long)count, wanted, what);
    exit(1);
}

static void check(const struct call *c) {
    int64_t begins[MOST_CHUNKS + 1], chunks = 0;
    for (int64_t i = 0; i < c->count; i++)
        if (c->begin[i] >= 0) {
            require(chunks < MOST_CHUNKS, "too many chunks", c->count);
            begins[chunks++] = i;
        }
    const int64_t most = wanted == 1 ? 1 : 2 * wanted;
    require(chunks == (c->count < most ? c->count : most), "the number of chunks", c->count);
    begins[chunks] = c->count;
    for (int64_t k = 0; k < chunks; k++) {
        const int64_t first = begins[k], size = begins[k + 1] - first;
        require(c->end[first] == begins[k + 1], "an item is left out, or in two chunks", c->count);
        require(size == (c->count + chunks - 1 - k) / chunks, "sizes", c->count);
        const int64_t after = k + (wanted == 1 ? chunks : wanted);
        require(c->follow[first] == (after < chunks ? begins[after] : c->count), "what follows", c->count);
    }
}

int main(void) {
    static struct call call;
    for (wanted = 1; wanted <= MOST_THREADS; wanted++)
        for (call.count = 1; call.count <= MOST_ITEMS; call.count++) {
            memset(call.begin, -1, sizeof call.begin);
            team_run(body, &call);
            check(&call);
        }
    return 0;
}
