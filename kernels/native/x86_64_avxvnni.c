/* The CPU kernels for AVX2 with dot products of bytes (AVX-VNNI), which CPUs without AVX-512 have. */
#if defined(__x86_64__)
#pragma GCC target("arch=x86-64-v3,avxvnni")
#define VARIANT(name) name##_x86_64_avxvnni
#include "accept.h"
#include "forward.h"
#include "latent.h"
#include "masked_head.h"
#include "recurrent.h"
#endif
