// The step plane seen from a GPU: post a step's tokens, wait for its rows, fetch them. No host function, no host thread.
//
// The segment is mapped pinned memory. Aligned loads and stores up to 16 bytes at system scope are atomic there; read-
// modify-writes are not (PCIe), so every word has one writer and nothing here is an atomic operation on host memory. The
// order is that of shared_mem/native/flags.c: data first, then a release store of the flag; acquire, then data. The sequence
// number lives in device memory and only `post` advances it, so a captured graph bakes nothing in.
//
// `cfg` holds the numbers of shared_mem/layout.py (one int64 each, see flags.py), so they exist once. Not here: what the
// rows mean.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum { WORDS, REC, ANS, MASK, REC_ENTRY_STRIDE, NUM_SLOTS, NUM_ROWS, NUM_RECS, REC_HEAD_BYTES, REC_STRIDE, ANS_STRIDE,
       ANS_FORCED, MASK_BUFFER_BYTES, ROW_STRIDE };
enum { REQ_SEQ = 0, ABORT = 128 };              // words
enum { LAST, CURRENT, WAITED_NS, MISSING, DRAFTS_WAITED_NS, COUNTED_TO_NS }; // counter, device memory
enum { KIND_ALL, KIND_APPLY, KIND_FORCED, KIND_DEFER };

static __device__ __forceinline__ void put64(u8 *p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
static __device__ __forceinline__ void put32(u8 *p, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
static __device__ __forceinline__ void put16(u8 *p, u32 v) { asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(p), "h"((unsigned short)v) : "memory"); }
static __device__ __forceinline__ void release64(u8 *p, u64 v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
static __device__ __forceinline__ u64 get64(const u8 *p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ u32 get32(const u8 *p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ u32 get8(const u8 *p) { return get32((const u8 *)((u64)p & ~3ull)) >> 8 * ((u64)p & 3) & 0xff; }
static __device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
static __device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// One block. Lanes with slots[i] < 0 are neither posted nor waited for.
extern "C" __global__ void lockstep_post(const i64 *cfg, u64 *counter, const int *slots, const int *slot_gens,
                                         const int *commit_pos, const int *n_commit, const int *n_draft,
                                         const u32 *need_rows, const int *tokens, int batch, int stage) {
    __shared__ u32 count, taken;
    if (threadIdx.x == 0) count = taken = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < batch; i += blockDim.x)
        if (slots[i] >= 0) atomicAdd(&count, 1);
    __syncthreads();
    if (count == 0) {
        if (threadIdx.x == 0) counter[CURRENT] = 0;
        return;
    }
    u64 seq = counter[LAST] + 1;
    u8 *entry = (u8 *)cfg[REC] + seq % (u64)cfg[NUM_RECS] * cfg[REC_ENTRY_STRIDE];
    // A seqlock's writer: the entry says 0 before any record of it changes.
    if (threadIdx.x == 0) {
        put64(entry, 0);
        fence();
    }
    __syncthreads();
    // A warp writes a record: 32 tokens at a time over the bus.
    int width = 2 * (int)cfg[NUM_ROWS], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < batch; i += blockDim.x / 32) {
        if (slots[i] < 0) continue;
        u8 *record = entry + cfg[REC_HEAD_BYTES] + (u64)slots[i] * cfg[REC_STRIDE];
        for (int t = lane; t < n_commit[i] + n_draft[i]; t += 32) put32(record + 24 + 4 * t, (u32)tokens[i * width + t]);
        if (lane == 0) {
            put64(record, seq);
            put32(record + 8, (u32)slot_gens[i]);
            put32(record + 12, (u32)commit_pos[i]);
            put32(record + 16, (u32)n_commit[i] | (u32)n_draft[i] << 16 | (u32)(stage & 0xff) << 24);
            put32(record + 20, need_rows[i]);
            put16(entry + 16 + 2 * atomicAdd(&taken, 1), (u32)slots[i]);
        }
    }
    fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        put32(entry + 8, count);
        release64(entry, seq);
        counter[LAST] = counter[CURRENT] = seq;
        release64((u8 *)cfg[WORDS] + REQ_SEQ, seq);
    }
}

// Copies one mask row from the mapping to device memory, 16 bytes a thread; a row is a multiple of 64 bytes.
static __device__ void copy_row(const i64 *cfg, u64 seq, int slot, int row, u8 *mask) {
    u64 at = ((u64)slot * cfg[NUM_ROWS] + row) * cfg[ROW_STRIDE];
    const u8 *from = (const u8 *)cfg[MASK] + (seq & 1) * cfg[MASK_BUFFER_BYTES] + at;
    for (i64 b = 16 * threadIdx.x; b < cfg[ROW_STRIDE]; b += 16 * blockDim.x) {
        uint4 x;
        // Volatile: never the read-only path, which may keep what an earlier step left there.
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from + b) : "memory");
        *(uint4 *)(mask + at + b) = x;
    }
}

