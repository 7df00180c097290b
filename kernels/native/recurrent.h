/* Layers with a state, for CPUs: a short convolution, a matrix of each head, and a scan over channels.
 *
 * A lane of a call has one sequence's rows. Its committed state first takes the accepted rows of the sequence's last call
 * again, from the inputs that were saved of them (`redo`), then the rows of this call; the state after `commit` of those is
 * written back, and the inputs of the rows after them are saved. Invariant: one function takes every row, whether it is
 * taken again, committed or pending, in a fixed order of operations, so a row has the same bits in every call and with any
 * number of threads. Not responsible for: products, places of sequences (see gpu_engine/model/recurrent/).
 */
#ifndef LOCKSTEP_RECURRENT_H
#define LOCKSTEP_RECURRENT_H

#include "fused.h"
#include "team.h"

enum { CONV_COLS = 64, MAX_TAPS = 8, HEAD_COLS = 32, MAX_KEYS = 256, SCAN_COLS = 64, MAX_SCANNED = 64 };
/* One copy, so one choice of instructions for all rows: gcc makes others of a function whose arguments it knows. */
#if defined(__GNUC__) && !defined(__clang__)
#define OWN_CODE static __attribute__((noipa))
#else
#define OWN_CODE static __attribute__((noinline))
#endif

struct recurrent_rows {
    const int32_t *first; /* [lanes + 1], of the rows of this call */
    const int32_t *place; /* [lanes], in the pools; negative: padding */
    const int32_t *fresh; /* [lanes], 1: the state begins with zeros */
    const int32_t *redo;  /* [lanes], pending rows that are taken again */
    const int32_t *commit;
    int64_t lanes, num_rows, max_pending;
};

/* The rows of one lane, those that are taken again first. */
struct lane {
    int64_t first, count, redo, commit, place, fresh;
};

INLINE struct lane lane_of(const struct recurrent_rows *r, int64_t i) {
    const int64_t count = r->first[i + 1] - r->first[i];
    return (struct lane){r->first[i], count, r->redo[i], r->commit[i], r->place[i], r->fresh[i]};
}

/* The number of a lane's row in a buffer that begins with max_pending rows of each lane that are taken again. */
INLINE int64_t with_redo(const struct recurrent_rows *r, int64_t i, const struct lane *l, int64_t row) {
    return row < l->redo ? i * r->max_pending + row : r->lanes * r->max_pending + l->first + row - l->redo;
}

INLINE void clear_rows(void *out, int64_t begin, int64_t end, int64_t row_bytes) {
    if (end > begin) memset((char *)out + begin * row_bytes, 0, (size_t)((end - begin) * row_bytes));
}

