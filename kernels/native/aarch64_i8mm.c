/* The CPU kernels for aarch64 with products of byte matrices (i8mm, an option since Armv8.2). The target must be set before the first vector type is seen. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#define VARIANT(name) name##_aarch64_i8mm
#include "accept.h"
#include "forward.h"
#include "latent.h"
#include "masked_head.h"
#include "recurrent.h"
#endif
