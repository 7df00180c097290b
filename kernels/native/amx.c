/* The permission to use x86-64's matrix unit, and a first product on it in a process that may die.
 *
 * Linux gives the registers of tiles only to a process that asks: its threads, and the processes that it forks, have the
 * permission as well. A first product runs in a child, so a machine that says it has the unit and faults there costs the
 * child. The child is a copy of this process with one thread, in which no library runs a handler: gRPC's starts threads there,
 * which fault. Not responsible for: products (see amx.h and float_tiles.c), and what follows from an answer (see
 * kernels/matrix_unit.py).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TILES_GRANTED = 0, TILES_ABSENT = -1 };

#if defined(__x86_64__)
#include <cpuid.h>

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM of asm/prctl.h, which older headers have not */
#define TILE_CONFIG 17            /* states of the processor, as bits of XCR0 */
#define TILE_DATA 18

/* The CPU has tiles of 16 rows of 64 bytes with products of bytes, and the system keeps them across a context switch. */
static int has_tiles(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (~low & (1u << TILE_CONFIG | 1u << TILE_DATA)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1u << 24) || !(d & 1u << 25)) return 0; /* TILE, INT8 */
    if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return 0; /* palette 1: bytes of a row, tiles, rows */
    return (b & 0xffff) == 64 && b >> 16 == 8 && (c & 0xffff) == 16;
}

/* 0: granted. -1: the CPU, or the system, has no tiles. Else the errno of the refusal. */
int32_t lockstep_tiles_permission(void) {
    if (!has_tiles()) return TILES_ABSENT;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? errno : TILES_GRANTED;
}

/* 1: tiles also multiply bf16 numbers, and vectors round to them. */
int32_t lockstep_has_float_tiles(void) {
    unsigned a, b, c, d, most;
    if (!has_tiles() || !__get_cpuid_count(7, 0, &most, &b, &c, &d) || !(d & 1u << 22) || most < 1) return 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1u << 5;
}
#else
int32_t lockstep_tiles_permission(void) { return TILES_ABSENT; }

int32_t lockstep_has_float_tiles(void) { return 0; }
#endif

/* What fork() does without the handlers of pthread_atfork. The child may allocate nothing: another thread may have held a lock of
 * the allocator. */
static pid_t bare_fork(void) { return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }

/* Run `product` with both arguments in a child, and compare `bytes` bytes of their results there. 0: they are equal. 1: they
 * are not. Else the signal that ended the child, SIGALRM after ten seconds, or -1 where there was none to run. */
int32_t lockstep_tiles_trial(void (*product)(const void *), const void *tiles, const void *plain, const void *tiled,
                             const void *wanted, int64_t bytes) {
    const pid_t child = bare_fork();
    if (child < 0) return -1;
    if (child == 0) {
        const int fatal[] = {SIGALRM, SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
        sigset_t none;
        for (unsigned i = 0; i < sizeof fatal / sizeof *fatal; i++) signal(fatal[i], SIG_DFL);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, 0);
        alarm(10);
        product(tiles);
        product(plain);
        _exit(memcmp(tiled, wanted, (size_t)bytes) ? 1 : 0);
    }
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return -1;
    return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}
