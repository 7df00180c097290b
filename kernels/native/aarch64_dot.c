/* The CPU kernels for aarch64 with dot products of bytes (Armv8.2's). The target must be set before the first vector type is seen. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod")
#define VARIANT(name) name##_aarch64_dot
#include "accept.h"
#include "forward.h"
#include "latent.h"
#include "masked_head.h"
#include "recurrent.h"
#endif
