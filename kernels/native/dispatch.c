/* The exported names: each call goes to the best variant that this CPU runs. Not responsible for: any arithmetic. */
#include <stdint.h>

struct accept_args;
struct block_linear_args;
struct forward_args;
struct gated_args;
struct gated_norm_args;
struct head_products_args;
struct latent_rows_args;
struct logprobs_args;
struct low_rank_args;
struct matrix_recurrence_args;
struct mixture_args;
struct paged_attention_args;
struct rms_norm_args;
struct rotary_args;
struct selective_scan_args;
struct short_conv_args;

#define DECLARE(variant)                                                                                               \
    void lockstep_accept_##variant(const struct accept_args *);                                                        \
    void lockstep_draft_##variant(const struct accept_args *, int32_t);                                                \
    void lockstep_logprobs_##variant(const struct logprobs_args *);                                                    \
    void lockstep_low_rank_##variant(const struct low_rank_args *);                                                    \
    void lockstep_paged_attention_##variant(const struct paged_attention_args *);                                      \
    void lockstep_rms_norm_##variant(const struct rms_norm_args *);                                                    \
    void lockstep_rotary_##variant(const struct rotary_args *);                                                        \
    void lockstep_gated_##variant(const struct gated_args *);                                                          \
    void lockstep_gated_norm_##variant(const struct gated_norm_args *);                                                \
    void lockstep_head_products_##variant(const struct head_products_args *);                                          \
    void lockstep_latent_rows_##variant(const struct latent_rows_args *);                                              \
    void lockstep_matrix_recurrence_##variant(const struct matrix_recurrence_args *);                                  \
    void lockstep_selective_scan_##variant(const struct selective_scan_args *);                                        \
    void lockstep_short_conv_##variant(const struct short_conv_args *);                                                \
    void lockstep_gumbel_##variant(uint64_t, uint32_t, int64_t, float *);

DECLARE(baseline)

#define DECLARE_BLOCKS(variant)                                                                                        \
    DECLARE(variant)                                                                                                   \
    void lockstep_block_linear_##variant(const struct block_linear_args *);                                            \
    void lockstep_block_linear_alone_##variant(const struct block_linear_args *);                                      \
    int64_t lockstep_forward_scratch_##variant(const struct forward_args *);                                           \
    void lockstep_forward_##variant(const struct forward_args *);                                                      \
    void lockstep_forward_head_##variant(const struct forward_args *, const struct accept_args *);                     \
    int64_t lockstep_mixture_scratch_##variant(const struct mixture_args *);                                           \
    int32_t lockstep_mixture_##variant(const struct mixture_args *);

#if defined(__x86_64__)
DECLARE_BLOCKS(x86_64_v3)
DECLARE_BLOCKS(x86_64_avxvnni)
DECLARE_BLOCKS(x86_64_v4)
DECLARE_BLOCKS(x86_64_vnni)

static const int FASTEST_FIRST[] = {5, 4, 6, 3, 1};

static int runs(int unit) {
    __builtin_cpu_init();
    const int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512cd");
    return unit == 5   ? v4 && __builtin_cpu_supports("avx512vnni")
           : unit == 4 ? v4
           : unit == 6 ? v3 && __builtin_cpu_supports("avxvnni")
           : unit == 3 ? v3
                       : unit == 1;
}

