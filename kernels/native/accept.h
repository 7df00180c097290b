/* Verification and sampling of a decode step on a CPU: masks, penalties, filters, shared noise, acceptance, advance.
 *
 * The rule (lossless speculation with common random numbers): the token at absolute position p of a request is
 *     argmax_v( filtered(masked logits)[v] / T + Gumbel(seed, p, v) ),          T = 0: without noise and filters
 * and a draft is accepted iff it is that token. The noise is Philox4x32-10 (Salmon et al., SC11): key = seed, counter =
 * (v / 4, p, 0, 0), word v % 4; so it depends on nothing but (seed, p, v), and speculation cannot change a token.
 *
 * Rows of one slot are computed in order, up to the first rejected draft, so that history holds exactly the tokens before
 * the row. Slots run in parallel and touch only their own lines. Not responsible for: the wait for the rows.
 */
#ifndef LOCKSTEP_ACCEPT_H
#define LOCKSTEP_ACCEPT_H

#include "simd.h"
#include "team.h"

enum { KIND_ALL, KIND_APPLY, KIND_FORCED, KIND_DEFER, KIND_DEAD_END, KIND_ERROR };
enum { RUN_ON, STOP_TOKEN, STOP_LENGTH, STOP_STEERED };

/* In place of the forced token of a row that is not FORCED: budgeted completion narrows the rest of the answer. */
enum { STEERED = -2 };

#define MAX_LOGPROBS 20
#define MASKED_LOGPROBS 32 /* added to a slot's number of alternatives: its log-probabilities are over legal tokens */
/* -log(-log(1 - 2^-24)): no Gumbel draw below is larger, so a block that cannot win even with it needs no noise. */
#define GUMBEL_MAX 16.6356f

struct accept_args {
    /* The batch, B entries. */
    const void *logits;        /* [N][logits_stride], V columns used */
    const int32_t *slots;      /* [B] */
    int32_t *drafts;           /* [B][row_stride]; accept reads it, draft writes column k */
    const int32_t *num_drafts; /* [B], at most P - 1 */
    const uint8_t *kinds;      /* [B][row_stride], RowKind */
    const int32_t *forced;     /* [B][row_stride] */
    const uint32_t *masks;     /* [slot][mask_slot_stride], row r at r * mask_row_stride words; 1 = allowed */
    /* Per slot, S entries. */
    int32_t *history; /* [S][history_stride], prompt then answer; this kernel appends */
    int32_t *length;  /* [S], tokens in history; this kernel advances */
    const int32_t *prompt_length;
    const int32_t *max_length; /* [S], prompt plus answer at most */
    const int32_t *min_tokens;
    const float *temperature, *top_p, *min_p, *repetition, *presence, *frequency;
    const int32_t *top_k;
    const uint64_t *seed;
    const int32_t *num_logprobs; /* [S], -1: none; see MASKED_LOGPROBS */
    const int64_t *rules; /* [S], address of int32: n, stop ids.., n, bad ids.., n, (length, ids..).., n, (id, bits of
                                * a float).. ; 0: none */
    const int64_t
        *prefixes; /* [S], address of the known prefixes of an exact request, see struct prefix; 0: not exact */
    /* Results, B entries. */
    int32_t *emitted;      /* [B][row_stride] */
    int32_t *num_emitted;  /* [B] */
    int32_t *num_accepted; /* [B] drafts among them */
    int32_t *finish;       /* [B] RUN_ON, STOP_TOKEN, STOP_LENGTH, STOP_STEERED */
    int32_t *blocked;      /* [B] kind of the row that emitted nothing, else 0 */
    float *logprob;        /* [B][row_stride] */
    int32_t *top_ids;      /* [B][row_stride][MAX_LOGPROBS] */
    float *top_logprobs;   /* [B][row_stride][MAX_LOGPROBS] */
    float *masses;         /* [B][row_stride][2], of exact requests: see choose_exact */
    /* Scratch, B entries of padded V. */
    float *scratch;           /* [B][scratch_stride] */
    int32_t *counts;          /* [B][scratch_stride], all zero between calls */
    const int32_t *first_row; /* [B], where a lane's rows of the logits begin; NULL: at b * P */
    int64_t logits_stride, row_stride, history_stride, mask_slot_stride, mask_row_stride, scratch_stride;
    int32_t num_batch, num_rows, vocab_size, bf16;
};

