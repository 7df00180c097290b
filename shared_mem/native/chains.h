/* Chains of rows that a matcher library has written for many slots at once: classified, copied into place, published.
 *
 * shared_mem/chains.py and shared_mem/records.py mirror the structs. No ordering here: every answer that another process may read goes through ls_put_answer.
 */
#ifndef LOCKSTEP_CHAINS_H
#define LOCKSTEP_CHAINS_H

#include "flags.h"

enum {
    LS_CHAIN_DONE = 0,  /* answered; in: to be answered */
    LS_CHAIN_STALE = 1, /* a newer answer is there, this one was not published */
    LS_CHAIN_SLOW = 2,  /* the words do not determine the rows: nothing was written; in: leave it out */
};

/* Records of one post, copied out of the ring: private memory of the grammar process. Field f of record k is at
 * fields[f * count + k]. */
enum {
    LS_FIELD_SLOT,
    LS_FIELD_SLOT_GEN,
    LS_FIELD_COMMIT_POS,
    LS_FIELD_N_COMMIT,
    LS_FIELD_N_DRAFT,
    LS_FIELD_STAGE,
    LS_FIELD_NEED_ROWS,
    LS_FIELD_FIRST, /* of ls_records_args */
    LS_FIELDS,
};

struct ls_record_arrays {
    const int32_t *fields; /* [LS_FIELDS][count] */
    const int32_t *tokens; /* [count][token_stride]: n_commit committed tokens, then n_draft drafts */
    int32_t count;
    int32_t token_stride;
};

/* The caller's memory except for `masks`, `published` and `tallies`; R = view->num_rows, W = words. A chain is the rows `first`, `first` + 1, ... of one
 * slot's answer, with the drafts between them. */
struct ls_chains_args {
    const struct ls_view *view;
    uint32_t *rows;                /* [count][R][W]: row first + r at [i][r]; changed in place */
    uint8_t *masks;                /* the mask buffer of `seq` */
    const int32_t *special_at;     /* [num_special] words that hold tokens with their own rule, or bits of no token */
    const uint32_t *special_keep;  /* [num_special] bits of such a word that are never cleared */
    const uint32_t *special_stops; /* [num_special] its stop tokens: cleared where the answer is not complete */
    const int32_t *which;          /* [count] numbers of the records; only ls_take_chains reads it */
    int32_t *slots;                /* [count], like the next ones; ls_take_chains writes these except for `accepting` */
    int32_t *slot_gens;
    int32_t *first;
    int32_t *n_draft;   /* of the record: row n_draft is the last one */
    uint8_t *accepting; /* the answer is complete at row `first` */
    uint8_t *states;    /* in and out */
    int32_t *drafts;    /* [count][R]: after row `first`; each is a token of the vocabulary */
    uint8_t *kinds;     /* [count][R], out; R kinds, DEFER for a row that was not written */
    int32_t *forced;    /* [count][R], out */
    int64_t *tallies;   /* [num_slots][LS_KINDS] counts rows 0..n_draft of every chain that is answered */
    int64_t *published; /* [2][num_slots] counts the answers that were published, and the stale ones */
    uint64_t seq;
    uint64_t mark; /* where a row begins with these 64 bits, the library has not written it */
    uint32_t row_stride;
    uint32_t words;
    uint32_t vocab_size;
    int32_t num_special;
    int32_t count;
    int32_t publishes; /* 0: write rows and kinds only, the answers were published as late ones */
    int32_t answered;  /* out: chains that are not LS_CHAIN_SLOW, and their rows */
    int32_t num_rows;
};

/* plain[token] is 1 for a plain token, [vocab_size]; out[k]: whether every token of record k is one. */
LS_EXPORT void ls_plain_records(const struct ls_record_arrays *records, const uint8_t *plain, int32_t vocab_size,
                                uint8_t *out);

/* Fills the inputs of `count` chains from the records `which`, and puts the mark into every row, before the library
 * fills them. */
LS_EXPORT void ls_take_chains(const struct ls_chains_args *args, const struct ls_record_arrays *records);

/* After it: classifies the rows of every chain, copies them into place and publishes the answer. */
LS_EXPORT void ls_publish_chains(struct ls_chains_args *args);

/* Publishes the kinds and forced tokens that the caller has written for every chain, R of each, with one bell. No rows. */
LS_EXPORT void ls_publish_answers(const struct ls_chains_args *args);

#endif
