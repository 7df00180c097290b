/* Drafts by votes over text that was seen before: the sequence's own tokens, and a ring with the answers of its scope.
 *
 * The rule. Every earlier place whose last tokens equal the end of the sequence votes for the token that followed there.
 * A place with a run of n equal tokens has the weight BASE^(n - 1), and WRITTEN times that where the target wrote the token
 * itself, in this answer or an earlier one: prompts are not what it wrote. The places that lose leave, the others vote for
 * the next token. A draft is made while the product of the winners' shares is at least WORTH; UNKNOWN is the weight of all
 * that was never seen, so a short run alone does not draft far. Where no place is left, the search begins again after the
 * drafts so far. So a continuation that was rejected loses to the one that the target wrote there, at an equal run.
 * In JSON a text begins after a quote, and the prompt has the same word after a space, which is another token. So a place
 * matches as well where a token, spelled without its space, has the tokens from the last quote on; they and the quote count
 * as equal tokens. The rest of such a spelling comes first, then what followed the token.
 * (Prompt lookup: Saxena 2023. Votes by frequency: SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975. The constants were
 * found by walking recorded answers again, see docs/log/.)
 *
 * A ring is an array of tokens in which the newest overwrite the oldest, and a chain of the places of every pair of
 * tokens, newest first, as deflate has it (RFC 1951). Texts are separated by SEPARATOR, which equals no token.
 *
 * Invariant: nothing is allocated here; the caller owns every array. Not responsible for: which ring belongs to which
 * sequence, and how large it is (see gpu_engine/drafters/suffix_index.py).
 */
#include <stdint.h>

enum { SEPARATOR = -1 };
enum { MAX_RING_PLACES = 64, MAX_OWN_PLACES = 192, MAX_PLACES = MAX_RING_PLACES + MAX_OWN_PLACES, MAX_SEARCHES = 2 };
enum { MAX_WORD = 8 }; /* tokens of a word after a quote */
static const float BASE = 4.0f, WRITTEN = 16.0f, UNKNOWN = 32.0f, WORTH = 0.1f;

struct suffix_ring {
    int32_t *tokens;   /* [mask + 1], position p at p & mask */
    int32_t *distance; /* [mask + 1], from a pair's place to the one before with the same hash; 0: none */
    int64_t *head;     /* [head_mask + 1], the newest place of a pair with this hash, plus 1; 0: none */
    int64_t end;       /* tokens ever written */
    int64_t mask, head_mask;
};

/* Tokens of a vocabulary that begin with a space, spelled without it. */
struct bare_words {
    const int32_t *start;  /* [V + 1], where each token's spelling begins in `tokens`; it ends where the next begins */
    const int32_t *tokens; /* of all spellings */
    const uint8_t *quotes; /* [V], 1: the text of the token ends with a quote */
    int64_t num_tokens;    /* V; a history has larger ids as well, of an adapter's virtual tokens */
};

struct suffix_args {
    const int32_t *slots;            /* [B], negative: an idle lane */
    const int32_t *num_emitted;      /* [B], 0: the lane's drafts are unchanged */
    const int32_t *num_jump_forward; /* [B], drafts already made; negative: the lane's drafts are unchanged. NULL: 0 */
    int32_t *history;      /* [S][history_stride], prompt, answer, jump-forward tokens; drafts are written after */
    const int32_t *length; /* [S], without jump-forward tokens */
    const int32_t *prompt_length;   /* [S] */
    const int32_t *draft_limit;     /* [S], drafts in all up to which a lane may get some */
    const int32_t *max_length;      /* [S] */
    const int64_t *rings;           /* [S], address of a suffix_ring; 0: none */
    int32_t *drafts;                /* [S][row_stride] */
    int32_t *num_drafts;            /* [S] */
    int32_t *from_ring;             /* [S], bit j: places of the ring had most of the weight that chose draft j */
    const struct bare_words *words; /* NULL: none */
    int64_t history_stride, row_stride;
    int32_t num_lanes, max_drafts, min_run, max_run;
};

struct count_args {
    const int32_t *slots, *num_emitted, *num_verified, *num_accepted; /* [B] */
    const int32_t *from_ring;                                         /* [S] */
    int64_t *counts; /* [2], drafts of the ring that were verified, and that were accepted; this adds to them */
    int32_t num_lanes;
};

struct place {
    const int32_t *tokens;          /* of its source */
    int64_t next, end;              /* position of its next token, and where its source ends */
    int64_t mask;                   /* of a ring; all ones for the sequence itself */
    const int32_t *rest, *rest_end; /* tokens that come before that one */
    float weight;
    int32_t in_ring;
};

struct ballot {
    int32_t token; /* SEPARATOR: no place had a vote */
    int32_t from_ring;
    float share;
};

