/* The CPU kernels for AVX2 and FMA. The target must be set before the first vector type is seen. */
#if defined(__x86_64__)
#pragma GCC target("arch=x86-64-v3")
#define VARIANT(name) name##_x86_64_v3
#include "accept.h"
#include "forward.h"
#include "latent.h"
#include "masked_head.h"
#include "recurrent.h"
#endif
