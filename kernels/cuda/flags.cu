// The step plane on a GPU: post a step's tokens, wait for its answers, fetch its mask rows. No host function, no host thread.
//
// The segment is mapped pinned memory. Aligned loads and stores of up to 16 bytes at system scope are atomic there;
// read-modify-writes are not (PCIe). So each word has one writer, and no atomic operation here touches host memory. The
// order is that of shared_mem/native/flags.c: data first, then a release store of the flag; acquire, then data. The
// sequence number is in device memory and only `post` advances it, so a captured graph contains no sequence number.
//
// `cfg` holds the numbers of shared_mem/layout.py, one int64 each (see SegmentNumbers in flags.py).
// Not responsible for: the meaning of the rows (see shared_mem/layout.py).
//
// Without __CUDACC__ the file is compiled as C++ by tests/kernels/flags_emulation.cpp, which runs the kernels on a CPU.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum {
    WORDS,
    REC,
    ANS,
    MASK,
    REC_ENTRY_STRIDE,
    NUM_SLOTS,
    NUM_ROWS,
    NUM_RECS,
    REC_HEAD_BYTES,
    REC_STRIDE,
    ANS_STRIDE,
    ANS_FORCED,
    MASK_BUFFER_BYTES,
    ROW_STRIDE
};
enum { REQ_SEQ = 0, ABORT = 128 }; // words
// Indices of `counter`, in device memory; flags.py has the same.
enum { LAST, CURRENT, WAITED_NS, MISSING, COUNTED_TO_NS, WAIT_SINCE_NS };
enum { KIND_ALL = 0, KIND_APPLY = 1, KIND_DEFER = 3, KIND_ERROR = 5 };
// Reasons in `refused`; the same numbers, negative, are the statuses of ls_post.
enum { BAD_SLOT = 1, BAD_N_COMMIT = 2, BAD_N_DRAFT = 3, BAD_COMMIT_POS = 4 };
enum { VERIFY = 0, TREE = 66 }; // stages of a verify post
enum { MAX_ROWS = 16, NOT_REFUSED = 0x7fffffff };

