#include "choose.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace spaceport {

// The sets that were compiled, fastest first.
#define SPACEPORT_SET_OF(name)  \
  namespace name {              \
  extern const Kernels KERNELS; \
  }
#if defined(__x86_64__) || defined(_M_X64)
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
// Bits of the instruction `cpuid`, and of the registers that the system keeps: not every compiler's library of its own
// for this works in a shared library.
struct Processor {
  bool avx2 = false, avxvnni = false, avx512vnni = false;

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
    avxvnni = avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
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
#if defined(SPACEPORT_TEST_ENCODING)  // avxvnni in the encoding of AVX512
    {&avxvnni::KERNELS, [] { return Processor().avx512vnni; }},
#else
    {&avxvnni::KERNELS, [] { return Processor().avxvnni; }},
#endif
    {&avx2::KERNELS, [] { return Processor().avx2; }},
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
