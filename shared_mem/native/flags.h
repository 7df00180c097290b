/* The step plane's flags: the functions by which the two processes hand a step over and wait for it.
 *
 * Functions take addresses and plain values; they depend on neither Python nor CUDA. The bytes are pictured in
 * shared_mem/layout.py, and shared_mem/native.py mirrors the structs of this file. All memory ordering of the project's
 * shared segment is in flags.c and nowhere else.
 */
#ifndef LOCKSTEP_FLAGS_H
#define LOCKSTEP_FLAGS_H

#include <stdint.h>

/* Grows with every change of a struct or function here; native.py rejects a library with another number. */
#define LS_ABI 7

#define LS_EXPORT __attribute__((visibility("default")))

/* Offsets from ls_view.words. */
enum {
    LS_REQ_SEQ = 0,
    LS_ABORT = 128,
    LS_HB_ENGINE = 256,
    LS_HB_GRAMMAR = 384,
    LS_PERMISSIVE = 512,
    LS_GRAMMAR_PARKED = 640,
    LS_ENGINE_PARKED = 768,
    LS_DOORBELL = 896,
};

/* RowKind of layout.py. */
enum { LS_KIND_ALL, LS_KIND_APPLY, LS_KIND_FORCED, LS_KIND_DEFER, LS_KIND_DEAD_END, LS_KIND_ERROR, LS_KINDS };

/* Stage.PROPOSE of layout.py. */
enum { LS_PROPOSE = 64 };

/* ls_post_args.status and ls_records_args.status */
enum {
    LS_OK = 0,
    LS_EMPTY = 1,       /* no lane has a slot: nothing was posted */
    LS_NOT_IN_RING = 2, /* the record was overwritten, or never posted */
    LS_BAD_SLOT = -1,
    LS_BAD_N_COMMIT = -2,
    LS_BAD_N_DRAFT = -3,
    LS_BAD_COMMIT_POS = -4,
};

/* Addresses and strides in one process's mapping. Constant after it is filled. */
struct ls_view {
    uint8_t *words;
    uint8_t *rec;
    uint8_t *ans;
    uint64_t rec_entry_stride;
    uint32_t num_slots;
    uint32_t num_rows;
    uint32_t num_recs;
    uint32_t rec_head_bytes;
    uint32_t rec_stride;
    uint32_t ans_stride;
    uint32_t ans_forced;
    uint32_t ans_late;
};

/* Private memory of the engine. Only the thread (or stream) that posts touches it. */
struct ls_counter {
    uint64_t last; /* newest sequence ever posted; never goes back */
    uint64_t
        current; /* sequence of the last post, 0 when that post published nothing: there is no answer to wait for */
};

/* A batch of lanes. A lane with slots[i] < 0 (padding, or no grammar) is neither posted nor waited for. */
struct ls_post_args {
    const struct ls_view *view;
    struct ls_counter *counter;
    const int32_t *slots;
    const int32_t *slot_gens;
    const int32_t *commit_pos;
    const int32_t *n_commit;
    const int32_t *n_draft;
    const uint32_t *need_rows;
    const int32_t *tokens; /* [batch][2 * num_rows]: n_commit committed tokens, then n_draft drafts */
    int32_t batch;
    int32_t stage;
    int32_t status;   /* out */
    int32_t bad_lane; /* out, with a negative status */
};

struct ls_await_args {
    const struct ls_view *view;
    const uint64_t *seq; /* the sequence to wait for; 0: nothing was posted, so every lane with a slot is deferred */
    const int32_t *slots;
    const int32_t *slot_gens;
    uint8_t *kinds;    /* [batch][num_rows], out */
    int32_t *forced;   /* [batch][num_rows], out */
    uint64_t *awaited; /* [1], out: the sequence these answers belong to; a device that fetches rows needs its parity */
    int32_t batch;
    int32_t missing;     /* out: lanes that were deferred here */
    int64_t deadline_ns; /* CLOCK_MONOTONIC; 0: timeout_ns after the call */
    int64_t timeout_ns;
    int64_t spin_ns;   /* spin so long before parking */
    int64_t waited_ns; /* out: 0 when everything was there already */
    int32_t late;      /* out: lanes whose answer is there, with rows that are still to come */
};

