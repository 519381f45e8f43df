#include "choose.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

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
    {&avx512vnni::KERNELS,
     [] {
       return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     }},
#if defined(SPACEPORT_TEST_ENCODING)  // avxvnni in the encoding of AVX512
    {&avxvnni::KERNELS, [] { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl"); }},
#else
    {&avxvnni::KERNELS, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("avxvnni"); }},
#endif
    {&avx2::KERNELS, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#elif defined(__aarch64__)
    {&neon::KERNELS, has_dot_products},
#endif
    {&portable::KERNELS, [] { return true; }},
};

}  // namespace

const Kernels* choose_kernels(char* message, size_t size) {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();  // some compilers' libraries do not do it before main
#endif
  const char* wanted = getenv("SPACEPORT_KERNELS");
  char names[128] = "";
  for (const Candidate& candidate : CANDIDATES) {
    if (!candidate.supported()) continue;
    if (!wanted || !*wanted || !strcmp(wanted, candidate.kernels->name)) return candidate.kernels;
    snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", *names ? ", " : "", candidate.kernels->name);
  }
  snprintf(message, size, "SPACEPORT_KERNELS is %.40s: this processor has %s", wanted, names);
  return nullptr;
}

}  // namespace spaceport