/* The high and the low words of x * factor. */
INLINE void multiply(uint32s x, uint32_t factor, uint32s *high, uint32s *low) {
#if WIDTH == 16
    const __m512i by = _mm512_set1_epi32((int32_t)factor), even = _mm512_mul_epu32((__m512i)x, by);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), by);
    *high = (uint32s)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
    *low = (uint32s)_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
#elif WIDTH == 8
    const __m256i by = _mm256_set1_epi32((int32_t)factor), even = _mm256_mul_epu32((__m256i)x, by);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), by);
    *high = (uint32s)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *low = (uint32s)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
    for (int i = 0; i < WIDTH; i++) {
        const uint64_t y = (uint64_t)x[i] * factor;
        (*high)[i] = (uint32_t)(y >> 32);
        (*low)[i] = (uint32_t)y;
    }
#endif
}

INLINE void philox_round(uint32s c[4], uint32_t k0, uint32_t k1) {
    uint32s hi0, lo0, hi1, lo1;
    multiply(c[0], 0xD2511F53u, &hi0, &lo0);
    multiply(c[2], 0xCD9E8D57u, &hi1, &lo1);
    c[0] = hi1 ^ c[1] ^ k0;
    c[1] = lo1;
    c[2] = hi0 ^ c[3] ^ k1;
    c[3] = lo0;
}

/* All bits of each lane of piece p whose bit of `bits` is set. */
INLINE int32s lanes_in(uint32_t bits, int p) { return -(int32s)((((uint32s){0} + bits) >> lanes_of(p)) & 1); }

/* Noise of the 64 tokens from `first` (a multiple of 64). */
INLINE void gumbel64(uint64_t seed, uint32_t position, uint32_t first, float out[64]) {
    for (int p = 0; p < PIECES; p++) {
        const uint32s zero = {0};
        uint32s c[4] = {lanes_of(p) + first / 4, zero + position, zero, zero};
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < 10; round++) {
            philox_round(c, k0, k1);
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        for (int w = 0; w < 4; w++) {
            /* 23 bits and a half: never 0, never 1. */
            const floats whole = __builtin_convertvector((int32s)(c[w] >> 9), floats);
            const floats u = (whole + splat(0.5f)) * splat(1.0f / 8388608.0f);
            const floats g = splat(0.0f) - log_floats(splat(0.0f) - log_floats(u));
            for (int i = 0; i < WIDTH; i++) out[4 * (p * WIDTH + i) + w] = g[i];
        }
    }
}

/* Floats in an order that integers share, so that a threshold can be bisected exactly. */
INLINE uint32_t order_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