/* Copy `n` floats, of which a whole block has `block`: a call of memcpy for each row of a state takes longer than the row. */
INLINE void copy_floats(float *to, const float *from, int64_t n, int64_t block) {
    if (n < block) {
        memcpy(to, from, (size_t)n * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < block; i += WIDTH) store_floats(to + i, load_floats(from + i));
}

/* Save `width` inputs of each pending row. The caller's loop over the rows has ended: it read those of the last call. */
INLINE void save_pending(const struct recurrent_rows *r, const struct lane *l, const float *from, int64_t from_stride,
                         float *pending, int64_t stride, int64_t width) {
    const int64_t after = l->count - l->commit, count = after < r->max_pending ? after : r->max_pending;
    for (int64_t j = 0; j < count; j++)
        memcpy(pending + (l->place * r->max_pending + j) * stride, from + (l->first + l->commit + j) * from_stride,
               (size_t)width * sizeof(float));
}

/* ln(1 + exp(x)), within 4 ulp. */
INLINE floats softplus(floats x) {
    const int32s below = x < splat(0.0f);
    const floats e = exp_floats(select_floats(below, x, splat(0.0f) - x)), u = splat(1.0f) + e;
    const int32s small = u == splat(1.0f); /* then ln(u) is 0, and ln(1 + e) is e */
    const floats rest = u - splat(1.0f);
    const floats made_up = e / select_floats(small, splat(1.0f), rest); /* for what u has lost of e */
    const floats log1p = select_floats(small, e, log_floats(u) * made_up);
    return select_floats(below, log1p, x + log1p);
}

INLINE floats bounded(floats x, float low, float high) {
    x = select_floats(x < splat(low), splat(low), x);
    return select_floats(x > splat(high), splat(high), x);
}

/* A causal convolution of each channel over its last `taps` inputs. */
enum { CONV_PLAIN, CONV_SILU };

struct short_conv_args {
    struct recurrent_rows rows;
    const void *x;       /* [num_rows][x_stride] */
    float *tail;         /* [S][taps - 1][channels], the last inputs */
    float *pending;      /* [S][max_pending][pending_stride] */
    const float *weight; /* [taps][channels]; the last is of the row itself */
    const float *bias;   /* [channels]; null: none */
    void *out;           /* [num_rows][channels], after the rows that are taken again if `emits_redo` */
    int64_t x_stride, pending_stride, channels, taps;
    int32_t act, bf16, out_bf16, emits_redo;
};

/* `window`: a ring of the inputs, of which `newest` is the row's own. */
OWN_CODE void conv_row(const struct short_conv_args *a, int64_t c, int64_t n, const float (*window)[CONV_COLS],
                       int64_t newest, int64_t to) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        floats sum = a->bias ? load_some(a->bias, c + i, n - i, 0) : splat(0.0f);
        for (int64_t t = 0; t < a->taps; t++)
            sum = fused(load_some(a->weight, t * a->channels + c + i, n - i, 0),
                        load_floats(window[(newest + 1 + t) % a->taps] + i), sum);
        if (a->act == CONV_SILU) sum = sum * sigmoid_floats(sum);
        if (a->out_bf16)
            store_some(a->out, to * a->channels + c + i, sum, n - i, 1);
        else
            store_some(a->out, to * a->channels + c + i, sum, n - i, 0);
    }
}

/* The last taps - 1 inputs; `next` is the place in the ring of the row after them. */
INLINE void write_tail(const struct short_conv_args *a, float *tail, int64_t n, const float (*window)[CONV_COLS],
                       int64_t next) {
    for (int64_t t = 0; t < a->taps - 1; t++)
        memcpy(tail + t * a->channels, window[(next + 1 + t) % a->taps], (size_t)n * sizeof(float));
}

INLINE void conv_block(const struct short_conv_args *a, int64_t i, int64_t c) {
    const struct recurrent_rows *r = &a->rows;
    const struct lane l = lane_of(r, i);
    const int64_t n = a->channels - c < CONV_COLS ? a->channels - c : CONV_COLS;
    const int64_t rows = l.redo + l.count, written = l.redo + l.commit;
    float window[MAX_TAPS][CONV_COLS] = {{0}}; /* row -1 is at taps - 1, before row 0 */
    float *tail = a->tail + l.place * (a->taps - 1) * a->channels + c;
    float *pending = a->pending + l.place * r->max_pending * a->pending_stride + c;
    for (int64_t t = 0; t < a->taps - 1 && !l.fresh; t++)
        memcpy(window[t + 1], tail + t * a->channels, (size_t)n * sizeof(float));
    for (int64_t row = 0; row <= rows; row++) {
        const int64_t newest = row % a->taps;
        if (row == written) write_tail(a, tail, n, window, newest);
        if (row == rows) break;
        if (row < l.redo)
            memcpy(window[newest], pending + row * a->pending_stride, (size_t)n * sizeof(float));
        else
            for (int64_t k = 0; k < n; k += WIDTH) {
                const int64_t at = (l.first + row - l.redo) * a->x_stride + c + k;
                const floats x = a->bf16 ? load_some(a->x, at, n - k, 1) : load_some(a->x, at, n - k, 0);
                store_floats(window[newest] + k, x);
            }
        const int64_t after = row - written;
        if (after >= 0 && after < r->max_pending)
            memcpy(pending + after * a->pending_stride, window[newest], (size_t)n * sizeof(float));
        if (a->emits_redo)
            conv_row(a, c, n, window, newest, with_redo(r, i, &l, row));
        else if (row >= l.redo)
            conv_row(a, c, n, window, newest, l.first + row - l.redo);
    }
}

