// The vector layer on AVX512 with VNNI: 16 lanes, and 64 products of bytes in one instruction. See vector_portable.h.
#pragma once
#include <immintrin.h>
#include <cstdint>

namespace spaceport::SPACEPORT_SET {

constexpr int LANES = 16;
constexpr int REGISTERS = 32;
constexpr int FLOAT_SUM_REGISTERS = 1, OTHER_REGISTERS = 2;
constexpr int BYTE_SUM_REGISTERS = 1, BYTE_SUM_GROUPS = 64, FIVE_BIT_GROUPS = 8;
#if defined(__AMX_INT8__)
constexpr int TILE_ROWS_8 = 16, TILE_ROWS_4 = 16, MATRIX_ROWS = 8;
#else  // most rows of a tile: two vectors of more spill registers
constexpr int TILE_ROWS_8 = 7, TILE_ROWS_4 = 7, MATRIX_ROWS = 17;
#endif
constexpr int FETCH_ROWS[2] = {5, 3};  // codes of 8 bits, of fewer

using F = __m512;
using I = __m512i;
using Mask = __mmask16;
struct B {
  __m512i v;
};

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline I load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_int(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
inline B load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
inline F set(float a) { return _mm512_set1_ps(a); }
inline I set_int(int32_t a) { return _mm512_set1_epi32(a); }
inline B set_group(const void* p) {
  int32_t a;
  __builtin_memcpy(&a, p, 4);
  return {_mm512_set1_epi32(a)};
}
inline F load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F load_unsigned(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline F load_signed(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Mask load_mask(const uint8_t* p) {
  __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return _mm_test_epi8_mask(bytes, bytes);
}
inline void store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a)); }

inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline Mask greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline F select(Mask mask, F a, F b) { return _mm512_mask_blend_ps(mask, b, a); }
inline float max_of(F a) { return _mm512_reduce_max_ps(a); }

inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I to_int(F a) { return _mm512_cvtps_epi32(a); }
inline I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
inline F power_of_two(I n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
inline int32_t sum_of(I a) { return _mm512_reduce_add_epi32(a); }

inline B low_nibbles(B b) { return {_mm512_and_si512(b.v, _mm512_set1_epi8(15))}; }
inline B high_nibbles(B b) { return {_mm512_and_si512(_mm512_srli_epi16(b.v, 4), _mm512_set1_epi8(15))}; }
inline B add_fifth_bits(B nibbles, const uint8_t* bits) {
  uint64_t mask;
  __builtin_memcpy(&mask, bits, 8);
  return {_mm512_mask_add_epi8(nibbles.v, mask, nibbles.v, _mm512_set1_epi8(16))};
}
inline I dot(I sum, B codes, B bytes) { return _mm512_dpbusd_epi32(sum, codes.v, bytes.v); }
using NibbleSum = I;
using ByteSum = I;
inline void begin(I& sum, int32_t zero) { sum = set_int(zero); }
inline void add_products(I& sum, B codes, B bytes) { sum = dot(sum, codes, bytes); }
inline I read(I sum, int32_t) { return sum; }
// The sum of the first block is in the higher 16 bits while the second is added up.
struct PairSum {
  I v;
};
struct PairScales {
  I scales, minima;
};
inline void begin_first(PairSum& sum, int32_t start) { sum.v = set_int(start); }
inline void begin_second(PairSum& sum, int32_t start) { sum.v = add_int(_mm512_slli_epi32(sum.v, 16), set_int(start)); }
inline void add_products(PairSum& sum, B codes, B bytes) { sum.v = dot(sum.v, codes, bytes); }
inline PairSum pair_sum(I first, I second, const int32_t* starts) {
  PairSum sum = {add_int(first, set_int(starts[0]))};
  begin_second(sum, starts[1]);
  return {add_int(sum.v, second)};
}
inline PairScales load_pair_scales(const uint8_t* p, int minima) {
  __m512i bytes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(p + minima)));
  return {_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)), _mm512_slli_epi16(bytes, 4)};
}
inline I total(PairSum sum, const PairScales& s, int32_t sums) {
  I products = _mm512_xor_si512(sum.v, set_int(PAIR_START));
  return _mm512_dpwssd_epi32(_mm512_madd_epi16(s.scales, products), s.minima, set_int(sums));
}
inline B from_signed(B b) { return {_mm512_xor_si512(b.v, _mm512_set1_epi8(char(0x80)))}; }
// Holds a broadcast in a register: GCC would load it again for each product.
inline void keep(B& b) { asm("" : "+v"(b.v)); }

