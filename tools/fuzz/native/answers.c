/* What the engine reads that the grammar process wrote, and the words that each reads of the other: any bytes there.
 *
 * Invariant: whatever the segment holds, an answer's kinds are those of flags.h, counts are counts of lanes, no call
 * waits beyond its deadline, and nothing outside the arrays is touched.
 */
#include "flags.h"
#include "input.h"

enum { WORDS_BYTES = 1024, MAX_SLOTS = 4, MAX_ROWS = 16, MAX_LANES = 4 };

static void check_taken(const struct ls_await_args *a) {
    REQUIRE(a->missing >= 0 && a->missing <= a->batch && a->late >= 0 && a->late <= a->batch);
    for (uint32_t k = 0; k < (uint32_t)a->batch * a->view->num_rows; k++) REQUIRE(a->kinds[k] < LS_KINDS);
}

/* The engine: takes answers and waits for them, with the deadline passed. */
static void take_answers(struct input *in, const struct ls_view *view) {
    const int32_t batch = 1 + take8(in) % MAX_LANES;
    int32_t *slots = room(sizeof *slots * (size_t)batch), *gens = room(sizeof *gens * (size_t)batch);
    uint8_t *kinds = room((size_t)batch * view->num_rows);
    int32_t *forced = room(sizeof *forced * (size_t)batch * view->num_rows);
    uint64_t seq = take64(in), awaited;
    for (int32_t i = 0; i < batch; i++) {
        slots[i] = (int8_t)take8(in) % (MAX_SLOTS + 2);
        gens[i] = (int32_t)take64(in);
        const int known = slots[i] >= 0 && (uint32_t)slots[i] < view->num_slots;
        if (known && take8(in) & 1) { /* the answer of this slot is the awaited one */
            const uint8_t *answer = view->ans + (uint64_t)(uint32_t)slots[i] * view->ans_stride;
            memcpy(&seq, answer, sizeof seq);
            memcpy(&gens[i], answer + sizeof seq, sizeof *gens);
        }
    }
    struct ls_await_args args = {.view = view,
                                 .seq = &seq,
                                 .slots = slots,
                                 .slot_gens = gens,
                                 .kinds = kinds,
                                 .forced = forced,
                                 .awaited = &awaited,
                                 .batch = batch,
                                 .deadline_ns = 1};
    if (!ls_take(&args)) check_taken(&args);
    ls_await(&args);
    check_taken(&args);
    REQUIRE(args.waited_ns >= 0 && awaited == seq);
    free(slots);
    free(gens);
    free(kinds);
    free(forced);
}

/* The grammar process: publishes over answers that hold anything. */
static void publish(struct input *in, const struct ls_view *view) {
    uint8_t kinds[MAX_ROWS];
    int32_t forced[MAX_ROWS];
    take(in, kinds, sizeof kinds);
    take(in, forced, sizeof forced);
    for (int r = 0; r < MAX_ROWS; r++) kinds[r] %= LS_KINDS;
    struct ls_publish_args args = {
        .view = view, .kinds = kinds, .forced = forced, .seq = take64(in), .late = take8(in) & 1};
    args.slot = (int32_t)(take8(in) % view->num_slots);
    args.slot_gen = (int32_t)take64(in);
    const int32_t stale = ls_publish(&args);
    REQUIRE(stale == 0 || stale == 1);
    REQUIRE(ls_add_rows(&args) ==
            (stale && ls_load64(view->ans + (uint64_t)(uint32_t)args.slot * view->ans_stride) != args.seq));
}

static void read_words(struct input *in, const struct ls_view *view) {
    const uint64_t last = take64(in);
    uint64_t working = take64(in) >> 1; /* a time, or 0 */
    struct ls_watch watch = {take64(in), (int64_t)(take64(in) >> 1)};
    const uint64_t newest = ls_wait_req(view, last, 0, 0, NULL);
    REQUIRE(newest == ls_load64(view->words + LS_REQ_SEQ));
    (void)ls_overdue(view, &working, &watch, 1000000, 1);
    const int64_t age = ls_age_ns(view->words + LS_HB_ENGINE);
    REQUIRE(ls_load64(view->words + LS_HB_ENGINE) || age == -1);
    (void)ls_age_ns(view->words + take8(in) / 8 * 8);
    ls_set_abort(view, take64(in));
    (void)ls_load32(view->words + LS_PERMISSIVE);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, size};
    struct ls_view view = {
        .num_slots = 1 + take8(&in) % MAX_SLOTS, .num_rows = 1 + take8(&in) % MAX_ROWS, .num_recs = 1};
    view.ans_forced = 12 + aligned(view.num_rows, 4);
    view.ans_late = aligned(view.ans_forced + 4 * view.num_rows, 8);
    view.ans_stride = aligned(view.ans_late + 8, 128);
    view.words = room(WORDS_BYTES);
    view.ans = room((size_t)view.num_slots * view.ans_stride);
    take(&in, view.words, WORDS_BYTES / 8); /* REQ_SEQ in front; the other words from a byte each */
    memset(view.words + WORDS_BYTES / 8, 0, WORDS_BYTES - WORDS_BYTES / 8);
    for (int word = LS_ABORT; word <= LS_DOORBELL; word += 128) {
        const uint64_t value = take8(&in) & 1 ? take64(&in) : 0;
        memcpy(view.words + word, &value, sizeof value);
    }
    const uint8_t what = take8(&in);
    struct input answers = in; /* the answers are the rest of the input, which the calls read, too */
    take(&answers, view.ans, (size_t)view.num_slots * view.ans_stride);
    if (what & 1) take_answers(&in, &view);
    if (what & 2) publish(&in, &view);
    if (what & 4) read_words(&in, &view);
    if (what & 8) take_answers(&in, &view);
    free(view.words);
    free(view.ans);
    return 0;
}
