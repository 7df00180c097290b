/* The team of threads under calls from several threads at once, for ThreadSanitizer: `team_race ROUNDS`.
 *
 * A call has loops that each read what the one before wrote, over plain memory: ThreadSanitizer sees whether the team
 * orders them. Callers change the number of threads between calls. Invariant: ends with status 1 and a line when a number
 * is not what one thread would have written.
 */
#include "team.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { CALLERS = 3, ITEMS = 257, LOOPS = 5 };

static _Thread_local int wanted = 1;
static int rounds;

/* What OpenMP would say in this thread; the library is not linked here. */
int omp_get_max_threads(void);
int omp_get_max_threads(void) { return wanted; }

struct call {
    int64_t first;
    int64_t values[LOOPS][ITEMS]; /* each loop writes one row, from the row before, in another order */
};

static void body(struct member *m, void *context) {
    struct call *c = context;
    TEAM_FOR(m, i, ITEMS) c->values[0][i] = c->first + i;
    for (int loop = 1; loop < LOOPS; loop++)
        TEAM_FOR_CHUNKS(m, i, ITEMS, 1 + loop * 7) c->values[loop][i] = c->values[loop - 1][ITEMS - 1 - i] + loop;
    TEAM_FOR(m, i, 0) c->values[0][i] = -1; /* a loop of nothing */
}

static int is_right(const struct call *c) {
    for (int64_t i = 0; i < ITEMS; i++) {
        int64_t value = i;
        for (int loop = 1; loop < LOOPS; loop++) value = ITEMS - 1 - value;
        if (c->values[LOOPS - 1][i] != c->first + value + LOOPS * (LOOPS - 1) / 2) return 0;
    }
    return 1;
}

static void *caller(void *number) {
    struct call *c = malloc(sizeof *c);
    if (!c) abort();
    for (int round = 0; round < rounds; round++) {
        wanted = 1 + (round + *(int *)number) % 4;
        c->first = round * 1000 + *(int *)number;
        team_run(body, c);
        if (!is_right(c)) {
            fprintf(stderr, "caller %d, round %d: a number is wrong\n", *(int *)number, round);
            exit(1);
        }
    }
    free(c);
    return NULL;
}

int main(int argc, char **argv) {
    rounds = argc == 2 ? atoi(argv[1]) : 0;
    pthread_t threads[CALLERS];
    int numbers[CALLERS];
    if (rounds < 1) return 2;
    for (int i = 0; i < CALLERS; i++) {
        numbers[i] = i;
        if (pthread_create(&threads[i], NULL, caller, &numbers[i])) return 2;
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
    return 0;
}
