/* The step plane, for spin: an engine that posts and awaits, a grammar process that answers, a kill of it at any point.
 *
 * Each step of the model is one access of shared memory, or several that no other process can tell from one (see
 * "Grouping"), in the order in which shared_mem/native/flags.c releases and acquires it. `-DNAME` of a mutant breaks one
 * place, and the check has to fail; tools/step_plane/model.py has the configurations and the mutants. Names are those of
 * flags.c, layout.py and gpu_engine/core/grammar_slots.py.
 *
 *     Engine    ls_post, ls_await, take_answer; late rows, DEFER, `unread`, a matcher that is opened again
 *     Grammar   ls_wait_req, ls_records, ls_put_answer, ls_ring, ls_add_rows; matchers, which one thread at a time moves
 *     Link      the kill, the abort word, the attachment of the next process to the same segment
 *
 * What is checked. Assertions: a row that is applied is written to its end and is the row of this request and position; a
 * record that is read is whole; an answer says DEAD_END to the request whose matcher found it; an answer that is not late
 * any more has its rows. Absence of invalid end states: no process waits for ever, and every slot ends with a token for
 * its last request, or with the error of a process that did not come back. With `-DNP` and without a progress label, the
 * absence of cycles: every run ends.
 *
 * Grouping. A reader compares what it read with one right value, so a wrong value at any moment between its two flags is
 * found by one look at that moment: the reads are one step, and the scheduler chooses the moment. A writer marks all that
 * it is going to write as TORN in one step and has written it in another. Threads of the grammar process hold different
 * slots and share no word but the bell, so they are one process that chooses what to do next. The bell is the fact that it
 * was rung since the engine last read it. A park of the engine ends by a wake-up, or by its slice when the abort word is
 * set; other slices and time limits of parks are left out, so that a lost wake-up is a process that waits for ever.
 *
 * Not here: memory orders weaker than sequential consistency but for the mutants, each of which is the reordering that one
 * barrier forbids (tests/shared_mem/test_litmus.py runs the pairs on real cores); jump-forward, forks and draft posts, which use the same flags.
 */
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef STEPS
#define STEPS 3
#endif
#define ROWS 2
#ifndef RECS
#define RECS 2
#endif
#define HALVES 2

/* LS_KIND_... of flags.h come with the command line. */

#define TORN 255
#define TAG(gen, pos, row) (1 + (gen) * 64 + (pos) * 2 + (row))
#ifdef ONE_HALF
#define AT(seq, slot, row) ((slot) * ROWS + (row))
#else
#define AT(seq, slot, row) (((seq) % HALVES) * SLOTS * ROWS + (slot) * ROWS + (row))
#endif

typedef Entry {
    byte seq;
    byte part;  /* the sequence that its contents belong to, or TORN */
    bool has[SLOTS]; bit gen[SLOTS]; byte pos[SLOTS]
};
typedef Answer {
    byte seq;
    byte tag;   /* TAG of row 0, or TORN while it is written */
    byte kind[ROWS];
    byte late;  /* the sequence, or 0 */
    bool gap    /* not in memory: the matcher did not fit the record, so that DEFER is the whole answer */
};

byte req_seq;
bool abort_word, engine_parked, grammar_parked;
bool rung;                            /* the doorbell has changed since the engine read it */
Entry rec[RECS];
Answer ans[SLOTS];
byte mask[HALVES * SLOTS * ROWS];     /* the tag of the row that it holds, or TORN */

bool engine_sleeps, grammar_sleeps;   /* in futex_wait */
byte killed;                          /* grammar processes that were killed */
byte attached;                        /* how often a process was attached again */
bool lost, failed;                    /* what the link tells the engine: paused; not coming back */
bool finished;

/* Binds, which gRPC has acknowledged. */
bool in_has[SLOTS]; bit in_gen[SLOTS]; byte in_pos[SLOTS];

/* ---- grammar process ---- */

inline ring() {
#ifdef RING_LOOKS_FIRST
    parked = engine_parked;
    rung = true;
#else
    rung = true;
    parked = engine_parked;
#endif
    d_step {
        if
        :: parked -> engine_sleeps = false
        :: else
        fi;
        parked = false
    }
}