static uint64_t pair_hash(int32_t first, int32_t second) {
    uint64_t both = (uint64_t)(uint32_t)first << 32 | (uint32_t)second;
    both *= 0x9E3779B97F4A7C15u;
    return both ^ both >> 29;
}

static int64_t oldest_of(const struct suffix_ring *ring) {
    return ring->end > ring->mask ? ring->end - ring->mask - 1 : 0;
}

static void put(struct suffix_ring *ring, int32_t token) {
    int64_t at = ring->end++;
    ring->tokens[at & ring->mask] = token;
    ring->distance[at & ring->mask] = 0;
    if (at == 0 || token == SEPARATOR) return;
    int32_t before = ring->tokens[(at - 1) & ring->mask];
    if (before == SEPARATOR) return;
    int64_t *head = &ring->head[pair_hash(before, token) & ring->head_mask];
    int64_t distance = *head ? at - (*head - 1) : 0;
    ring->distance[at & ring->mask] = distance > ring->mask ? 0 : (int32_t)distance;
    *head = at + 1;
}

/* Append a text and a separator. Of a text longer than the ring, the end is left. */
void lockstep_suffix_add(struct suffix_ring *ring, const int32_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++) put(ring, tokens[i]);
    put(ring, SEPARATOR);
}

/* Write the tokens of a ring into another one. */
void lockstep_suffix_copy(struct suffix_ring *ring, const struct suffix_ring *old) {
    for (int64_t at = oldest_of(old); at < old->end; at++) put(ring, old->tokens[at & old->mask]);
}

static float weight_of(int run, float factor) {
    while (--run > 0) factor *= BASE;
    return factor;
}

static int is_known(const struct bare_words *words, int32_t token) { return token >= 0 && token < words->num_tokens; }

/* Return how many of tokens[0 .. n) come after the last quote; 0: none, more than MAX_WORD, or there is no quote. */
static int word_at(const struct bare_words *words, const int32_t *tokens, int64_t n) {
    for (int size = 0; words && size <= MAX_WORD && size < n; size++) {
        const int32_t token = tokens[n - 1 - size];
        if (is_known(words, token) && words->quotes[token]) return size;
    }
    return 0;
}

/* Return how many tokens `token` has without its space if `size` tokens of `word` are the first of them, else 0. */
static int spelled(const struct bare_words *words, int32_t token, const int32_t *word, int size) {
    if (!is_known(words, token)) return 0;
    const int32_t *bare = words->tokens + words->start[token];
    int count = words->start[token + 1] - words->start[token];
    if (count < size) return 0;
    for (int i = 0; i < size; i++)
        if (bare[i] != word[i]) return 0;
    return count;
}

/* Return how many tokens before tokens[n] and before tokens[at] are equal, where those at `run` no longer are. */
static int longer_run(const struct bare_words *words, const int32_t *tokens, int64_t at, int64_t n, int run) {
    int size = at >= run && run < n ? word_at(words, tokens, n - run) : 0;
    return size && spelled(words, tokens[at - run], tokens + n - run - size, size) == size ? run + size + 1 : run;
}

/* Find the places of the sequence itself, the newest first. tokens[0 .. n) ends with the drafts so far. */
static int own_places(const struct suffix_args *a, const int32_t *tokens, int64_t n, int64_t prompt,
                      struct place *out) {
    const struct bare_words *words = a->words;
    const int word = word_at(words, tokens, n);
    int count = 0;
    for (int64_t at = n - 2; at >= 0 && count < MAX_OWN_PLACES; at--) {
        int run = 1, of_word = 0;
        if (tokens[at] == tokens[n - 1]) {
            while (run < a->max_run && run <= at && tokens[at - run] == tokens[n - 1 - run]) run++;
            if (run < a->max_run) run = longer_run(words, tokens, at, n, run);
        } else {
            of_word = word ? spelled(words, tokens[at], tokens + n - word, word) : 0;
            if (!of_word) continue;
            run = word + 1;
        }
        if (run < a->min_run) continue;
        float weight = weight_of(run < a->max_run ? run : a->max_run, at + 1 >= prompt ? WRITTEN : 1.0f);
        struct place p = {.tokens = tokens, .next = at + 1, .end = n, .mask = -1, .weight = weight};
        if (of_word) {
            p.rest = words->tokens + words->start[tokens[at]] + word;
            p.rest_end = p.rest + of_word - word;
        }
        out[count++] = p;
    }
    return count;
}

