/* Threads that share the loops of one call, on cores that others may want at any moment.
 *
 * Every member runs the same body. A loop of it is cut into chunks, which the members take one by one; a loop has ended
 * when its chunks have, not when all members have come. So a thread that the kernel has put aside delays a call by the
 * chunk in its hand at most, and a thread that sleeps or wakes late delays it not at all: the caller does the work. A
 * member that waits spins for some microseconds and then sleeps, so its core is free for whoever has the missing chunk.
 * Between calls no thread spins for long: the grammar process and the event loop need the cores then.
 *
 * Invariant: the members of a call agree on the order and the sizes of its loops, and each reads what an ended loop wrote.
 * One call at a time has the team; another one runs only on its own thread. Not responsible for: the number of threads
 * (the caller's OpenMP setting, which torch.set_num_threads writes), results that depend on who does a chunk (none may).
 */
#ifndef LOCKSTEP_TEAM_H
#define LOCKSTEP_TEAM_H

#include <stdint.h>

/* A member's place in the call. */
struct member {
    uint32_t loop;   /* number of the next loop */
    int32_t chunks;  /* of a loop whose items cost the same: enough that a late member costs little */
    int32_t threads; /* the most members that the call may have */
    int alone;       /* the call has no team */
};

/* The chunks of one loop, as one member sees them. */
struct share {
    int64_t count, chunks; /* items and chunks in all */
    int64_t size,
        larger; /* items of a chunk, of which there are fewer in the last; chunks at first that have one more */
    int64_t begin, end,
        follow; /* the items in hand: [begin, end); `follow`: the first one that the member probably takes then */
    uint32_t loop;
};

/* Run `body(member, context)` on the calling thread and on as many others as come in time; return when all have left it. */
void team_run(void (*body)(struct member *, void *), void *context);

/* Take the next chunk of the member's present loop. 0: every chunk of the loop has ended, and the member goes on. */
int team_take(struct member *m, struct share *s);

/* Begin a loop over `count` items, `size` of them at a time. */
static inline struct share team_loop(struct member *m, int64_t count, int64_t size) {
    const int64_t each = size < 1 ? 1 : size;
    return (struct share){.count = count, .chunks = (count + each - 1) / each, .size = each, .loop = m->loop};
}

/* The same of items that cost the same: chunks of about equal size, so that no member ends late. */
static inline struct share team_even_loop(struct member *m, int64_t count) {
    const int64_t chunks = count < m->chunks ? count : m->chunks, some = chunks < 1 ? 1 : chunks;
    return (struct share){
        .count = count, .chunks = chunks, .size = count / some, .larger = count % some, .loop = m->loop};
}

/* for (i = 0; i < count; i++), shared by the members of the call, `size` items at a time. */
#define TEAM_FOR_CHUNKS(m, i, count, size)                                                                             \
    for (struct share share_ = team_loop(m, count, size); team_take(m, &share_);)                                      \
        for (int64_t i = share_.begin; i < share_.end; i++)

/* The same for items that cost the same, a chunk [range.begin, range.end) at a time. */
#define TEAM_FOR_RANGES(m, range, count) for (struct share range = team_even_loop(m, count); team_take(m, &range);)

/* The same, an item at a time. */
#define TEAM_FOR(m, i, count)                                                                                          \
    TEAM_FOR_RANGES(m, share_, count)                                                                                  \
    for (int64_t i = share_.begin; i < share_.end; i++)

#endif