/* The slot's thread adds the next of its late rows. */
inline add_row(i) {
#ifdef KIND_BEFORE_ROW
    ans[i].kind[next[i]] = LS_KIND_APPLY;
#endif
#ifdef LATE_CLEARED_FIRST
    ans[i].late = 0;
#endif
    mask[AT(job[i], i, next[i])] = TORN;
    mask[AT(job[i], i, next[i])] = (m_dirty[i] -> TORN : TAG(m_gen[i], m_pos[i], next[i]));
    ans[i].kind[next[i]] = LS_KIND_APPLY;
    atomic {
        next[i]++;
        if
        :: next[i] == ROWS -> close_late(i)
        :: else
        fi
    }
}

inline close_late(i) {
    ans[i].late = 0; job[i] = 0; next[i] = 0
}

inline write_rows(i) {
    d_step {
        row = 0;
        do
        :: row < ROWS -> 
           if
           :: row < rows -> mask[AT(q, i, row)] = (m_dirty[i] -> TORN : TAG(m_gen[i], m_pos[i], row))
           :: else
           fi;
           row++
        :: else -> break
        od;
        row = 0
    }
}

inline write_answer(i) {
    d_step {
        ans[i].tag = TAG(c_gen[i], c_pos[i], 0);
        ans[i].late = (is_late -> q : 0);
        ans[i].gap = gap;
        row = 0;
        do
        :: row < ROWS -> ans[i].kind[row] = (row < rows -> (ends -> LS_KIND_DEAD_END : LS_KIND_APPLY) : LS_KIND_DEFER); row++
        :: else -> break
        od;
        row = 0
    }
}

/* ls_put_answer and the bell. `rows` rows are there. */
inline put_answer(i) {
    d_step {
        ans[i].tag = TORN;
        row = 0;
        do
        :: row < rows -> mask[AT(q, i, row)] = TORN; row++
        :: else -> break
        od;
        row = 0
    }
#ifdef BELL_BEFORE_ANSWER
    ring();
#endif
#ifdef ANSWER_SEQ_FIRST
    ans[i].seq = q;
#endif
#ifndef ROWS_AFTER_SEQ
    write_rows(i);
#endif
    write_answer(i);
#ifndef ANSWER_SEQ_FIRST
    ans[i].seq = q;
#endif
#ifdef ROWS_AFTER_SEQ
    write_rows(i);
#endif
#if !defined(NO_BELL) && !defined(BELL_BEFORE_ANSWER)
    ring();
#endif
    d_step { gap = false; ends = false; is_late = false; rows = 0 }
}

/* The matcher moves to the record's place; a record that it does not fit is answered with DEFER. */
inline move_matcher(i) {
    d_step {
        gap = true;
        if
#ifdef NO_GENERATION_CHECK
        :: m_has[i] && m_gen[i] != c_gen[i] -> gap = false; m_dirty[i] = true
#endif
        :: m_has[i] && m_gen[i] == c_gen[i] && (m_pos[i] == c_pos[i] || m_pos[i] + 1 == c_pos[i]) ->
           gap = false; m_pos[i] = c_pos[i]
        :: else
        fi
    }
}

inline answer(i) {
    if
    :: !c_has[i]
    :: c_has[i] ->
       /* A newer record of the slot: its thread adds no more rows to the earlier answer. */
       atomic {
           if
           :: job[i] != 0 -> close_late(i)
           :: else
           fi
       }
       move_matcher(i);
       atomic {
           if
           :: gap -> rows = 0
           :: !gap -> rows = ROWS
#ifdef LATE
           :: !gap -> rows = 0; is_late = true
           :: !gap -> rows = 1; is_late = true
#endif
#ifdef DEAD_ENDS
           :: !gap -> rows = ROWS; ends = true
#endif
           fi;
           if
           :: is_late -> job[i] = q; next[i] = rows
           :: else
           fi
       }
       put_answer(i)
    fi
}

inline read_record() {
    d_step { whole = (rec[q % RECS].seq == q) }
    if
    :: whole ->
       d_step {
           part = rec[q % RECS].part;
           i = 0;
           do
           :: i < SLOTS ->
              c_has[i] = rec[q % RECS].has[i]; c_gen[i] = rec[q % RECS].gen[i]; c_pos[i] = rec[q % RECS].pos[i]; i++
           :: else -> break
           od;
           i = 0
       }
#ifndef NO_SECOND_LOOK
       d_step { whole = (rec[q % RECS].seq == q) }
#endif
    :: else
    fi;
    d_step {
        assert(!whole || part == q);
        part = 0
    }
}

inline take_binds() {
    d_step {
        i = 0;
        do
        :: i < SLOTS ->
           if
           :: in_has[i] -> m_has[i] = true; m_dirty[i] = false; m_gen[i] = in_gen[i]; m_pos[i] = in_pos[i]; in_has[i] = false
           :: else
           fi;
           i++
        :: else -> break
        od;
        i = 0
    }
}