inline void transpose(const uint8_t* const* rows, B* columns) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = from_signed(load_bytes(rows[i])).v;
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {  // r[4 g + i]: groups 4 L + i of rows 4 g .. 4 g + 3 in 128-bit lane L
    __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x44), b = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x44);
    __m512i c = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xEE), d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xEE);
    columns[i].v = _mm512_shuffle_i32x4(a, b, 0x88);
    columns[4 + i].v = _mm512_shuffle_i32x4(a, b, 0xDD);
    columns[8 + i].v = _mm512_shuffle_i32x4(c, d, 0x88);
    columns[12 + i].v = _mm512_shuffle_i32x4(c, d, 0xDD);
  }
}

// A weight is two bytes, high and low, each of which one multiply-add takes for four slots.
constexpr int CHANNELS = 4 * LANES;
constexpr int VALUE_BYTES = 4 * CHANNELS;
constexpr int MIX_PAIRS = 3, MIX_PARTS = 2;
inline void prepare_values(const uint8_t* const* slots, uint8_t* prepared) {  // [4][16 channels][4 slots]
  // Unpacking works within lanes of 128 bits: each lane is given what it has in the end.
  __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  auto row = [&](int i) { return _mm512_permutexvar_epi32(order, _mm512_loadu_si512(slots[i])); };
  __m512i r0 = row(0), r1 = row(1), r2 = row(2), r3 = row(3);
  __m512i a = _mm512_unpacklo_epi8(r0, r1), b = _mm512_unpackhi_epi8(r0, r1);
  __m512i c = _mm512_unpacklo_epi8(r2, r3), d = _mm512_unpackhi_epi8(r2, r3);
  _mm512_storeu_si512(prepared, _mm512_unpacklo_epi16(a, c));
  _mm512_storeu_si512(prepared + 64, _mm512_unpackhi_epi16(a, c));
  _mm512_storeu_si512(prepared + 128, _mm512_unpacklo_epi16(b, d));
  _mm512_storeu_si512(prepared + 192, _mm512_unpackhi_epi16(b, d));
}
inline void store_weights(uint8_t* weights, int count, int first, I a) {
  _mm_storeu_si128((__m128i*)(weights + first), _mm512_cvtepi32_epi8(_mm512_srli_epi32(a, 8)));
  _mm_storeu_si128((__m128i*)(weights + count + first), _mm512_cvtepi32_epi8(a));
}
using MixSum = I;
struct MixWeights {
  B high, low;
};
inline MixSum mix_sum() { return _mm512_setzero_si512(); }
inline B load_values(const uint8_t* prepared, int vector) { return load_bytes(prepared + 64 * vector); }
inline MixWeights load_weights(const uint8_t* weights, int count, int first) {
  return {set_group(weights + first), set_group(weights + count + first)};
}
// Not by intrinsics, with which GCC stores the sums of a loop in memory each time.
inline void mix(MixSum* sum, B values, MixWeights weights) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum[0]) : "v"(weights.high.v), "v"(values.v));
  asm("vpdpbusd %2, %1, %0" : "+v"(sum[1]) : "v"(weights.low.v), "v"(values.v));
}
inline void add_mix(const MixSum* sum, int32_t* high, int32_t* low) {
  store_int(high, add_int(load_int(high), sum[0]));
  store_int(low, add_int(load_int(low), sum[1]));
}

}  // namespace spaceport::SPACEPORT_SET

#if defined(SPACEPORT_MATRICES)
#include SPACEPORT_MATRICES
#elif defined(__AMX_INT8__)
#include "matrix_amx.h"
#endif