INLINE float float_of(uint32_t k) {
    uint32_t u = k & 0x80000000u ? k & 0x7fffffffu : ~k;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* A prefix of answers whose mass is known. Of the tokens that may come after a prefix, `child` and the `next` ones after it
 * are known: `log_mass` is added to the logit of `token` before the draw. Prefix 0 is the empty answer. */
struct prefix {
    int32_t token, next, child; /* numbers of prefixes; -1: none */
    float log_mass;             /* at most 0 */
};

/* x[] := the row's logits in fp32. Entries from V to the padded end are -inf. */
INLINE void load_row(const struct accept_args *a, int64_t row, float *x, int bf16) {
    int64_t v = a->vocab_size, base = row * a->logits_stride;
    for (int64_t i = v & ~15ll; i < a->scratch_stride; i++) x[i] = i < v ? load1(a->logits, base + i, bf16) : -INFINITY;
    for (int64_t i = 0; i < (v & ~15ll); i += WIDTH) store_floats(x + i, load_lanes(a->logits, base + i, bf16));
}

/* x[] := -inf at everything illegal. */
INLINE void mask_row(const struct accept_args *a, int kind, int32_t forced, const uint32_t *mask, float *x) {
    int64_t v = a->vocab_size;
    if (kind == KIND_APPLY)
        for (int64_t i = 0; i < a->scratch_stride; i += 16) {
            uint32_t bits = i < v ? mask[i / 32] >> (i % 32) & 0xffffu : 0;
            if (bits == 0xffffu) continue;
            for (int p = 0; p < PIECES; p++) {
                float *at = x + i + p * WIDTH;
                store_floats(at, select_floats(lanes_in(bits, p), load_floats(at), splat(-INFINITY)));
            }
        }
    if (kind == KIND_FORCED) {
        float keep = forced >= 0 && forced < v ? x[forced] : -INFINITY;
        for (int64_t i = 0; i < a->scratch_stride; i++) x[i] = -INFINITY;
        if (forced >= 0 && forced < v) x[forced] = keep;
    }
}

/* x[] := the row's logits in fp32 with everything illegal at -inf. */
INLINE void load_masked(const struct accept_args *a, int64_t row, int kind, int32_t forced, const uint32_t *mask,
                        float *x, int bf16) {
    load_row(a, row, x, bf16);
    mask_row(a, kind, forced, mask, x);
}

/* Bans from the slot's rules (stop ids before min_tokens, bad ids, and the last id of a bad word whose other ids are in
 * place), and its biases. */
static void apply_rules(const int32_t *rule, int early, const int32_t *history, int32_t n, float *x) {
    int32_t count = *rule++;
    for (int32_t i = 0; i < count; i++, rule++)
        if (early) x[*rule] = -INFINITY;
    count = *rule++;
    for (int32_t i = 0; i < count; i++, rule++) x[*rule] = -INFINITY;
    count = *rule++;
    for (int32_t i = 0; i < count; i++) {
        int32_t len = *rule++;
        if (n >= len - 1 && memcmp(history + n - (len - 1), rule, (size_t)(len - 1) * 4) == 0)
            x[rule[len - 1]] = -INFINITY;
        rule += len;
    }
    count = *rule++;
    for (int32_t i = 0; i < count; i++, rule += 2) {
        float bias;
        memcpy(&bias, rule + 1, sizeof bias);
        x[*rule] += bias;
    }
}

/* Whether apply_rules would change a logit. The last id of a bad word counts, in place or not. */
static int has_bans(const int32_t *rule, int early) {
    if (!rule) return 0;
    if (early && rule[0]) return 1;
    rule += 1 + rule[0];
    return rule[0] || rule[1] || rule[2]; /* no bad id, so the numbers of bad words and of biases follow */
}

static int is_stop(const int32_t *rule, int32_t token) {
    for (int32_t i = 0; rule && i < rule[0]; i++)
        if (rule[1 + i] == token) return 1;
    return 0;
}

INLINE int has_penalties(const struct accept_args *a, int32_t s) {
    return a->repetition[s] != 1.0f || a->presence[s] != 0.0f || a->frequency[s] != 0.0f;
}

/* Repetition (prompt and answer), presence and frequency (answer). Two passes: count, then apply once and clear. A prompt
 * adapter's virtual tokens, whose ids are after the vocabulary, are left out. */
static void apply_penalties(const struct accept_args *a, int32_t s, const int32_t *history, int32_t n, int32_t *counts,
                            float *x) {
    const int32_t seen = 1 << 30;
    float rep = a->repetition[s], pres = a->presence[s], freq = a->frequency[s];
    if (!has_penalties(a, s)) return;
    for (int32_t i = 0; i < n; i++) {
        if (history[i] >= a->vocab_size) continue;
        counts[history[i]] |= seen;
        counts[history[i]] += i >= a->prompt_length[s];
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t token = history[i], c = token < a->vocab_size ? counts[token] : 0;
        if (c == 0) continue;
        counts[token] = 0;
        c &= ~seen;
        x[token] = x[token] > 0.0f ? x[token] / rep : x[token] * rep;
        x[token] -= fused1(freq, (float)c, c > 0 ? pres : 0.0f);
    }
}

/* The largest threshold whose survivors reach `goal`: their number (weights of 1) or their mass (exp(x - peak)). */
INLINE float threshold(const float *x, int64_t n, float peak, float floor, float goal, int mass) {
    uint32_t lo = order_of(-INFINITY), hi = order_of(peak); /* lo satisfies, hi + 1 does not */
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo + 1) / 2;
        float cut = float_of(mid) > floor ? float_of(mid) : floor;
        floats sum[PIECES] = {0};
        FOR_LANES(i, p, n) {
            const floats y = load_floats(x + i), each = mass ? exp_floats(y - splat(peak)) : splat(1.0f);
            sum[p] += select_floats(y >= splat(cut), each, splat(0.0f));
        }
        if (sum16(sum) >= goal)
            lo = mid;
        else
            hi = mid - 1;
    }
    return float_of(lo);
}

