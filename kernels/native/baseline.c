/* The CPU kernels for whatever the compiler targets by default. */
#define VARIANT(name) name##_baseline
#include "accept.h"
#include "fused.h"
#include "paged_attention.h"