struct ls_records_args {
    const struct ls_view *view;
    int32_t *slots; /* [num_slots], like the next ones; out */
    int32_t *slot_gens;
    int32_t *commit_pos;
    int32_t *n_commit;
    int32_t *n_draft;
    int32_t *stage;
    uint32_t *need_rows;
    int32_t *first;  /* the first wanted row, if every row after it is wanted too; else -1. A proposal wants none: 0 */
    int32_t *tokens; /* [num_slots][2 * num_rows], out */
    uint64_t seq;
    int32_t count;  /* out */
    int32_t status; /* out */
};

struct ls_publish_args {
    const struct ls_view *view;
    const uint8_t *kinds; /* [num_rows], like the next ones */
    const int32_t *forced;
    uint64_t seq;
    int32_t slot;
    int32_t slot_gen;
    int32_t late; /* 1: rows that are DEFER here may still come, by ls_add_rows; 0: this is all */
};

LS_EXPORT int32_t ls_abi(void);

/* Engine step. Both have the type of a CUDA host function; the argument is a struct ls_post_args or ls_await_args. */
LS_EXPORT void ls_post(void *post_args);
LS_EXPORT void ls_await(void *await_args);

/* Takes the answers that are there, without waiting; returns the number of lanes that an ls_await would still wait for. */
LS_EXPORT int32_t ls_take(void *await_args);

/* Engine watchdog: 0 clears. A waiting ls_await ends within LS_PARK_SLICE_NS. */
LS_EXPORT void ls_set_abort(const struct ls_view *view, uint64_t value);

/* Grammar process. ls_wait_req returns the newest posted sequence, which is `last` at the timeout. `working` is a
 * word of the process's own, or NULL: 0 during the wait, the time of its end (CLOCK_MONOTONIC ns) after it. */
LS_EXPORT uint64_t ls_wait_req(const struct ls_view *view, uint64_t last, int64_t timeout_ns, int64_t spin_ns,
                               uint64_t *working);

/* The newest sequence that the watcher has seen, and the time at which it saw that one first (CLOCK_MONOTONIC ns; 0 before
 * the first call). A word of the process's own: the calls of ls_overdue read and write it, one at a time. */
struct ls_watch {
    uint64_t seq;
    int64_t posted_ns;
};

/* For another thread: 1 as soon as `working` has had one value for limit_ns, 0 after timeout_ns without
 * that. Looks every limit_ns / 2; every 10 ms once no sequence came for 100 ms, over as many calls as these take. */
LS_EXPORT int32_t ls_overdue(const struct ls_view *view, const uint64_t *working, struct ls_watch *watch,
                             int64_t limit_ns, int64_t timeout_ns);
LS_EXPORT void ls_records(struct ls_records_args *args);
LS_EXPORT int32_t
ls_publish(const struct ls_publish_args *args); /* 0, or 1: a newer answer is there, nothing written */

/* Its two halves, for several answers and one bell after them: an engine that sleeps is woken once. */
int32_t ls_put_answer(const struct ls_publish_args *args);
void ls_ring(const struct ls_view *view);

/* Adds to a late answer the rows that are not DEFER in `args`; a row that is there stays. 1: another answer is there.
 * One thread at a time publishes or adds for a slot. */
LS_EXPORT int32_t ls_add_rows(const struct ls_publish_args *args);

/* Single words: load-acquire and store-release. */
LS_EXPORT uint64_t ls_load64(const void *address);
LS_EXPORT void ls_store64(void *address, uint64_t value);
LS_EXPORT uint32_t ls_load32(const void *address);
LS_EXPORT void ls_store32(void *address, uint32_t value);
LS_EXPORT void ls_stamp(void *address);           /* now, CLOCK_MONOTONIC ns */
LS_EXPORT int64_t ls_age_ns(const void *address); /* since ls_stamp; -1: never stamped */

#endif
