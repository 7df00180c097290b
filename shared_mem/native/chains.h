/* Chains of rows that a matcher library has written for many slots at once: classified, copied into place, published.
 *
 * shared_mem/chains.py mirrors the struct. No ordering here: every answer that another process may read goes through ls_put_answer.
 */
#ifndef LOCKSTEP_CHAINS_H
#define LOCKSTEP_CHAINS_H

#include "flags.h"

enum {
    LS_CHAIN_DONE = 0,  /* answered; in: to be answered */
    LS_CHAIN_STALE = 1, /* a newer answer is there, this one was not published */
    LS_CHAIN_SLOW = 2,  /* the words do not determine the rows: nothing was written; in: leave it out */
};

/* The caller's memory but for `masks`; R = view->num_rows, W = words. A chain is the rows `first`, `first` + 1, ... of one
 * slot's answer, with the drafts between them. */
struct ls_chains_args {
    const struct ls_view *view;
    uint32_t *rows; /* [count][R][W]: row first + r at [i][r]; changed in place */
    uint8_t *masks; /* the mask buffer of `seq` */
    const int32_t *special_at; /* [num_special] words that hold tokens with a rule of their own, or bits of no token */
    const uint32_t *special_keep;  /* [num_special] bits of such a word that are never cleared */
    const uint32_t *special_stops; /* [num_special] its stop tokens: cleared where the answer is not complete */
    const int32_t *slots;          /* [count], like the next ones */
    const int32_t *slot_gens;
    const int32_t *first;
    const int32_t *n_draft;   /* of the record: row n_draft is the last one */
    const uint8_t *accepting; /* the answer is complete at row `first` */
    uint8_t *states;          /* in and out */
    const int32_t *drafts;    /* [count][R]: behind row `first`; each is a token of the vocabulary */
    uint8_t *kinds;           /* [count][R], out; R kinds, DEFER for a row that was not written */
    int32_t *forced;          /* [count][R], out */
    int64_t *tallies;         /* [num_slots][LS_KINDS] counts rows 0..n_draft of every chain that is answered */
    uint64_t seq;
    uint64_t mark; /* where a row begins with these 64 bits, the library has not written it */
    uint32_t row_stride;
    uint32_t words;
    uint32_t vocab_size;
    int32_t num_special;
    int32_t count;
    int32_t publishes; /* 0: write rows and kinds only, the answers were published as late ones */
};

/* Puts the mark into every row of `count` chains, before the library fills them. */
LS_EXPORT void ls_mark_chains(const struct ls_chains_args *args);

/* After it: classifies the rows of every chain, copies them into place and publishes the answer. */
LS_EXPORT void ls_publish_chains(const struct ls_chains_args *args);

#endif
