/* The launches of a step between its forward and the grammar process, for a CPU: inputs, posts, cached rows, drafts.
 *
 * Each function is the CPU's form of one launch of gpu_engine/step/launches.py, which has the rules; kernels/cuda has the
 * GPU's. They are short: the caller keeps the GIL, and one thread does all lanes. Invariant: a function writes the lanes
 * [0, num_lanes) and their slots alone; a lane with a negative slot is padding, has the last slot, and requests nothing.
 */
#include <stdint.h>
#include <string.h>

enum { KIND_ALL, KIND_APPLY, KIND_FORCED, KIND_DEFER };
enum { VERIFY = -1, PROPOSE = -2 };

struct step_slots {
    int32_t *history, *length, *drafts, *num_drafts, *posted;
    const int32_t *jump_forward_limit, *prompt_length, *max_length, *page_table;
    uint8_t *done;
    int64_t history_stride, table_stride;
    int64_t num_slots, num_rows; /* the spare slot included; R */
};

struct step_lanes {
    const int32_t *slots, *draft_limit, *slot_gens;
    const uint8_t *guided;
    uint8_t *drafting, *kinds;
    int32_t *drafts, *num_drafts, *forced, *num_jump_forward;
    const int32_t *num_emitted, *finish, *blocked;
};

struct step_store {
    int32_t *masks; /* [slots without the spare one][R][mask_words] */
    uint8_t *kinds;
    int32_t *forced;
    uint8_t *cached;
    int64_t mask_words;
};

struct step_post {
    int32_t *slots, *slot_gens, *commit_pos, *n_commit, *n_draft, *need_rows, *tokens;
    const uint8_t *kinds;
    const int32_t *forced;
};

static int64_t place(const struct step_slots *s, const struct step_lanes *l, int64_t b) {
    return l->slots[b] < 0 ? s->num_slots - 1 : l->slots[b];
}

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

/* Cut the step's inputs from the slots: ids and positions [lanes][P], page table [lanes][table_stride]. */
void lockstep_step_load(const struct step_slots *s, const struct step_lanes *l, int64_t num_lanes, int64_t P,
                        int64_t *ids, int32_t *positions, int32_t *table) {
    const int64_t R = s->num_rows;
    for (int64_t b = 0; b < num_lanes; b++) {
        const int64_t at = place(s, l, b);
        const int32_t last = s->length[at] - 1,
                      count = least(least(s->num_drafts[at], l->draft_limit[b]), (int32_t)P - 1);
        memcpy(l->drafts + b * R, s->drafts + at * R, (size_t)R * 4);
        l->num_drafts[b] = count;
        for (int64_t j = 0; j < P; j++) {
            const int live = j <= count && !s->done[at] && last >= 0;
            positions[b * P + j] = live ? last + (int32_t)j : -1;
            ids[b * P + j] = !live ? 0 : j ? s->drafts[at * R + j - 1] : s->history[at * s->history_stride + last];
        }
        memcpy(table + b * s->table_stride, s->page_table + at * s->table_stride, (size_t)s->table_stride * 4);
    }
}

/* Before accept: a slot that has ended emits nothing. */
void lockstep_step_block_ended(const struct step_slots *s, const struct step_lanes *l, int64_t num_lanes) {
    for (int64_t b = 0; b < num_lanes; b++)
        if (s->done[place(s, l, b)]) memset(l->kinds + b * s->num_rows, KIND_DEFER, (size_t)s->num_rows);
}

/* After accept: a sequence that ended, or was blocked for good, is done. */
void lockstep_step_mark_ended(const struct step_slots *s, const struct step_lanes *l, int64_t num_lanes) {
    for (int64_t b = 0; b < num_lanes; b++) s->done[place(s, l, b)] |= l->finish[b] != 0 || l->blocked[b] > KIND_DEFER;
}

/* Which lanes draft next; `store` null: no lane is guided. */
void lockstep_step_advance(const struct step_slots *s, const struct step_lanes *l, int64_t num_lanes,
                           const struct step_store *store) {
    for (int64_t b = 0; b < num_lanes; b++) {
        const int emitted = l->num_emitted[b] > 0;
        l->drafting[b] = emitted && !l->finish[b] && !l->blocked[b] && l->slots[b] >= 0;
        if (store && emitted) memset(store->cached + place(s, l, b) * s->num_rows, 0, (size_t)s->num_rows);
    }
}