INLINE float total_mass(const float *x, int64_t n, float peak, float cut) {
    floats sum[PIECES] = {0};
    FOR_LANES(i, p, n) {
        const floats y = load_floats(x + i);
        sum[p] += select_floats(y >= splat(cut), exp_floats(y - splat(peak)), splat(0.0f));
    }
    return sum16(sum);
}

INLINE float peak_of(const float *x, int64_t n) {
    floats m[PIECES];
    UNROLL for (int p = 0; p < PIECES; p++) m[p] = splat(-INFINITY);
    FOR_LANES(i, p, n) m[p] = larger(load_floats(x + i), m[p]);
    return max16(m);
}

/* The largest of x + noise among the entries that reach `cut`, or -1. Ties go to the lowest id. */
INLINE int32_t draw(uint64_t seed, uint32_t position, const float *x, int64_t n, float cut) {
    int32_t best = -1;
    float top = -INFINITY, noise[64];
    for (int64_t i = 0; i < n; i += 64) {
        float reach = peak_of(x + i, 64);
        if (!(reach >= cut) || reach == -INFINITY || reach + GUMBEL_MAX < top) continue;
        gumbel64(seed, position, (uint32_t)i, noise);
        for (int j = 0; j < 64; j++)
            if (x[i + j] >= cut && x[i + j] > -INFINITY && x[i + j] + noise[j] > top) {
                top = x[i + j] + noise[j];
                best = (int32_t)(i + j);
            }
    }
    return best;
}

/* The token of this position, or -1 when nothing is legal. Ties go to the lowest id. */
INLINE int32_t choose(const struct accept_args *a, int32_t s, uint32_t position, float *x) {
    int64_t n = a->scratch_stride;
    float peak = peak_of(x, n), t = a->temperature[s];
    if (!(peak > -INFINITY)) return -1;
    if (t == 0.0f) {
        for (int64_t i = 0;; i++)
            if (x[i] == peak) return (int32_t)i;
    }
    /* The peak goes to 0 first: a tiny temperature must not overflow it. */
    for (int64_t i = 0; i < n; i++) x[i] = (x[i] - peak) / t;
    peak = 0.0f;
    float cut = -INFINITY;
    if (a->top_k[s] > 0 && a->top_k[s] < a->vocab_size) cut = threshold(x, n, peak, cut, (float)a->top_k[s], 0);
    if (a->top_p[s] < 1.0f) {
        float by_mass = threshold(x, n, peak, cut, a->top_p[s] * total_mass(x, n, peak, cut), 1);
        cut = by_mass > cut ? by_mass : cut;
    }
    if (a->min_p[s] > 0.0f) {
        float by_peak = peak + logf(a->min_p[s]);
        cut = by_peak > cut ? by_peak : cut;
    }
    if (cut > peak) cut = peak;
    return draw(a->seed[s], position, x, n, cut);
}