/* Find places of the ring, the newest first: those of at least the last two tokens. */
static int ring_places(const struct suffix_args *a, const struct suffix_ring *ring, const int32_t *tokens, int64_t n,
                       struct place *out) {
    if (n < 2) return 0;
    int count = 0, min_run = a->min_run < 2 ? 2 : a->min_run, max_run = a->max_run < 2 ? 2 : a->max_run;
    int64_t at = ring->head[pair_hash(tokens[n - 2], tokens[n - 1]) & ring->head_mask] - 1, oldest = oldest_of(ring);
    for (int steps = 0; at > oldest && steps < MAX_RING_PLACES; steps++) {
        int run = 0;
        while (run < max_run && at - run >= oldest && run < n &&
               ring->tokens[(at - run) & ring->mask] == tokens[n - 1 - run])
            run++;
        if (run >= min_run)
            out[count++] = (struct place){.tokens = ring->tokens,
                                          .next = at + 1,
                                          .end = ring->end,
                                          .mask = ring->mask,
                                          .weight = weight_of(run, WRITTEN),
                                          .in_ring = 1};
        int32_t distance = ring->distance[at & ring->mask];
        if (!distance) break;
        at -= distance;
    }
    return count;
}

static int32_t next_of(const struct place *p) {
    if (p->rest < p->rest_end) return *p->rest;
    return p->next < p->end ? p->tokens[p->next & p->mask] : SEPARATOR;
}

/* Let the places vote; those that chose the winner are left, one token further. */
static struct ballot vote(struct place *places, int *count) {
    int32_t token[MAX_PLACES];
    float sum[MAX_PLACES], all = 0.0f, most = 0.0f, of_ring = 0.0f;
    struct ballot won = {SEPARATOR, 0, 0.0f};
    int distinct = 0, left = 0;
    for (int i = 0; i < *count; i++) {
        int32_t next = next_of(&places[i]);
        if (next == SEPARATOR) continue;
        int t = 0;
        while (t < distinct && token[t] != next) t++;
        if (t == distinct) {
            token[distinct] = next;
            sum[distinct++] = 0.0f;
        }
        sum[t] += places[i].weight;
        all += places[i].weight;
        if (sum[t] > most) {
            most = sum[t];
            won.token = next;
        }
    }
    if (won.token == SEPARATOR) return won;
    for (int i = 0; i < *count; i++) {
        struct place p = places[i];
        if (next_of(&p) != won.token) continue;
        of_ring += p.in_ring ? p.weight : 0.0f;
        if (p.rest < p.rest_end)
            p.rest++;
        else
            p.next++;
        places[left++] = p;
    }
    *count = left;
    won.share = most / (all + UNKNOWN);
    won.from_ring = of_ring > 0.5f * most;
    return won;
}

static void draft_lane(const struct suffix_args *a, int lane) {
    int32_t slot = a->slots[lane], done = a->num_jump_forward ? a->num_jump_forward[lane] : 0;
    if (slot < 0 || done < 0 || !a->num_emitted[lane]) return;
    int32_t *drafts = a->drafts + slot * a->row_stride, *tokens = a->history + slot * a->history_stride;
    int64_t n = a->length[slot] + done, room = a->max_length[slot] - n - 1;
    int64_t limit = a->draft_limit[slot] < a->max_drafts ? a->draft_limit[slot] : a->max_drafts;
    if (limit - done < room) room = limit - done;
    const struct suffix_ring *ring = (const struct suffix_ring *)(intptr_t)a->rings[slot];
    struct place places[MAX_PLACES];
    int32_t count = 0, from_ring = 0;
    float worth = 1.0f;
    for (int search = 0; search < MAX_SEARCHES && count < room && worth >= WORTH; search++) {
        int found = ring ? ring_places(a, ring, tokens, n + count, places) : 0;
        found += own_places(a, tokens, n + count, a->prompt_length[slot], places + found);
        int32_t before = count;
        while (count < room) {
            struct ballot won = vote(places, &found);
            if (won.token == SEPARATOR) break;
            worth *= won.share;
            if (worth < WORTH) break;
            from_ring |= won.from_ring << (done + count);
            tokens[n + count] = drafts[done + count] = won.token;
            count++;
        }
        if (count == before) break;
    }
    a->num_drafts[slot] = done + count;
    a->from_ring[slot] = from_ring;
}

void lockstep_suffix_draft(const struct suffix_args *a) {
    for (int lane = 0; lane < a->num_lanes; lane++) draft_lane(a, lane);
}

/* Count the ring's drafts among those that a step verified. Call it before the next drafts are made. */
void lockstep_suffix_count(const struct count_args *a) {
    for (int lane = 0; lane < a->num_lanes; lane++) {
        if (a->slots[lane] < 0 || !a->num_emitted[lane]) continue;
        uint32_t bits = (uint32_t)a->from_ring[a->slots[lane]];
        a->counts[0] += __builtin_popcount(bits & ((1u << a->num_verified[lane]) - 1));
        a->counts[1] += __builtin_popcount(bits & ((1u << a->num_accepted[lane]) - 1));
    }
}