#ifdef __CUDACC__
static __device__ __forceinline__ void put64(u8 *p, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
static __device__ __forceinline__ void put32(u8 *p, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
static __device__ __forceinline__ void put16(u8 *p, u32 v) {
    asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(p), "h"((unsigned short)v) : "memory");
}
static __device__ __forceinline__ void release64(u8 *p, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
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
// Volatile: a load through the read-only path may return what an earlier step left in that cache.
static __device__ __forceinline__ uint4 get128(const u8 *p) {
    uint4 x;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}
static __device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
static __device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
#endif
static __device__ __forceinline__ u32 get8(const u8 *p) {
    return get32((const u8 *)((u64)p & ~3ull)) >> 8 * ((u64)p & 3) & 0xff;
}

// Returns why the record of lane i cannot be posted, or 0. The grammar process bounds its reads in the same way.
static __device__ int problem_of(const i64 *cfg, const int *slots, const int *commit_pos, const int *n_commit,
                                 const int *n_draft, int i) {
    if (slots[i] >= cfg[NUM_SLOTS]) return BAD_SLOT;
    if (n_commit[i] < 0 || n_commit[i] > cfg[NUM_ROWS]) return BAD_N_COMMIT;
    if (n_draft[i] < 0 || n_draft[i] >= cfg[NUM_ROWS]) return BAD_N_DRAFT;
    return commit_pos[i] < 0 ? BAD_COMMIT_POS : 0;
}

// One block. A lane with slots[i] < 0 is neither posted nor awaited. `refused`: one word of host memory that this kernel
// alone writes; 0, or lane << 8 | reason when a record of this step was invalid. Such a post publishes no record at all.
extern "C" __global__ void lockstep_post(const i64 *cfg, u64 *counter, const int *slots, const int *slot_gens,
                                         const int *commit_pos, const int *n_commit, const int *n_draft,
                                         const u32 *need_rows, const int *tokens, u8 *refused, int batch, int stage) {
    __shared__ u32 count, taken;
    __shared__ int problem; // of the first lane that has one
    if (threadIdx.x == 0) {
        count = taken = 0;
        problem = NOT_REFUSED;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < batch; i += blockDim.x) {
        if (slots[i] < 0) continue;
        atomicAdd(&count, 1u);
        int why = problem_of(cfg, slots, commit_pos, n_commit, n_draft, i);
        if (why) atomicMin(&problem, i << 8 | why);
    }
    __syncthreads();
    bool invalid = problem != NOT_REFUSED || count > (u32)cfg[NUM_SLOTS];
    if (threadIdx.x == 0) {
        // A step's verify post comes first and clears the word; a later, valid post of the step must not.
        if (invalid || stage == VERIFY || stage == TREE)
            put64(refused, !invalid ? 0 : problem != NOT_REFUSED ? problem : BAD_SLOT);
        counter[WAIT_SINCE_NS] = 0;
        if (count == 0 || invalid) counter[CURRENT] = 0;
    }
    if (count == 0 || invalid) return;
    u64 seq = counter[LAST] + 1;
    u8 *entry = (u8 *)cfg[REC] + seq % (u64)cfg[NUM_RECS] * cfg[REC_ENTRY_STRIDE];
    // A seqlock's writer: the entry's sequence is 0 before any record of it changes.
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
        for (int t = lane; t < n_commit[i] + n_draft[i]; t += 32)
            put32(record + 24 + 4 * t, (u32)tokens[i * width + t]);
        if (lane == 0) {
            put64(record, seq);
            put32(record + 8, (u32)slot_gens[i]);
            put32(record + 12, (u32)commit_pos[i]);
            put32(record + 16, (u32)n_commit[i] | (u32)n_draft[i] << 16 | (u32)(stage & 0xff) << 24);
            put32(record + 20, need_rows[i]);
            put16(entry + 16 + 2 * atomicAdd(&taken, 1u), (u32)slots[i]);
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
    for (i64 b = 16 * threadIdx.x; b < cfg[ROW_STRIDE]; b += 16 * blockDim.x)
        *(uint4 *)(mask + at + b) = get128(from + b);
}

// Waits until the answer has `seq` or a newer one, the deadline, or the abort word; returns whether it belongs to this lane.
//
// Every block of one wait shares a deadline: it counts from the first block that misses an answer. More blocks
// than the device holds at once run in waves, and a deadline for each block would add one timeout per wave.
static __device__ bool wait_for(const i64 *cfg, u64 *counter, u64 seq, const u8 *answer, int slot_gen, u64 timeout_ns,
                                u64 *ended_ns) {
    const u8 *abort_word = (const u8 *)cfg[WORDS] + ABORT;
    u64 now = now_ns(), answered = get64(answer);
    if ((i64)(answered - seq) < 0) {
        u64 first = atomicCAS(&counter[WAIT_SINCE_NS], 0ull, now), since = first ? first : now;
        for (u32 tries = 1; (i64)(answered - seq) < 0 && (i64)(now - since) < (i64)timeout_ns; tries++) {
            if (tries % 16 == 0 && get64(abort_word)) break;
            __nanosleep(64);
            now = now_ns();
            answered = get64(answer);
        }
    }
    *ended_ns = now;
    fence();
    return answered == seq && get32(answer + 8) == (u32)slot_gen;
}

// grid (batch, y), at least 16 threads a block. A block waits for its lane once, then takes rows blockIdx.y, blockIdx.y + y,
// ... of the answer: one thread reads a row's kind and token, the whole block copies the row's mask. y = 1 where no mask is
// expected. rows_wanted: bit j set: row j is read. Lanes wait at the same time; each nanosecond is counted once.
extern "C" __global__ void lockstep_wait(const i64 *cfg, u64 *counter, const int *slots, const int *slot_gens,
                                         u8 *kinds, int *forced, u8 *mask, u32 rows_wanted, u64 timeout_ns) {
    __shared__ bool answered;
    __shared__ u32 kind_of[MAX_ROWS];
    int i = blockIdx.x, rows = (int)cfg[NUM_ROWS], slot = slots[i];
    u32 mine = 0;
    for (int row = blockIdx.y; row < rows; row += gridDim.y) mine |= rows_wanted & 1u << row;
    if (!mine) return;
    u64 seq = counter[CURRENT];
    const u8 *answer = (const u8 *)cfg[ANS] + (u64)(slot < 0 ? 0 : slot) * cfg[ANS_STRIDE];
    if (threadIdx.x == 0) {
        answered = false;
        if (slot >= 0 && seq != 0) {
            u64 begun = now_ns(), ended;
            answered = wait_for(cfg, counter, seq, answer, slot_gens[i], timeout_ns, &ended);
            if (mine & rows_wanted & (0u - rows_wanted)) { // the block of a lane's first wanted row counts for the lane
                u64 counted = atomicMax(&counter[COUNTED_TO_NS], ended);
                if (ended > counted) atomicAdd(&counter[WAITED_NS], ended - (counted > begun ? counted : begun));
                if (!answered) atomicAdd(&counter[MISSING], 1ull);
            }
        }
    }
    __syncthreads();
    int row = threadIdx.x;
    if (row < rows && mine >> row & 1) {
        u32 kind = slot < 0 ? KIND_ALL : KIND_DEFER;
        int token = -1;
        if (answered) {
            fence();
            kind = get8(answer + 12 + row);
            if (kind > KIND_ERROR) kind = KIND_ERROR; // the engine has numbers of its own after it
            fence(); // a row that is added to a late answer has its own flag, which is its kind
            token = (int)get32(answer + cfg[ANS_FORCED] + 4 * row);
        }
        kinds[i * rows + row] = (u8)kind;
        forced[i * rows + row] = token;
        kind_of[row] = kind;
    }
    __syncthreads();
    for (row = 0; row < rows; row++)
        if (mine >> row & 1 && kind_of[row] == KIND_APPLY) copy_row(cfg, seq, slot, row, mask);
}

// grid (batch, rows): for the host-callback sync, whose host function has read the answers. `seq` is device memory.
extern "C" __global__ void lockstep_fetch(const i64 *cfg, const u64 *seq, const int *slots, const u8 *kinds, u8 *mask,
                                          u32 rows_wanted) {
    int i = blockIdx.x, row = blockIdx.y;
    if ((rows_wanted >> row & 1) && slots[i] >= 0 && kinds[i * (int)cfg[NUM_ROWS] + row] == KIND_APPLY)
        copy_row(cfg, *seq, slots[i], row, mask);
}