#define HAS_JOB(n) (n < SLOTS && job[n] != 0)

/* `last`: REQ_SEQ when the process mapped the segment. */
proctype Grammar(byte me; byte last) {
    byte seq, q, i, row, rows, part;
    bool parked, whole, gap, is_late, ends;
    bool c_has[SLOTS]; bit c_gen[SLOTS]; byte c_pos[SLOTS];
    bool m_has[SLOTS], m_dirty[SLOTS]; bit m_gen[SLOTS]; byte m_pos[SLOTS];
    byte job[SLOTS], next[SLOTS];      /* of the late answer whose rows a thread adds: its sequence, or 0; the row */
    {
#ifdef START_SEQ_LATE
    last = req_seq;
#endif
    do
    :: HAS_JOB(0) -> add_row(0)
    :: HAS_JOB(1) -> add_row(1)
    :: seq = req_seq;
       if
       :: seq > last ->
          take_binds();
#ifdef NEWEST_ALONE
          last = seq - 1;
#endif
          do
          :: last == seq -> break
          :: HAS_JOB(0) -> add_row(0)
          :: HAS_JOB(1) -> add_row(1)
          :: last < seq ->
             q = last + 1;
             read_record();
             if
             :: whole ->
                answer(0);
#if SLOTS > 1
                answer(1)
#endif
             :: else
             fi;
             d_step {
                 last = q; q = 0; whole = false;
                 i = 0;
                 do
                 :: i < SLOTS -> c_has[i] = false; c_gen[i] = 0; c_pos[i] = 0; i++
                 :: else -> break
                 od;
                 i = 0
             }
          od
       :: else ->
#ifndef GRAMMAR_PARKS_LATE
          grammar_parked = true;
#endif
          atomic {
              if
#ifdef SLEEPS_UNCOMPARED
              :: true -> grammar_sleeps = true
#else
              :: req_seq == seq -> grammar_sleeps = true
#endif
              :: else
              fi
          }
#ifdef GRAMMAR_PARKS_LATE
          grammar_parked = true;
#endif
          do
          :: !grammar_sleeps -> break
          :: HAS_JOB(0) -> add_row(0)
          :: HAS_JOB(1) -> add_row(1)
          :: finished -> goto end_idle
          od;
          atomic { grammar_parked = false; seq = 0 }
       fi
    od;
end_idle: (killed > me)
    } unless { killed > me }
}

/* A kill -9 at any point, or none. */
proctype Link() {
    byte start;
    if
#ifdef CRASH
    :: atomic { !finished -> killed = 1; grammar_sleeps = false }
       d_step { abort_word = true; lost = true }
       if
       :: failed = true
       :: atomic { start = req_seq; run Grammar(1, start); start = 0 }
          d_step {
              lost = false; attached = 1;
              start = 0;
              do
              :: start < SLOTS -> in_has[start] = false; in_gen[start] = 0; in_pos[start] = 0; start++
              :: else -> break
              od;
              start = 0
          }
          abort_word = false
       fi
#endif
    :: finished
    fi
}

/* ---- engine ---- */

#define PRESENT(n) (n < SLOTS && posted[n])
#ifdef UNREAD_IS_FORGOTTEN
#define IS_UNREAD(n) false
#else
#define IS_UNREAD(n) (ans[n].seq < deferred[n] && req_seq - deferred[n] >= RECS)
#endif
#define HAS_NEWS(n) (n < SLOTS && deferred[n] != 0 && ((ans[n].seq == deferred[n] && ans[n].late == 0) || IS_UNREAD(n)))
#define NEEDS(n) (n < SLOTS && !ended[n] && gotten[n] == 0)
#define GOES_ON (step < STEPS || NEEDS(0) || NEEDS(1))

inline check_row(q, i, p, row) {
    assert(mask[AT(q, i, row)] == TAG(gen[i], p, row))
}

/* The rows of an answer to `q`, whose kinds were read: one token, a repeated step, another matcher, or the end. Rows of an
 * await are valid until the next post but one; late rows are copied at once. */