static void short_conv_body(struct member *m, void *context) {
    const struct short_conv_args *a = context;
    const struct recurrent_rows *r = &a->rows;
    const int64_t blocks = (a->channels + CONV_COLS - 1) / CONV_COLS,
                  begin = a->emits_redo ? r->lanes * r->max_pending : 0;
    const int64_t row_bytes = a->channels * (a->out_bf16 ? 2 : 4);
    TEAM_FOR_CHUNKS(m, item, r->lanes * blocks, 4) {
        const int64_t i = item / blocks;
        if (r->place[i] >= 0)
            conv_block(a, i, item % blocks * CONV_COLS);
        else if (item % blocks == 0)
            clear_rows(a->out, begin + r->first[i], begin + r->first[i + 1], row_bytes);
    }
    TEAM_FOR_CHUNKS(m, once, 1, 1)
    clear_rows(a->out, begin + r->first[r->lanes], begin + r->num_rows, row_bytes);
}

void VARIANT(lockstep_short_conv)(const struct short_conv_args *a) { team_run(short_conv_body, (void *)(intptr_t)a); }

/* A matrix of each head: decayed, then a key times a value is added, then a query reads it.
 *
 *     S := decay S + k d,  y = q S + skip v
 * Gated delta rule (Yang et al. 2024): q and k are normed, d = beta (v - k S decay), beta = sigmoid(b).
 * State space duality (Mamba 2, Dao and Gu 2024): d = dt v. In both, dt = softplus(raw + bias) and decay = exp(dt A).
 */
struct matrix_recurrence_args {
    struct recurrent_rows rows;
    const float *mixed;   /* [lanes max_pending + num_rows][mixed_stride]: the convolution's output, with redone rows */
    const float *control; /* [num_rows][heads of dt, then, for the delta rule, heads of b] */
    float *state;         /* [S][heads][keys][values] */
    float *pending;       /* [S][max_pending][pending_stride], the control */
    const float *a;       /* [heads], negative */
    const float *bias;    /* [heads] */
    const float *skip;    /* [heads]; null: none */
    float *out;           /* [num_rows][heads values] */
    int64_t mixed_stride, pending_stride, q_at, k_at, v_at, heads, key_heads, keys, values;
    float dt_min, dt_max, q_scale, eps;
    int32_t delta;
};

struct head_state {
    _Alignas(64) float s[MAX_KEYS][HEAD_COLS];
    _Alignas(64) float q[MAX_KEYS], k[MAX_KEYS];
};

INLINE float inverse_norm(const float *x, int64_t n, float eps) {
    floats squares[PIECES] = {0};
    FOR_LANES(i, p, n) {
        const floats y = load_some(x, i, n - i, 0);
        squares[p] = fused(y, y, squares[p]);
    }
    return 1.0f / sqrtf(sum16(squares) + eps);
}

/* What all columns of a head have in common in one row. */
struct row_control {
    floats dt, decay, beta;
    float skip;
};

/* The 2 * WIDTH columns from `at` on, of which the block has `n`. */
INLINE void matrix_columns(const struct matrix_recurrence_args *a, struct head_state *h, const struct row_control *r,
                           const float *values, int64_t at, int64_t n, float *out) {
    const int64_t whole = (a->keys + 3) & ~(int64_t)3;
    floats v[2], d[2], y[4][2] = {{{0}}};
    UNROLL for (int e = 0; e < 2; e++) v[e] = load_some(values, at + e * WIDTH, n - e * WIDTH, 0);
    UNROLL for (int e = 0; e < 2; e++) d[e] = v[e] * r->dt;
    if (a->delta) {
        floats x[4][2] = {{{0}}};
        for (int64_t i = 0; i < whole; i += 4)
            UNROLL for (int u = 0; u < 4; u++) UNROLL for (int e = 0; e < 2; e++) x[u][e] =
                fused(splat(h->k[i + u]), load_floats(h->s[i + u] + at + e * WIDTH), x[u][e]);
        UNROLL for (int e = 0; e < 2; e++) d[e] =
            fused(-r->decay, (x[0][e] + x[1][e]) + (x[2][e] + x[3][e]), v[e]) * r->beta;
    }
    for (int64_t i = 0; i < whole; i += 4) UNROLL for (int u = 0; u < 4; u++) {
            const floats k = splat(h->k[i + u]), q = splat(h->q[i + u]);
            UNROLL for (int e = 0; e < 2; e++) {
                float *state = h->s[i + u] + at + e * WIDTH;
                const floats s = fused(load_floats(state), r->decay, k * d[e]);
                store_floats(state, s);
                y[u][e] = fused(q, s, y[u][e]);
            }
        }
    for (int e = 0; out && e < 2; e++)
        store_some(out, at + e * WIDTH, fused(splat(r->skip), v[e], (y[0][e] + y[1][e]) + (y[2][e] + y[3][e])),
                   n - e * WIDTH, 0);
}