/* Fill the inputs of a post: draft k, VERIFY or PROPOSE. */
void lockstep_step_pack(const struct step_slots *s, const struct step_lanes *l, int64_t num_lanes,
                        const struct step_store *store, const struct step_post *p, int32_t k, int32_t max_rows) {
    const int64_t R = s->num_rows;
    for (int64_t b = 0; b < num_lanes; b++) {
        const int64_t at = place(s, l, b);
        const int32_t start = s->prompt_length[at] + s->posted[at], drafts = k == VERIFY    ? l->num_drafts[b]
                                                                             : k == PROPOSE ? 0
                                                                                            : k;
        int32_t need = 0;
        if (l->guided[b] && l->slots[b] >= 0) {
            if (k == VERIFY) {
                for (int32_t j = 0; j <= drafts && !s->done[at]; j++) need |= !store->cached[at * R + j] << j;
            } else if (!l->drafting[b]) {
                need = 0;
            } else if (k == PROPOSE) {
                const int32_t room = s->max_length[at] - s->length[at] - 1;
                const int32_t wanted = least(least(s->jump_forward_limit[at], room), least((int32_t)R, max_rows) - 1);
                need = (1 << most(wanted, 0)) - 1;
            } else {
                need = 1 << k;
            }
        }
        const int32_t count = need ? s->length[at] - start : 0;
        p->slots[b] = need ? l->slots[b] : -1;
        p->slot_gens[b] = l->slot_gens[b];
        p->commit_pos[b] = s->posted[at];
        p->n_commit[b] = count;
        p->n_draft[b] = need ? drafts : 0;
        p->need_rows[b] = need;
        if (!need || count < 0 || count > R) /* the native post refuses such a count by name */
            continue;
        memcpy(p->tokens + b * 2 * R, s->history + at * s->history_stride + start, (size_t)count * 4);
        memcpy(p->tokens + b * 2 * R + count, l->drafts + b * R, (size_t)drafts * 4);
        if (k != PROPOSE) s->posted[at] += count;
    }
}

/* Cache the rows that the post requested, with the mask rows of `masks` where the kind is APPLY. */
void lockstep_step_cache_rows(const struct step_slots *s, const struct step_lanes *l, int64_t num_lanes,
                              const struct step_store *store, const struct step_post *p, int32_t k,
                              const int32_t *masks) {
    const int64_t R = s->num_rows;
    for (int64_t b = 0; b < num_lanes; b++) {
        const int64_t at = place(s, l, b);
        for (int64_t j = 0; j < R; j++) {
            const int64_t to = at * R + j, from = b * R + j;
            if (p->slots[b] >= 0 && p->need_rows[b] >> j & 1) {
                store->kinds[to] = p->kinds[from];
                store->forced[to] = p->forced[from];
                store->cached[to] = p->kinds[from] != KIND_DEFER;
                if (p->kinds[from] == KIND_APPLY)
                    memcpy(store->masks + to * store->mask_words, masks + to * store->mask_words,
                           (size_t)store->mask_words * 4);
            }
            if (k == VERIFY) {
                l->kinds[from] = !l->guided[b] ? KIND_ALL : store->cached[to] ? store->kinds[to] : KIND_DEFER;
                l->forced[from] = store->forced[to];
            } else if (j == k) {
                const int here = store->cached[to] && l->guided[b] && l->drafting[b];
                l->kinds[from] = here ? store->kinds[to] : KIND_ALL;
                l->forced[from] = store->forced[to];
            }
        }
    }
}

/* Take the forced tokens of a proposal into the drafts, and write them after the history. */
void lockstep_step_take_jump_forward(const struct step_slots *s, const struct step_lanes *l, int64_t num_lanes,
                                     const struct step_post *p, int32_t vocab_size) {
    const int64_t R = s->num_rows;
    for (int64_t b = 0; b < num_lanes; b++) {
        const int64_t at = l->slots[b];
        if (at < 0 || !l->num_emitted[b]) {
            l->num_jump_forward[b] = -1;
            continue;
        }
        int32_t count = 0;
        while (p->slots[b] >= 0 && count < R && p->need_rows[b] >> count) {
            const int32_t token = p->forced[b * R + count];
            if (p->kinds[b * R + count] != KIND_FORCED || token < 0 || token >= vocab_size) break;
            s->history[at * s->history_stride + s->length[at] + count] = token;
            s->drafts[at * R + count++] = token;
        }
        l->num_jump_forward[b] = s->num_drafts[at] = count;
    }
}

/* Leave no drafts, and no jump-forward tokens, to the lanes that emitted a token. */
void lockstep_step_drop_drafts(const struct step_slots *s, const struct step_lanes *l, int64_t num_lanes) {
    for (int64_t b = 0; b < num_lanes; b++) {
        l->num_jump_forward[b] = l->num_emitted[b] > 0 ? 0 : -1;
        if (l->num_emitted[b] > 0) s->num_drafts[place(s, l, b)] = 0;
    }
}