inline use_answer(i, q, awaited) {
    assert(ans[i].tag == TAG(gen[i], pos[i], 0));
    if
    :: kind[0] == LS_KIND_DEAD_END -> ended[i] = true; deferred[i] = 0
    :: kind[0] == LS_KIND_APPLY ->
       if
#ifdef READ_LATER
       :: awaited -> unread[i] = q; unread_pos[i] = pos[i]; unread_gen[i] = gen[i]; unread_both[i] = (kind[1] == LS_KIND_APPLY)
       :: !awaited ->
#else
       :: true ->
#endif
          check_row(q, i, pos[i], 0);
          if
          :: kind[1] == LS_KIND_APPLY -> check_row(q, i, pos[i], 1)
          :: else
          fi
       fi;
       pos[i]++; gotten[i] = 1; deferred[i] = 0
    :: kind[0] == LS_KIND_DEFER && late == q -> deferred[i] = q
    :: kind[0] == LS_KIND_DEFER && late != q ->
       /* The matcher does not fit: it is opened again. */
       assert(ans[i].gap);
       deferred[i] = 0; open[i] = false
    :: else -> assert(false)
    fi;
    kind[0] = 0; kind[1] = 0; late = 0
}

#ifdef KINDS_BEFORE_LATE
#define READ_ANSWER(i) d_step { kind[0] = ans[i].kind[0]; kind[1] = ans[i].kind[1] }; late = ans[i].late
#else
#define READ_ANSWER(i) late = ans[i].late; d_step { kind[0] = ans[i].kind[0]; kind[1] = ans[i].kind[1] }
#endif

/* grammar_slots.poll, of a slot that is in no step. */
inline poll(i) {
    if
    :: deferred[i] != 0 ->
       d_step { answered = ans[i].seq }
       if
       :: answered == deferred[i] ->
          READ_ANSWER(i);
          d_step {
              if
              :: late == 0 -> use_answer(i, answered, false)
              :: else -> kind[0] = 0; kind[1] = 0; late = 0
              fi
          }
#ifndef UNREAD_IS_FORGOTTEN
       :: answered < deferred[i] && req_seq - deferred[i] >= RECS ->
          /* `unread` looks at the answer again behind REQ_SEQ. */
          d_step {
              if
              :: ans[i].seq < deferred[i] && !again[i] -> deferred[i] = 0; open[i] = false; again[i] = true
              :: ans[i].seq < deferred[i] && again[i] -> deferred[i] = 0; ended[i] = true     /* stall_s */
              :: else
              fi
          }
#endif
       :: else
       fi;
       answered = 0
    :: else
    fi
}

inline take(i) {
    if
    :: posted[i] && !taken[i] ->
       d_step { answered = ans[i].seq }
       if
#ifdef ANY_ANSWER
       :: answered != 0 ->
#else
       :: answered >= seq ->
          assert(answered == seq);
#endif
          READ_ANSWER(i);
          d_step { taken[i] = true; use_answer(i, seq, true) }
       :: else
       fi;
       answered = 0
    :: else
    fi
}

inline check_unread(i) {
#ifdef READ_LATER
    d_step {
        if
        :: unread[i] != 0 ->
           assert(mask[AT(unread[i], i, 0)] == TAG(unread_gen[i], unread_pos[i], 0));
           assert(!unread_both[i] || mask[AT(unread[i], i, 1)] == TAG(unread_gen[i], unread_pos[i], 1));
           unread[i] = 0; unread_pos[i] = 0; unread_gen[i] = 0; unread_both[i] = false
        :: else
        fi
    }
#else
    skip
#endif
}

#ifdef DEADLINES
#define MAY_TIME_OUT true
#else
/* The abort word may have come and gone while the engine slept: then the deadline ends the wait. */
#define MAY_TIME_OUT (attached > 0)
#endif

inline await() {
    do
    ::
#ifndef BELL_READ_LATE
       rung = false;
#endif
       take(0);
#if SLOTS > 1
       take(1);
#endif
#ifdef BELL_READ_LATE
       rung = false;
#endif
       if
       :: posted[0] == taken[0] && posted[SLOTS - 1] == taken[SLOTS - 1] -> break
       :: else ->
          if
#ifndef ABORT_IGNORED
          :: abort_word -> break
#endif
          :: MAY_TIME_OUT -> break
          :: true ->
#ifndef ENGINE_PARKS_LATE
             engine_parked = true;
#endif
             atomic {
                 if
                 :: !rung -> engine_sleeps = true
                 :: else
                 fi
             }
#ifdef ENGINE_PARKS_LATE
             engine_parked = true;
#endif
             if
             :: !engine_sleeps
#ifndef ABORT_IGNORED
             :: abort_word                /* its slice ends */
#endif
             :: MAY_TIME_OUT -> timed_out = true
             fi;
             atomic {
                 engine_sleeps = false; engine_parked = false;
                 if
                 :: timed_out -> timed_out = false; break
                 :: else
                 fi
             }
          fi
       fi
    od;
    /* An answer that came during the last tick is not late. */
    take(0);
#if SLOTS > 1
    take(1);
#endif
    d_step {
        slot = 0;
        do
        :: slot < SLOTS ->
           if
           :: posted[slot] && !taken[slot] -> deferred[slot] = seq
           :: else
           fi;
           posted[slot] = false; taken[slot] = false;
           slot++
        :: else -> break
        od;
        slot = 0
    }
}