/* A row of `n` columns from column c of the values; out: null for a row that is taken again. */
OWN_CODE void matrix_row(const struct matrix_recurrence_args *a, struct head_state *h, const float *mixed,
                         const float *control, int64_t head, int64_t c, int64_t n, float *out) {
    const int64_t of_keys = head / (a->heads / a->key_heads) * a->keys;
    const float *q = mixed + a->q_at + of_keys, *k = mixed + a->k_at + of_keys;
    const float *v = mixed + a->v_at + head * a->values + c;
    const float q_by = a->delta ? a->q_scale * inverse_norm(q, a->keys, a->eps) : a->q_scale;
    const float k_by = a->delta ? inverse_norm(k, a->keys, a->eps) : 1.0f;
    for (int64_t i = 0; i < a->keys; i++) {
        h->q[i] = q[i] * q_by;
        h->k[i] = k[i] * k_by;
    }
    const floats dt = bounded(softplus(splat(control[head] + a->bias[head])), a->dt_min, a->dt_max);
    const struct row_control r = {
        .dt = dt,
        .decay = exp_floats(dt * splat(a->a[head])),
        .beta = a->delta ? sigmoid_floats(splat(control[a->heads + head])) : splat(0.0f),
        .skip = a->skip ? a->skip[head] : 0.0f,
    };
    for (int64_t at = 0; at < n; at += 2 * WIDTH) matrix_columns(a, h, &r, v, at, n - at, out);
}

INLINE void matrix_block(const struct matrix_recurrence_args *a, int64_t i, int64_t head, int64_t c) {
    const struct recurrent_rows *r = &a->rows;
    const struct lane l = lane_of(r, i);
    const int64_t n = a->values - c < HEAD_COLS ? a->values - c : HEAD_COLS;
    const int64_t width = a->heads * (a->delta ? 2 : 1), rows = l.redo + l.count;
    float *state = a->state + (l.place * a->heads + head) * a->keys * a->values + c;
    struct head_state h;
    memset(h.s, 0, (size_t)((a->keys + 3) & ~(int64_t)3) * sizeof h.s[0]);
    for (int64_t k = a->keys; k < a->keys + 3 && k < MAX_KEYS; k++) h.q[k] = h.k[k] = 0.0f;
    for (int64_t k = 0; k < a->keys && !l.fresh; k++) copy_floats(h.s[k], state + k * a->values, n, HEAD_COLS);
    for (int64_t row = 0; row <= rows; row++) {
        if (row == l.redo + l.commit)
            for (int64_t k = 0; k < a->keys; k++) copy_floats(state + k * a->values, h.s[k], n, HEAD_COLS);
        if (row == rows) break;
        const int64_t own = l.first + row - l.redo;
        const float *mixed = a->mixed + with_redo(r, i, &l, row) * a->mixed_stride;
        if (row < l.redo)
            matrix_row(a, &h, mixed, a->pending + (l.place * r->max_pending + row) * a->pending_stride, head, c, n, 0);
        else
            matrix_row(a, &h, mixed, a->control + own * width, head, c, n,
                       a->out + (own * a->heads + head) * a->values + c);
    }
}