/* What `choose` returns for a row at T = 0 whose logits nothing changes but the mask, in one pass and without scratch. */
INLINE int32_t likeliest(const struct accept_args *a, int64_t row, int kind, int32_t forced, const uint32_t *mask,
                         int bf16) {
    const int64_t v = a->vocab_size, base = row * a->logits_stride, whole = v & ~15ll;
    if (kind == KIND_FORCED)
        return forced >= 0 && forced < v && load1(a->logits, base + forced, bf16) > -INFINITY ? forced : -1;
    floats tops[PIECES];
    uint32s places[PIECES];
    UNROLL for (int p = 0; p < PIECES; p++) {
        tops[p] = splat(-INFINITY);
        places[p] = lanes_of(p);
    }
    for (int64_t i = 0; i < whole; i += 16) {
        const uint32_t bits = kind == KIND_APPLY ? mask[i / 32] >> (i % 32) & 0xffffu : 0xffffu;
        if (!bits) continue;
        UNROLL for (int p = 0; p < PIECES; p++) {
            const floats y = load_lanes(a->logits, base + i + p * WIDTH, bf16);
            int32s better = y > tops[p];
            if (bits != 0xffffu) better &= lanes_in(bits, p);
            tops[p] = select_floats(better, y, tops[p]);
            places[p] = (uint32s)select_floats(better, (floats)(lanes_of(p) + (uint32_t)i), (floats)places[p]);
        }
    }
    float top[16], peak = -INFINITY;
    uint32_t at[16];
    memcpy(top, tops, sizeof top);
    memcpy(at, places, sizeof at);
    int32_t best = -1;
    for (int j = 0; j < 16; j++)
        if (top[j] > peak || (top[j] == peak && best >= 0 && (int32_t)at[j] < best)) {
            peak = top[j];
            best = (int32_t)at[j];
        }
    for (int64_t i = whole; i < v; i++) {
        const int legal = kind != KIND_APPLY || (mask[i / 32] >> (i % 32) & 1);
        const float x = load1(a->logits, base + i, bf16);
        if (legal && x > peak) {
            peak = x;
            best = (int32_t)i;
        }
    }
    return best;
}

/* The number of the prefix that is the answer so far, or -1 where it is not known. */
static int32_t prefix_of(const struct prefix *known, const int32_t *answer, int32_t count) {
    int32_t at = 0;
    for (int32_t i = 0; i < count && at >= 0; i++)
        for (at = known[at].child; at >= 0 && known[at].token != answer[i];) at = known[at].next;
    return at;
}

/* The token of a row of an exact request, or -1. `x` has the logits after rules and penalties, and without the mask: they
 * define the distribution p that is conditioned. The draw is from p times the mask times the masses of known prefixes.
 * out[0] := log p(token); out[1] := log of p's mass on all other legal tokens that make no known prefix. */
INLINE int32_t choose_exact(const struct accept_args *a, int32_t s, uint32_t position, int kind, int32_t forced,
                            const uint32_t *mask, int32_t answer_length, const int32_t *answer, float *x, float *out) {
    int64_t n = a->scratch_stride;
    const struct prefix *known = (const struct prefix *)(intptr_t)a->prefixes[s];
    float peak = peak_of(x, n), t = a->temperature[s];
    if (!(peak > -INFINITY)) return -1;
    for (int64_t i = 0; i < n; i++) x[i] = (x[i] - peak) / t;
    float all = logf(total_mass(x, n, 0.0f, -INFINITY));
    mask_row(a, kind, forced, mask, x);
    int32_t here = prefix_of(known, answer, answer_length), first = here < 0 ? -1 : known[here].child;
    for (int32_t e = first; e >= 0; e = known[e].next) x[known[e].token] += known[e].log_mass;
    int32_t token = draw(a->seed[s], position, x, n, -INFINITY);
    if (token < 0) return -1;
    out[0] = x[token] - all;
    for (int32_t e = first; e >= 0; e = known[e].next) {
        if (known[e].token == token) out[0] -= known[e].log_mass;
        x[known[e].token] = -INFINITY;
    }
    x[token] = -INFINITY;
    float rest = peak_of(x, n);
    out[1] = rest > -INFINITY ? rest + logf(total_mass(x, n, rest, -INFINITY)) - all : -INFINITY;
    return token;
}

/* Log-probabilities under the model's own distribution, or among the legal tokens of a row: no penalty, no temperature.
 * Where fewer than `top` are legal, the rest is -inf. */
