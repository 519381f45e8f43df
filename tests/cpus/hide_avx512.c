/* Makes a CPU look as if it had AVX2 and nothing newer, to libraries whose `cpuid` instructions were replaced by `ud2`:
 * the handler of SIGILL runs `cpuid` for them and clears the bits of AVX512, AVX-VNNI and AMX. Load it with LD_PRELOAD. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#define BIT(n) (1u << (n))

static void answer(int signal_number, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
    if (code[0] != 0x0F || code[1] != 0x0B) { /* another illegal instruction */
        signal(signal_number, SIG_DFL);
        return;
    }
    __cpuid_count(leaf, part, a, b, c, d);
    if (leaf == 7 && part == 0) {
        /* AVX512 F, DQ, IFMA, PF, ER, CD, BW, VL; VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; 4VNNIW, 4FMAPS, VP2INTERSECT, AMX */
        b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
        c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));
        d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25));
    } else if (leaf == 7 && part == 1) {
        /* AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA; AVX-VNNI-INT8, AVX-NE-CONVERT, AMX-COMPLEX, AVX-VNNI-INT16, AVX10 */
        a &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23));
        d &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19));
    }
    registers[REG_RAX] = a;
    registers[REG_RBX] = b;
    registers[REG_RCX] = c;
    registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

typedef int (*Sigaction)(int, const struct sigaction *, struct sigaction *);

/* Python's faulthandler would replace the handler. */
int sigaction(int number, const struct sigaction *action, struct sigaction *before)
{
    Sigaction next = (Sigaction)dlsym(RTLD_NEXT, "sigaction");
    return next(number, number == SIGILL ? 0 : action, before);
}

__attribute__((constructor)) static void install(void)
{
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    ((Sigaction)dlsym(RTLD_NEXT, "sigaction"))(SIGILL, &action, 0);
}
