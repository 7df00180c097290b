/* The exported names: each call goes to the best variant that this CPU runs. Not responsible for: any arithmetic. */
#include <stdint.h>

struct accept_args;
struct gated_args;
struct paged_attention_args;
struct rms_norm_args;
struct rotary_args;

#define DECLARE(variant)                                                                                                \
    void lockstep_accept_##variant(const struct accept_args *);                                                         \
    void lockstep_draft_##variant(const struct accept_args *, int32_t);                                                 \
    void lockstep_paged_attention_##variant(const struct paged_attention_args *);                                       \
    void lockstep_rms_norm_##variant(const struct rms_norm_args *);                                                     \
    void lockstep_rotary_##variant(const struct rotary_args *);                                                         \
    void lockstep_gated_##variant(const struct gated_args *);                                                           \
    void lockstep_gumbel_##variant(uint64_t, uint32_t, int64_t, float *);

DECLARE(baseline)

#if defined(__x86_64__)
DECLARE(x86_64_v3)
DECLARE(x86_64_v4)

static int level(void) {
    static int known; /* racing threads store the same value */
    if (!known) {
        __builtin_cpu_init();
        int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
        int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512cd");
        known = v4 ? 4 : v3 ? 3 : 1;
    }
    return known;
}

#define CALL(name, ...)                                                                                                 \
    (level() == 4 ? name##_x86_64_v4(__VA_ARGS__) : level() == 3 ? name##_x86_64_v3(__VA_ARGS__) : name##_baseline(__VA_ARGS__))
#else
#define CALL(name, ...) name##_baseline(__VA_ARGS__)
#endif

void lockstep_accept(const struct accept_args *a) { CALL(lockstep_accept, a); }

void lockstep_draft(const struct accept_args *a, int32_t k) { CALL(lockstep_draft, a, k); }

void lockstep_paged_attention(const struct paged_attention_args *a) { CALL(lockstep_paged_attention, a); }

void lockstep_rms_norm(const struct rms_norm_args *a) { CALL(lockstep_rms_norm, a); }

void lockstep_rotary(const struct rotary_args *a) { CALL(lockstep_rotary, a); }

void lockstep_gated(const struct gated_args *a) { CALL(lockstep_gated, a); }

void lockstep_gumbel(uint64_t seed, uint32_t position, int64_t n, float *out) { CALL(lockstep_gumbel, seed, position, n, out); }