static void matrix_recurrence_body(struct member *m, void *context) {
    const struct matrix_recurrence_args *a = context;
    const struct recurrent_rows *r = &a->rows;
    const int64_t blocks = (a->values + HEAD_COLS - 1) / HEAD_COLS, each = a->heads * blocks;
    const int64_t row_bytes = a->heads * a->values * 4, width = a->heads * (a->delta ? 2 : 1);
    TEAM_FOR_CHUNKS(m, item, r->lanes * each, 1) {
        const int64_t i = item / each, of_lane = item % each;
        if (r->place[i] >= 0)
            matrix_block(a, i, of_lane / blocks, of_lane % blocks * HEAD_COLS);
        else if (of_lane == 0)
            clear_rows(a->out, r->first[i], r->first[i + 1], row_bytes);
    }
    TEAM_FOR_CHUNKS(m, lane, r->lanes + 1, 1) {
        if (lane == r->lanes) {
            clear_rows(a->out, r->first[r->lanes], r->num_rows, row_bytes);
        } else if (r->place[lane] >= 0) {
            const struct lane l = lane_of(r, lane);
            save_pending(r, &l, a->control, width, a->pending, a->pending_stride, width);
        }
    }
}

void VARIANT(lockstep_matrix_recurrence)(const struct matrix_recurrence_args *a) {
    team_run(matrix_recurrence_body, (void *)(intptr_t)a);
}

/* A scan of each channel over a few states, whose decay depends on the row (Mamba, Gu and Dao 2023):
 *
 *     s[n] := exp(dt a[n]) s[n] + dt b[n] x,  y = sum over n of c[n] s[n] + skip x,  dt = softplus(raw)
 */
struct selective_scan_args {
    struct recurrent_rows rows;
    const float *x;       /* [lanes max_pending + num_rows][channels]: the convolution's output, with redone rows */
    const float *control; /* [num_rows][channels of dt, then `states` of b, then `states` of c] */
    float *state;         /* [S][states][channels] */
    float *pending;       /* [S][max_pending][pending_stride], the control without c */
    const float *a;       /* [states][channels], negative */
    const float *skip;    /* [channels] */
    float *out;           /* [num_rows][channels] */
    int64_t pending_stride, channels, states;
};

/* `dt`: of the block's channels. */
OWN_CODE void scan_row(const struct selective_scan_args *a, float (*s)[SCAN_COLS], int64_t at, int64_t n,
                       const float *x, const float *dt, const float *b, const float *c, float *out) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        const floats step = softplus(load_some(dt, i, n - i, 0)), xi = load_some(x, i, n - i, 0), put = step * xi;
        floats y = splat(0.0f);
        for (int64_t k = 0; k < a->states; k++) {
            const floats decay = exp_floats(step * load_some(a->a, k * a->channels + at + i, n - i, 0));
            const floats next = fused(load_floats(s[k] + i), decay, put * splat(b[k]));
            store_floats(s[k] + i, next);
            if (out) y = fused(splat(c[k]), next, y);
        }
        if (out) store_some(out, i, fused(load_some(a->skip, at + i, n - i, 0), xi, y), n - i, 0);
    }
}

INLINE void scan_block(const struct selective_scan_args *a, int64_t i, int64_t at) {
    const struct recurrent_rows *r = &a->rows;
    const struct lane l = lane_of(r, i);
    const int64_t n = a->channels - at < SCAN_COLS ? a->channels - at : SCAN_COLS, rows = l.redo + l.count;
    float *state = a->state + l.place * a->states * a->channels + at;
    _Alignas(64) float s[MAX_SCANNED][SCAN_COLS];
    memset(s, 0, (size_t)a->states * sizeof s[0]);
    for (int64_t k = 0; k < a->states && !l.fresh; k++) copy_floats(s[k], state + k * a->channels, n, SCAN_COLS);
    for (int64_t row = 0; row <= rows; row++) {
        if (row == l.redo + l.commit)
            for (int64_t k = 0; k < a->states; k++) copy_floats(state + k * a->channels, s[k], n, SCAN_COLS);
        if (row == rows) break;
        const int64_t own = l.first + row - l.redo;
        const float *x = a->x + with_redo(r, i, &l, row) * a->channels + at;
        const float *control = row < l.redo ? a->pending + (l.place * r->max_pending + row) * a->pending_stride
                                            : a->control + own * (a->channels + 2 * a->states);
        const float *b = control + a->channels;
        scan_row(a, s, at, n, x, control + at, b, b + a->states, row < l.redo ? 0 : a->out + own * a->channels + at);
    }
}