// grid (batch, rows): one thread decides for its row, the block fetches it. rows_wanted: bit j set, row j is looked at.
// Lanes wait side by side, so time that another one has counted is not counted again.
extern "C" __global__ void lockstep_wait(const i64 *cfg, u64 *counter, const int *slots, const int *slot_gens, u8 *kinds,
                                         int *forced, u8 *mask, u32 rows_wanted, u64 timeout_ns,
                                         u32 draft) {
    __shared__ u32 verdict;
    int i = blockIdx.x, row = blockIdx.y, rows = (int)cfg[NUM_ROWS], at = i * rows + row, slot = slots[i];
    if (!(rows_wanted >> row & 1)) return;
    u64 seq = counter[CURRENT];
    bool first = row + 1 == __ffs(rows_wanted); // one thread counts for its lane
    if (threadIdx.x == 0) {
        u32 kind = slot < 0 ? KIND_ALL : KIND_DEFER;
        int token = -1;
        if (slot >= 0 && seq != 0) {
            const u8 *answer = (const u8 *)cfg[ANS] + (u64)slot * cfg[ANS_STRIDE];
            const u8 *abort_word = (const u8 *)cfg[WORDS] + ABORT;
            u64 start = now_ns(), now = start, answered = get64(answer);
            for (u32 tries = 1; (i64)(answered - seq) < 0 && now - start < timeout_ns; tries++) {
                if (tries % 16 == 0 && get64(abort_word)) break;
                __nanosleep(64);
                now = now_ns();
                answered = get64(answer);
            }
            fence();
            if (answered == seq && get32(answer + 8) == (u32)slot_gens[i]) {
                kind = get8(answer + 12 + row);
                fence(); // a row of a late answer comes with its kind
                token = (int)get32(answer + cfg[ANS_FORCED] + 4 * row);
            } else if (first)
                atomicAdd(&counter[MISSING], 1ull);
            if (first) {
                u64 counted = atomicMax(&counter[COUNTED_TO_NS], now);
                u64 waited = now <= counted ? 0 : now - (counted > start ? counted : start);
                atomicAdd(&counter[WAITED_NS], waited);
                if (draft) atomicAdd(&counter[DRAFTS_WAITED_NS], waited);
            }
        }
        kinds[at] = (u8)kind;
        forced[at] = token;
        verdict = kind;
    }
    __syncthreads();
    if (verdict == KIND_APPLY) copy_row(cfg, seq, slot, row, mask);
}

// grid (batch, rows): for the host-callback sync, whose host function has already decided. `seq` is device memory.
extern "C" __global__ void lockstep_fetch(const i64 *cfg, const u64 *seq, const int *slots, const u8 *kinds, u8 *mask,
                                          u32 rows_wanted) {
    int i = blockIdx.x, row = blockIdx.y;
    if ((rows_wanted >> row & 1) && slots[i] >= 0 && kinds[i * (int)cfg[NUM_ROWS] + row] == KIND_APPLY)
        copy_row(cfg, *seq, slots[i], row, mask);
}
