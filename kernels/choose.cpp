#include "choose.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace spaceport {

// The sets that were compiled, fastest first.
#define SPACEPORT_SET_OF(name)  \
  namespace name {              \
  extern const Kernels KERNELS; \
  }
#if defined(__x86_64__) || defined(_M_X64)
SPACEPORT_SET_OF(amx)
SPACEPORT_SET_OF(avx512vnni)
SPACEPORT_SET_OF(avxvnni)
SPACEPORT_SET_OF(avx2)
#elif defined(__aarch64__)
SPACEPORT_SET_OF(neon)
#endif
SPACEPORT_SET_OF(portable)
#undef SPACEPORT_SET_OF

namespace {

#if defined(__x86_64__) || defined(_M_X64)
// Linux lets a process use the matrix registers only after it has asked, once for all of its threads.
bool may_use_amx() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
#else
  return false;
#endif
}

// Bits of the instruction `cpuid`, and of the registers that the system keeps: not every compiler's library of its own
// for this works in a shared library.
struct Processor {
  bool avx2 = false, avxvnni = false, avx512vnni = false, amx = false;

  Processor() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    bool fma = c >> 12 & 1, saves = c >> 27 & 1, f16c = c >> 29 & 1;
    unsigned kept = 0, high = 0;
    if (saves) asm volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = fma && f16c && (kept & 6) == 6 && (b >> 5 & 1);
    bool wide = (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1);  // AVX512 F, DQ, BW, VL
    avx512vnni = avx2 && wide && (c >> 11 & 1) && (kept & 0xE6) == 0xE6;
    bool tiles = (d >> 24 & 1) && (d >> 25 & 1) && (kept >> 17 & 3) == 3;  // AMX-TILE, AMX-INT8
    amx = avx512vnni && tiles && may_use_amx();
#if defined(SPACEPORT_MATRICES)
    amx = avx512vnni;  // with emulated instructions
#endif
    avxvnni = avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#if defined(SPACEPORT_TEST_ENCODING)
    avxvnni = avx512vnni;  // in the encoding of AVX512
#endif
  }
};
#endif

#if defined(__aarch64__)
bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
  return true;  // all Apple processors since 2018
#endif
}
#endif

struct Candidate {
  const Kernels* kernels;
  bool (*supported)();
};

const Candidate CANDIDATES[] = {
#if defined(__x86_64__) || defined(_M_X64)
    {&avx512vnni::KERNELS, [] { return Processor().avx512vnni; }},
    {&avxvnni::KERNELS, [] { return Processor().avxvnni; }},
    {&avx2::KERNELS, [] { return Processor().avx2; }},
    {&amx::KERNELS, [] { return Processor().amx; }},  // only by name: it never ran on a processor that has AMX
#elif defined(__aarch64__)
    {&neon::KERNELS, has_dot_products},
#endif
    {&portable::KERNELS, [] { return true; }},
};

}  // namespace

const Kernels* choose_kernels(char* message, size_t size) {
  const char* wanted = getenv("SPACEPORT_KERNELS");
  for (const Candidate& candidate : CANDIDATES) {
    if (!candidate.supported()) continue;
    if (!wanted || !*wanted || !strcmp(wanted, candidate.kernels->name)) return candidate.kernels;
  }
  char names[128];
  list_kernels(names, sizeof names);
  snprintf(message, size, "SPACEPORT_KERNELS is %.40s: this processor has %s; name one of them, or unset it", wanted,
           names);
  return nullptr;
}

void list_kernels(char* names, size_t size) {
  size_t length = 0;
  for (const Candidate& candidate : CANDIDATES)
    if (candidate.supported() && length < size)
      length += snprintf(names + length, size - length, "%s%s", length ? ", " : "", candidate.kernels->name);
}

}  // namespace spaceport
