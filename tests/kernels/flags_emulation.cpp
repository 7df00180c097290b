// Runs the kernels of kernels/cuda/flags.cu on a CPU: a thread of a block is a thread here, and blocks run one after another.
//
// One block at a time is the smallest possible device: a kernel that needs two resident blocks hangs or times out here.
#include <barrier>
#include <cstring>
#include <thread>
#include <time.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static

struct index2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
static thread_local index2 threadIdx;
static index2 blockIdx, blockDim, gridDim;
static std::barrier<> *block;

static void __syncthreads() { block->arrive_and_wait(); }
static void __nanosleep(unsigned ns) {
    timespec t = {0, static_cast<long>(ns)};
    nanosleep(&t, nullptr);
}
template <typename T> static T atomicAdd(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
template <typename T> static T atomicCAS(T *p, T old, T v) {
    __atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return old;
}
template <typename T, typename Better> static T replace_if(T *p, T v, Better better) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (better(v, old) && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}
template <typename T> static T atomicMin(T *p, T v) { return replace_if(p, v, [](T a, T b) { return a < b; }); }
template <typename T> static T atomicMax(T *p, T v) { return replace_if(p, v, [](T a, T b) { return a > b; }); }

template <typename T> static void put(unsigned char *p, T v, int order) { __atomic_store_n(reinterpret_cast<T *>(p), v, order); }
static void put64(unsigned char *p, unsigned long long v) { put(p, v, __ATOMIC_RELAXED); }
static void put32(unsigned char *p, unsigned v) { put(p, v, __ATOMIC_RELAXED); }
static void put16(unsigned char *p, unsigned v) { put(p, static_cast<unsigned short>(v), __ATOMIC_RELAXED); }
static void release64(unsigned char *p, unsigned long long v) { put(p, v, __ATOMIC_RELEASE); }
static unsigned long long get64(const unsigned char *p) {
    return __atomic_load_n(reinterpret_cast<const unsigned long long *>(p), __ATOMIC_RELAXED);
}
static unsigned get32(const unsigned char *p) {
    return __atomic_load_n(reinterpret_cast<const unsigned *>(p), __ATOMIC_RELAXED);
}
static uint4 get128(const unsigned char *p) {
    uint4 x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
static void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static unsigned long long now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

#include "../../kernels/cuda/flags.cu"

template <typename Kernel> static void launch(index2 grid, unsigned threads, Kernel kernel) {
    gridDim = grid;
    blockDim = {threads, 1};
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
            std::barrier<> all(threads);
            block = &all;
            std::vector<std::thread> running;
            for (unsigned t = 0; t < threads; t++)
                running.emplace_back([t, &kernel] {
                    threadIdx = {t, 0};
                    kernel();
                });
            for (auto &thread : running) thread.join();
        }
}

extern "C" void emulate_post(const i64 *cfg, u64 *counter, const int *slots, const int *gens, const int *commit_pos,
                             const int *n_commit, const int *n_draft, const u32 *need_rows, const int *tokens,
                             u8 *refused, int batch, int stage) {
    launch({1, 1}, 64, [=] {
        lockstep_post(cfg, counter, slots, gens, commit_pos, n_commit, n_draft, need_rows, tokens, refused, batch, stage);
    });
}

extern "C" void emulate_wait(unsigned x, unsigned y, const i64 *cfg, u64 *counter, const int *slots, const int *gens,
                             u8 *kinds, int *forced, u8 *mask, u32 rows_wanted, u64 timeout_ns) {
    launch({x, y}, 32, [=] {
        lockstep_wait(cfg, counter, slots, gens, kinds, forced, mask, rows_wanted, timeout_ns);
    });
}