static void selective_scan_body(struct member *m, void *context) {
    const struct selective_scan_args *a = context;
    const struct recurrent_rows *r = &a->rows;
    const int64_t blocks = (a->channels + SCAN_COLS - 1) / SCAN_COLS;
    TEAM_FOR_CHUNKS(m, item, r->lanes * blocks, 1) {
        const int64_t i = item / blocks;
        if (r->place[i] >= 0)
            scan_block(a, i, item % blocks * SCAN_COLS);
        else if (item % blocks == 0)
            clear_rows(a->out, r->first[i], r->first[i + 1], a->channels * 4);
    }
    TEAM_FOR_CHUNKS(m, lane, r->lanes + 1, 1) {
        if (lane == r->lanes) {
            clear_rows(a->out, r->first[r->lanes], r->num_rows, a->channels * 4);
        } else if (r->place[lane] >= 0) {
            const struct lane l = lane_of(r, lane);
            save_pending(r, &l, a->control, a->channels + 2 * a->states, a->pending, a->pending_stride,
                         a->channels + a->states);
        }
    }
}

void VARIANT(lockstep_selective_scan)(const struct selective_scan_args *a) {
    team_run(selective_scan_body, (void *)(intptr_t)a);
}

/* A gate next to an RMSNorm, or without one: norm(x) w silu(gate), norm(x silu(gate)) w, or x silu(gate). */
enum { GATE_ONLY, GATE_AFTER_NORM, GATE_BEFORE_NORM };

struct gated_norm_args {
    const float *x;      /* [rows][width] */
    const void *gate;    /* [rows / per][gate_stride], of which row r has width values at r % per * width */
    const float *weight; /* [width]; null for GATE_ONLY */
    void *out;           /* [rows][width] */
    int64_t rows, width, gate_stride, per, groups; /* each group of width / groups values has a norm of its own */
    float eps;
    int32_t kind, bf16; /* bf16: gate and out */
};

INLINE floats gated_at(const struct gated_norm_args *a, int64_t x_at, int64_t gate_at, int64_t n, int bf16) {
    const floats x = load_some(a->x, x_at, n, 0), g = load_some(a->gate, gate_at, n, bf16);
    return x * (g * sigmoid_floats(g));
}

INLINE void gated_norm_row(const struct gated_norm_args *a, int64_t row, int kind, int bf16) {
    const int64_t n = a->width / a->groups;
    for (int64_t at = 0; at < a->width; at += n) {
        const int64_t x_at = row * a->width + at,
                      gate_at = row / a->per * a->gate_stride + row % a->per * a->width + at;
        floats squares[PIECES] = {0};
        FOR_LANES(i, p, kind == GATE_ONLY ? 0 : n) {
            const floats x = kind == GATE_BEFORE_NORM ? gated_at(a, x_at + i, gate_at + i, n - i, bf16)
                                                      : load_some(a->x, x_at + i, n - i, 0);
            squares[p] += x * x; /* not fused, as before fusing was written out: its bits stay */
        }
        const floats by = splat(kind == GATE_ONLY ? 1.0f : 1.0f / sqrtf(sum16(squares) / (float)n + a->eps));
        for (int64_t i = 0; i < n; i += WIDTH) {
            floats x = gated_at(a, x_at + i, gate_at + i, n - i, bf16) * by;
            if (kind != GATE_ONLY) x = x * load_some(a->weight, at + i, n - i, 0);
            store_some(a->out, x_at + i, x, n - i, bf16);
        }
    }
}

static void gated_norm_body(struct member *m, void *context) {
    const struct gated_norm_args *a = context;
    TEAM_FOR(m, row, a->rows) {
        if (a->bf16)
            gated_norm_row(a, row, a->kind, 1);
        else
            gated_norm_row(a, row, a->kind, 0);
    }
}

void VARIANT(lockstep_gated_norm)(const struct gated_norm_args *a) { team_run(gated_norm_body, (void *)(intptr_t)a); }

#endif