inline write_contents() {
    rec[seq % RECS].part = TORN;
    d_step {
        slot = 0;
        do
        :: slot < SLOTS ->
           rec[seq % RECS].has[slot] = posted[slot];
           rec[seq % RECS].gen[slot] = (posted[slot] -> gen[slot] : 0);
           rec[seq % RECS].pos[slot] = (posted[slot] -> pos[slot] : 0);
           slot++
        :: else -> break
        od;
        slot = 0;
        rec[seq % RECS].part = seq
    }
}

inline post() {
#ifdef REQ_BEFORE_RECORD
    req_seq = seq;
#endif
#ifndef ENTRY_NOT_INVALIDATED
    rec[seq % RECS].seq = 0;
#endif
    write_contents();
    rec[seq % RECS].seq = seq;
#ifdef POST_LOOKS_FIRST
    parked = grammar_parked;
    req_seq = seq;
#else
    req_seq = seq;
    parked = grammar_parked;
#endif
    d_step {
        if
#ifndef NO_WAKE
        :: parked -> grammar_sleeps = false
#endif
        :: else
        fi;
        parked = false
    }
}

/* The next owner of a slot, which is in no step. */
inline change_owner(i) {
#ifdef OWNERS
    if
    :: gen[i] == 0 && step < STEPS ->
       d_step { gen[i] = 1; pos[i] = 0; gotten[i] = 0; deferred[i] = 0; open[i] = false; ended[i] = false }
    :: true
    fi
#else
    skip
#endif
}

inline notice_loss() {
    if
    :: lost || attached != seen ->
       (attached != seen || failed);
       d_step {
           seen = attached;
           slot = 0;
           do
           :: slot < SLOTS ->
              open[slot] = false;
#ifndef LOSS_KEEPS_DEFERRED
              deferred[slot] = 0;
#endif
              slot++
           :: else -> break
           od;
           slot = 0
       }
    :: else
    fi
}

/* Binds the matchers that are to be opened, and chooses the slots of the step. */
inline prepare() {
    d_step {
        step = (step < STEPS -> step + 1 : step);
        slot = 0;
        do
        :: slot < SLOTS ->
           if
           :: !open[slot] && deferred[slot] == 0 && !ended[slot] ->
              in_has[slot] = true; in_gen[slot] = gen[slot]; in_pos[slot] = pos[slot]; open[slot] = true
           :: else
           fi;
           posted[slot] = (deferred[slot] == 0 && !ended[slot] && (step < STEPS || gotten[slot] == 0));
           slot++
        :: else -> break
        od;
        slot = 0
    }
}

active proctype Engine() {
    byte seq, step, slot, answered, seen, late;
    bool parked, timed_out;
    byte pos[SLOTS], deferred[SLOTS];   /* deferred: the sequence whose rows are late, or 0 */
    bit gen[SLOTS], gotten[SLOTS];      /* gotten: the slot's present request has a token */
    bool open[SLOTS], ended[SLOTS], posted[SLOTS], taken[SLOTS], again[SLOTS];
    byte kind[ROWS];
#ifdef READ_LATER
    byte unread[SLOTS], unread_pos[SLOTS]; bit unread_gen[SLOTS]; bool unread_both[SLOTS];
#endif

    atomic { run Grammar(0, 0); run Link() }
    do
    :: failed || !GOES_ON -> break
    :: !failed && GOES_ON ->
       notice_loss();
       poll(0);
#if SLOTS > 1
       poll(1);
#endif
       change_owner(0);
#if SLOTS > 1 && OWNERS > 1
       change_owner(1);
#endif
       prepare();
       if
       :: PRESENT(0) || PRESENT(1) ->
          seq++;
          post();
          check_unread(0);
#if SLOTS > 1
          check_unread(1);
#endif
          await()
       :: else ->
          /* An idle engine polls. */
          ((deferred[0] == 0 && deferred[SLOTS - 1] == 0) || HAS_NEWS(0) || HAS_NEWS(SLOTS - 1) || lost || failed || attached != seen)
       fi
    od;
    finished = true
}
