// OMNILOAD_VECTORS compiles a function twice, for the baseline and for AVX2, and picks at load time
// what the processor has: one wheel runs everywhere and still uses wide vectors. Only GCC with
// glibc on x86-64 does this; elsewhere, and under a sanitizer (which is not up yet when the choice
// is made), the baseline alone is built. Results are the same.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define OMNILOAD_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define OMNILOAD_VECTORS
#endif