INLINE void report_logprobs(const struct accept_args *a, int64_t row, int64_t out, int32_t token, int32_t top, int kind,
                            int32_t forced, const uint32_t *mask, float *x, int bf16) {
    load_masked(a, row, kind, forced, mask, x, bf16);
    float peak = peak_of(x, a->scratch_stride);
    float lse = peak + logf(total_mass(x, a->scratch_stride, peak, -INFINITY));
    int32_t *ids = a->top_ids + out * MAX_LOGPROBS;
    float *values = a->top_logprobs + out * MAX_LOGPROBS;
    int32_t held = 0;
    a->logprob[out] = x[token] - lse;
    for (int32_t i = 0; i < a->vocab_size && top > 0; i++) {
        if (held == top && x[i] - lse <= values[held - 1]) continue;
        int32_t at = held < top ? held++ : held - 1;
        for (; at > 0 && values[at - 1] < x[i] - lse; at--) {
            values[at] = values[at - 1];
            ids[at] = ids[at - 1];
        }
        values[at] = x[i] - lse;
        ids[at] = i;
    }
}

/* Log-probabilities of given tokens, one a row; the rows are cut into groups that share scratch. */
struct logprobs_args {
    const void *logits;    /* [N][logits_stride], V columns used */
    const int32_t *tokens; /* [N] */
    float *logprob;        /* [N] */
    int32_t *top_ids;      /* [N][MAX_LOGPROBS] */
    float *top_logprobs;   /* [N][MAX_LOGPROBS] */
    float *scratch;        /* [num_groups][scratch_stride] */
    int64_t logits_stride, scratch_stride;
    int32_t num_rows, num_groups, top, vocab_size, bf16;
};

static void logprobs_body(struct member *m, void *context) {
    const struct logprobs_args *a = context;
    const struct accept_args rows = {.logits = a->logits,
                                     .logprob = a->logprob,
                                     .top_ids = a->top_ids,
                                     .top_logprobs = a->top_logprobs,
                                     .logits_stride = a->logits_stride,
                                     .scratch_stride = a->scratch_stride,
                                     .vocab_size = a->vocab_size};
    TEAM_FOR_CHUNKS(m, group, a->num_groups, 1)
    for (int64_t row = group; row < a->num_rows; row += a->num_groups) {
        float *x = a->scratch + group * a->scratch_stride;
        if (a->bf16)
            report_logprobs(&rows, row, row, a->tokens[row], a->top, KIND_ALL, 0, 0, x, 1);
        else
            report_logprobs(&rows, row, row, a->tokens[row], a->top, KIND_ALL, 0, 0, x, 0);
    }
}

void VARIANT(lockstep_logprobs)(const struct logprobs_args *a) { team_run(logprobs_body, (void *)(intptr_t)a); }

INLINE void accept_slot(const struct accept_args *a, int64_t b, int bf16) {
    int32_t s = a->slots[b], *history = a->history + s * a->history_stride, n = a->length[s];
    const int32_t *rule = (const int32_t *)(intptr_t)a->rules[s];
    float *x = a->scratch + b * a->scratch_stride;
    int32_t emitted = 0, accepted = 0, finish = RUN_ON, blocked = 0;
    const int plain = a->temperature[s] == 0.0f && !a->prefixes[s] && !has_penalties(a, s);
    int64_t first = a->first_row ? a->first_row[b] : b * a->num_rows;
    for (int32_t j = 0; j <= a->num_drafts[b] && finish == RUN_ON; j++) {
        int64_t out = b * a->row_stride + j, row = first + j;
        int kind = a->kinds[out];
        if (kind >= KIND_DEFER) {
            blocked = kind;
            break;
        }
        const uint32_t *mask = a->masks + s * a->mask_slot_stride + j * a->mask_row_stride;
        int32_t answered = n - a->prompt_length[s];
        const int early = answered < a->min_tokens[s];
        int32_t token;
        if (plain && !has_bans(rule, early)) {
            token = likeliest(a, row, kind, a->forced[out], mask, bf16);
        } else {
            if (a->prefixes[s])
                load_row(a, row, x, bf16);
            else
                load_masked(a, row, kind, a->forced[out], mask, x, bf16);
            if (rule) apply_rules(rule, early, history, n, x);
            apply_penalties(a, s, history, n, a->counts + b * a->scratch_stride, x);
            token = a->prefixes[s] ? choose_exact(a, s, (uint32_t)n, kind, a->forced[out], mask, answered,
                                                  history + n - answered, x, a->masses + 2 * out)
                                   : choose(a, s, (uint32_t)n, x);
        }
        if (token < 0) {
            blocked = KIND_DEAD_END;
            break;
        }
        int32_t top = a->num_logprobs[s];
        if (top >= MASKED_LOGPROBS)
            report_logprobs(a, row, out, token, top - MASKED_LOGPROBS, kind, a->forced[out], mask, x, bf16);
        else if (top >= 0)
            report_logprobs(a, row, out, token, top, KIND_ALL, 0, 0, x, bf16);
        a->emitted[out] = token;
        history[n++] = token;
        emitted++;
        int match = j < a->num_drafts[b] && a->drafts[out] == token;
        accepted += match;
        int stop = a->forced[out] == STEERED ? STOP_STEERED : STOP_TOKEN;
        finish = is_stop(rule, token) ? stop : n >= a->max_length[s] ? STOP_LENGTH : RUN_ON;
        if (!match) break;
    }
    a->length[s] = n;
    a->num_emitted[b] = emitted;
    a->num_accepted[b] = accepted;
    a->finish[b] = finish;
    a->blocked[b] = blocked;
}

