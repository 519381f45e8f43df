// The vector layer on AVX2 with FMA and F16C, and on AVX-VNNI: 8 lanes. See vector_portable.h.
//
// AVX2 multiplies unsigned by signed bytes and adds pairs into 16 bits, which overflows for two bytes of 8 bits each,
// but not for codes of 4 bits: 2 * 15 * 127, and eight such pairs are 30,480. Four pairs of 5-bit codes are 31,496.
// So bytes are split into two nibbles,
//     code = 16 * high + low,
// whose sums take eight groups of products in 16 bits before they are widened.
#pragma once
#include <immintrin.h>
#include <cstdint>

namespace spaceport::SPACEPORT_SET {

constexpr int LANES = 8;
constexpr int REGISTERS = 16, MATRIX_ROWS = 17;
// Sums of floats and what else is used once for a block may be in memory: more vectors then share broadcasts.
constexpr int FLOAT_SUM_REGISTERS = 0, OTHER_REGISTERS = 0;
constexpr int FETCH_ROWS[2] = {2, 2};  // codes of 8 bits, of fewer

using F = __m256;
using I = __m256i;
using Mask = __m256;
struct B {
  __m256i v;
};

inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline I load_int(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store_int(int32_t* p, I a) { _mm256_storeu_si256((__m256i*)p, a); }
inline B load_bytes(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
inline F set(float a) { return _mm256_set1_ps(a); }
inline I set_int(int32_t a) { return _mm256_set1_epi32(a); }
inline B set_group(const void* p) {
  int32_t a;
  __builtin_memcpy(&a, p, 4);
  return {_mm256_set1_epi32(a)};
}
inline F load_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline F load_unsigned(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline F load_signed(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Mask load_mask(const uint8_t* p) {
  __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(bytes, _mm256_setzero_si256()));
}
inline void store_bytes(int8_t* p, I a) {
  __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
}

inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Mask greater(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline F select(Mask mask, F a, F b) { return _mm256_blendv_ps(b, a, mask); }
inline float max_of(F a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

inline F to_float(I a) { return _mm256_cvtepi32_ps(a); }
inline I to_int(F a) { return _mm256_cvtps_epi32(a); }
inline I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
inline F power_of_two(I n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline int32_t sum_of(I a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
}

inline B low_nibbles(B b) { return {_mm256_and_si256(b.v, _mm256_set1_epi8(15))}; }
inline B high_nibbles(B b) { return {_mm256_and_si256(_mm256_srli_epi16(b.v, 4), _mm256_set1_epi8(15))}; }
inline B add_fifth_bits(B nibbles, const uint8_t* bits) {
  int32_t word;
  __builtin_memcpy(&word, bits, 4);
  // Each byte of bits goes to the eight lanes that it is for, and each lane tests its own bit.
  __m256i to = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  __m256i own = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  __m256i present = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), to), own);
  __m256i added = _mm256_and_si256(_mm256_cmpeq_epi8(present, own), _mm256_set1_epi8(16));
  return {_mm256_or_si256(nibbles.v, added)};
}
inline B from_signed(B b) { return {_mm256_xor_si256(b.v, _mm256_set1_epi8(char(0x80)))}; }
inline void keep(B& b) { asm("" : "+x"(b.v)); }

struct PairScales {
  I scales, minima;  // 16 bits: of the second and the first block
};
inline PairScales load_pair_scales(const uint8_t* p, int minima) {
  __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + minima)));
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_slli_epi16(bytes, 4)};
}

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
#if defined(__AVXVNNI__)
inline I dot(I sum, B codes, B bytes) { return _mm256_dpbusd_avx_epi32(sum, codes.v, bytes.v); }
#else  // the same instruction in the other encoding, for tests on processors that lack the first
inline I dot(I sum, B codes, B bytes) { return _mm256_dpbusd_epi32(sum, codes.v, bytes.v); }
#endif
constexpr int BYTE_SUM_REGISTERS = 1, BYTE_SUM_GROUPS = 64, FIVE_BIT_GROUPS = 8;
constexpr int TILE_ROWS_8 = 7, TILE_ROWS_4 = 7;
using NibbleSum = I;
using ByteSum = I;
inline void begin(I& sum, int32_t zero) { sum = set_int(zero); }
inline void add_products(I& sum, B codes, B bytes) { sum = dot(sum, codes, bytes); }
inline I read(I sum, int32_t) { return sum; }
// The sum of the first block is in the higher 16 bits while the second is added up.
struct PairSum {
  I v;
};
inline void begin_first(PairSum& sum, int32_t start) { sum.v = set_int(start); }
inline void begin_second(PairSum& sum, int32_t start) { sum.v = add_int(_mm256_slli_epi32(sum.v, 16), set_int(start)); }
inline void add_products(PairSum& sum, B codes, B bytes) { sum.v = dot(sum.v, codes, bytes); }
inline I total(PairSum sum, const PairScales& s, int32_t sums) {
  I products = _mm256_xor_si256(sum.v, set_int(PAIR_START));
  return add_int(_mm256_madd_epi16(s.scales, products), _mm256_madd_epi16(s.minima, set_int(sums)));
}
#else
constexpr int BYTE_SUM_REGISTERS = 2, BYTE_SUM_GROUPS = 8, FIVE_BIT_GROUPS = 4;
constexpr int TILE_ROWS_8 = 8, TILE_ROWS_4 = 12;
struct NibbleSum {
  __m256i pairs;
};
struct ByteSum {
  __m256i low, high;
};
inline I widen(__m256i pairs, int16_t factor) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(factor)); }
inline void add_pairs(__m256i& sums, B codes, B bytes) {
  sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes.v, bytes.v));
  asm("" : "+x"(sums));  // GCC would add up all products first, and store each of them meanwhile
}
inline void begin(NibbleSum& sum, int32_t) { sum.pairs = _mm256_setzero_si256(); }
inline void add_products(NibbleSum& sum, B codes, B bytes) { add_pairs(sum.pairs, codes, bytes); }
inline I read(NibbleSum sum, int32_t zero) { return add_int(widen(sum.pairs, 1), set_int(zero)); }
// Sums of pairs of products, in 16 bits. Codes begin at 0, so what the code of zero takes is added to the minima.
struct PairSum {
  __m256i first, second;
};
inline void begin_first(PairSum& sum, int32_t) { sum.second = _mm256_setzero_si256(); }
inline void begin_second(PairSum& sum, int32_t) { sum.first = sum.second, sum.second = _mm256_setzero_si256(); }
inline void add_products(PairSum& sum, B codes, B bytes) { add_pairs(sum.second, codes, bytes); }
inline I total(PairSum sum, const PairScales& s, int32_t sums) {
  __m256i second = _mm256_and_si256(s.scales, set_int(0xFFFF)), first = _mm256_srli_epi32(s.scales, 16);
  second = _mm256_or_si256(second, _mm256_slli_epi32(second, 16));
  first = _mm256_or_si256(first, _mm256_slli_epi32(first, 16));
  __m256i minima = _mm256_add_epi16(s.minima, _mm256_slli_epi16(s.scales, 3));
  I found = add_int(_mm256_madd_epi16(first, sum.first), _mm256_madd_epi16(second, sum.second));
  return add_int(found, _mm256_madd_epi16(minima, set_int(sums)));
}
inline void begin(ByteSum& sum, int32_t) { sum.low = sum.high = _mm256_setzero_si256(); }
inline void add_products(ByteSum& sum, B codes, B bytes) {
  add_pairs(sum.low, low_nibbles(codes), bytes);
  add_pairs(sum.high, high_nibbles(codes), bytes);
}
inline I read(ByteSum sum, int32_t zero) {
  return add_int(add_int(widen(sum.low, 1), widen(sum.high, 16)), set_int(zero));
}
#endif

