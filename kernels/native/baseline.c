/* The CPU kernels for whatever the compiler targets by default; products over blocks need AVX2. */
#define VARIANT(name) name##_baseline
#include "accept.h"
#include "fused.h"
#include "latent.h"
#include "low_rank.h"
#include "paged_attention.h"
#include "recurrent.h"