static void accept_one(const struct accept_args *a, int64_t b) {
    if (a->bf16)
        accept_slot(a, b, 1);
    else
        accept_slot(a, b, 0);
}

static void accept_body(struct member *m, void *context) {
    const struct accept_args *a = context;
    TEAM_FOR_CHUNKS(m, b, a->num_batch, 1)
    accept_one(a, b);
}

void VARIANT(lockstep_accept)(const struct accept_args *a) {
    if (a->num_batch == 1)
        accept_one(a, 0);
    else
        team_run(accept_body, (void *)(intptr_t)a);
}

/* Draft number k of slot s: the target's own rule at position length + k, over the drafter's logits (row b). The draft goes
 * into drafts and, beyond `length`, into history, where the next draft's penalties find it. -1: nothing is legal. */
INLINE void draft_slot(const struct accept_args *a, int64_t b, int32_t k, int bf16) {
    int32_t s = a->slots[b], *history = a->history + s * a->history_stride, n = a->length[s] + k;
    const int32_t *rule = (const int32_t *)(intptr_t)a->rules[s];
    const uint32_t *mask = a->masks + s * a->mask_slot_stride + k * a->mask_row_stride;
    float *x = a->scratch + b * a->scratch_stride;
    int64_t out = b * a->row_stride + k;
    load_masked(a, b, a->kinds[out], a->forced[out], mask, x, bf16);
    if (rule) apply_rules(rule, n - a->prompt_length[s] < a->min_tokens[s], history, n, x);
    apply_penalties(a, s, history, n, a->counts + b * a->scratch_stride, x);
    int32_t token = a->kinds[out] >= KIND_DEFER ? -1 : choose(a, s, (uint32_t)n, x);
    a->drafts[out] = token;
    history[n] = token < 0 ? 0 : token;
}

struct draft_call {
    const struct accept_args *args;
    int32_t k;
};

static void draft_one(const struct accept_args *a, int64_t b, int32_t k) {
    if (a->bf16)
        draft_slot(a, b, k, 1);
    else
        draft_slot(a, b, k, 0);
}

static void draft_body(struct member *m, void *context) {
    const struct draft_call *call = context;
    TEAM_FOR_CHUNKS(m, b, call->args->num_batch, 1)
    draft_one(call->args, b, call->k);
}

void VARIANT(lockstep_draft)(const struct accept_args *a, int32_t k) {
    if (a->num_batch == 1)
        draft_one(a, 0, k);
    else
        team_run(draft_body, &(struct draft_call){a, k});
}

/* Only the noise, for tests and for comparing devices: out[0..n). */
void VARIANT(lockstep_gumbel)(uint64_t seed, uint32_t position, int64_t n, float *out) {
    float block[64];
    for (int64_t i = 0; i < n; i += 64) {
        gumbel64(seed, position, (uint32_t)i, block);
        memcpy(out + i, block, (size_t)(n - i < 64 ? n - i : 64) * sizeof(float));
    }
}

#endif