#define CALL(name, ...)                                                                                                \
    (level() == 5   ? name##_x86_64_vnni(__VA_ARGS__)                                                                  \
     : level() == 4 ? name##_x86_64_v4(__VA_ARGS__)                                                                    \
     : level() == 6 ? name##_x86_64_avxvnni(__VA_ARGS__)                                                               \
     : level() == 3 ? name##_x86_64_v3(__VA_ARGS__)                                                                    \
                    : name##_baseline(__VA_ARGS__))
#define CALL_BLOCKS(name, ...)                                                                                         \
    (level() == 5   ? name##_x86_64_vnni(__VA_ARGS__)                                                                  \
     : level() == 4 ? name##_x86_64_v4(__VA_ARGS__)                                                                    \
     : level() == 6 ? name##_x86_64_avxvnni(__VA_ARGS__)                                                               \
                    : name##_x86_64_v3(__VA_ARGS__))
#elif defined(__aarch64__)
#include <sys/auxv.h>

#if !defined(HWCAP2_I8MM) /* older headers */
#define HWCAP2_I8MM (1 << 13)
#endif

DECLARE_BLOCKS(aarch64_dot)
DECLARE_BLOCKS(aarch64_i8mm)

static const int FASTEST_FIRST[] = {9, 8, 0};

static int runs(int unit) {
    const int dot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
    return unit == 9 ? dot && getauxval(AT_HWCAP2) & HWCAP2_I8MM : unit == 8 ? dot : unit == 0;
}

#define CALL(name, ...)                                                                                                \
    (level() == 9   ? name##_aarch64_i8mm(__VA_ARGS__)                                                                 \
     : level() == 8 ? name##_aarch64_dot(__VA_ARGS__)                                                                  \
                    : name##_baseline(__VA_ARGS__))
#define CALL_BLOCKS(name, ...) (level() == 9 ? name##_aarch64_i8mm(__VA_ARGS__) : name##_aarch64_dot(__VA_ARGS__))
#else
static const int FASTEST_FIRST[] = {0};

static int runs(int unit) { return unit == 0; }

#define CALL(name, ...) name##_baseline(__VA_ARGS__)
#endif

static int used = -1; /* -1: no call has looked yet. Racing threads store the same value. */

static int level(void) {
    for (int i = 0; used < 0; i++)
        if (runs(FASTEST_FIRST[i])) used = FASTEST_FIRST[i];
    return used;
}

void lockstep_accept(const struct accept_args *a) { CALL(lockstep_accept, a); }

void lockstep_draft(const struct accept_args *a, int32_t k) { CALL(lockstep_draft, a, k); }

void lockstep_logprobs(const struct logprobs_args *a) { CALL(lockstep_logprobs, a); }

void lockstep_low_rank(const struct low_rank_args *a) { CALL(lockstep_low_rank, a); }

void lockstep_paged_attention(const struct paged_attention_args *a) { CALL(lockstep_paged_attention, a); }

void lockstep_rms_norm(const struct rms_norm_args *a) { CALL(lockstep_rms_norm, a); }

void lockstep_rotary(const struct rotary_args *a) { CALL(lockstep_rotary, a); }

void lockstep_gated(const struct gated_args *a) { CALL(lockstep_gated, a); }

void lockstep_gated_norm(const struct gated_norm_args *a) { CALL(lockstep_gated_norm, a); }

void lockstep_head_products(const struct head_products_args *a) { CALL(lockstep_head_products, a); }

void lockstep_latent_rows(const struct latent_rows_args *a) { CALL(lockstep_latent_rows, a); }

void lockstep_matrix_recurrence(const struct matrix_recurrence_args *a) { CALL(lockstep_matrix_recurrence, a); }

void lockstep_selective_scan(const struct selective_scan_args *a) { CALL(lockstep_selective_scan, a); }

void lockstep_short_conv(const struct short_conv_args *a) { CALL(lockstep_short_conv, a); }

void lockstep_gumbel(uint64_t seed, uint32_t position, int64_t n, float *out) {
    CALL(lockstep_gumbel, seed, position, n, out);
}

/* 1: no AVX2; 3: AVX2 and FMA; 4: AVX-512; 5: AVX-512 with VNNI; 6: AVX2 with VNNI; 8: aarch64 with dot products of bytes;
 * 9: aarch64 with those and products of byte matrices (i8mm); 0: others. */
int32_t lockstep_cpu_level(void) { return level(); }

/* Call the kernels of this level from now on, where the CPU runs it. Returns the level that is used. The caller sees to it
 * that no other thread calls a kernel meanwhile. */
int32_t lockstep_use_level(int32_t wanted) {
    if (runs(wanted)) used = wanted;
    return level();
}

#if defined(CALL_BLOCKS)
/* Products over blocks: the caller has seen that lockstep_cpu_level is at least 3. */
void lockstep_block_linear(const struct block_linear_args *a) { CALL_BLOCKS(lockstep_block_linear, a); }

void lockstep_block_linear_alone(const struct block_linear_args *a) { CALL_BLOCKS(lockstep_block_linear_alone, a); }

int64_t lockstep_forward_scratch(const struct forward_args *a) { return CALL_BLOCKS(lockstep_forward_scratch, a); }

void lockstep_forward(const struct forward_args *a) { CALL_BLOCKS(lockstep_forward, a); }

void lockstep_forward_head(const struct forward_args *a, const struct accept_args *rows) {
    CALL_BLOCKS(lockstep_forward_head, a, rows);
}

int64_t lockstep_mixture_scratch(const struct mixture_args *a) { return CALL_BLOCKS(lockstep_mixture_scratch, a); }

int32_t lockstep_mixture(const struct mixture_args *a) { return CALL_BLOCKS(lockstep_mixture, a); }
#endif