inline void transpose(const uint8_t* const* rows, B* columns) {
  __m256i r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = from_signed(load_bytes(rows[i])).v;
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    columns[i].v = _mm256_permute2x128_si256(r[i], r[4 + i], 0x20);
    columns[4 + i].v = _mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
  }
}

// Values are widened to 16 bits, pairs of slots beside each other, and one multiply-add takes the 15-bit weights of
// two.
constexpr int CHANNELS = 4 * LANES;
constexpr int VALUE_BYTES = 8 * CHANNELS;
constexpr int MIX_PAIRS = 2, MIX_PARTS = 1;
inline void prepare_values(const uint8_t* const* slots, uint8_t* prepared) {  // [2 pairs][4][8 channels][2 slots]
  for (int pair = 0; pair < 2; pair++)
    for (int half = 0; half < 2; half++) {
      __m256i a = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(slots[2 * pair] + 16 * half)));
      __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(slots[2 * pair + 1] + 16 * half)));
      __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
      __m256i* out = (__m256i*)(prepared + 128 * pair + 64 * half);
      _mm256_storeu_si256(out, _mm256_permute2x128_si256(low, high, 0x20));
      _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(low, high, 0x31));
    }
}
inline void store_weights(uint8_t* weights, int, int first, I a) {
  __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storeu_si128((__m128i*)(weights + 2 * first), halves);
}
using MixSum = I;
struct MixValues {
  B first, second;  // pairs of slots
};
using MixWeights = MixValues;
inline MixSum mix_sum() { return _mm256_setzero_si256(); }
inline MixValues load_values(const uint8_t* prepared, int vector) {
  return {load_bytes(prepared + 32 * vector), load_bytes(prepared + 128 + 32 * vector)};
}
inline MixWeights load_weights(const uint8_t* weights, int, int first) {
  return {set_group(weights + 2 * first), set_group(weights + 2 * first + 4)};
}
inline void mix(MixSum* sum, MixValues values, MixWeights weights) {
  *sum = add_int(*sum, _mm256_madd_epi16(values.first.v, weights.first.v));
  *sum = add_int(*sum, _mm256_madd_epi16(values.second.v, weights.second.v));
}
inline void add_mix(const MixSum* sum, int32_t* high, int32_t* low) {
  store_int(high, add_int(load_int(high), _mm256_srai_epi32(*sum, 8)));
  store_int(low, add_int(load_int(low), _mm256_and_si256(*sum, _mm256_set1_epi32(255))));
}

}  // namespace spaceport::SPACEPORT_SET
