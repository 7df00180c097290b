/* The CPU kernels for AVX-512. The target must be set before the first vector type is seen. */
#if defined(__x86_64__)
#pragma GCC target("arch=x86-64-v4")
#define VARIANT(name) name##_x86_64_v4
#include "accept.h"
#include "forward.h"
#include "latent.h"
#include "masked_head.h"
#include "recurrent.h"
#endif
