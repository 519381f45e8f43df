// The vector layer on NEON with dot products of bytes (ARMv8.2 and later): 4 lanes. See vector_portable.h.
//
// Dot products take signed bytes, so codes around 128 become signed ones, whose sums need no correction.
#pragma once
#include <arm_neon.h>
#include <cstdint>

namespace spaceport::SPACEPORT_SET {

constexpr int LANES = 4;
constexpr int REGISTERS = 32, MATRIX_ROWS = 17;
constexpr int FLOAT_SUM_REGISTERS = 1, OTHER_REGISTERS = 2;
constexpr int BYTE_SUM_REGISTERS = 1, BYTE_SUM_GROUPS = 64, FIVE_BIT_GROUPS = 8;
constexpr int TILE_ROWS_8 = 6, TILE_ROWS_4 = 6;
constexpr int FETCH_ROWS[2] = {2, 2};  // codes of 8 bits, of fewer

using F = float32x4_t;
using I = int32x4_t;
using Mask = uint32x4_t;
struct B {
  uint8x16_t v;
};

inline F load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, F a) { vst1q_f32(p, a); }
inline I load_int(const int32_t* p) { return vld1q_s32(p); }
inline void store_int(int32_t* p, I a) { vst1q_s32(p, a); }
inline B load_bytes(const void* p) { return {vld1q_u8((const uint8_t*)p)}; }
inline F set(float a) { return vdupq_n_f32(a); }
inline I set_int(int32_t a) { return vdupq_n_s32(a); }
inline uint32_t load_group(const void* p) {
  uint32_t a;
  __builtin_memcpy(&a, p, 4);
  return a;
}
inline B set_group(const void* p) { return {vreinterpretq_u8_u32(vdupq_n_u32(load_group(p)))}; }
inline F load_half(const void* p) {
  uint64_t a;
  __builtin_memcpy(&a, p, 8);
  return vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(a)));
}
inline uint16x4_t load_four(const uint8_t* p) {
  return vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(load_group(p)))));
}
inline F load_unsigned(const uint8_t* p) { return vcvtq_f32_u32(vmovl_u16(load_four(p))); }
inline F load_signed(const uint8_t* p) {
  int16x4_t four = vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(load_group(p)))));
  return vcvtq_f32_s32(vmovl_s16(four));
}
inline Mask load_mask(const uint8_t* p) { return vcgtq_u32(vmovl_u16(load_four(p)), vdupq_n_u32(0)); }
inline void store_bytes(int8_t* p, I a) {
  int16x4_t narrow = vqmovn_s32(a);
  int8x8_t bytes = vqmovn_s16(vcombine_s16(narrow, narrow));
  uint32_t four = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
  __builtin_memcpy(p, &four, 4);
}

inline F add(F a, F b) { return vaddq_f32(a, b); }
inline F sub(F a, F b) { return vsubq_f32(a, b); }
inline F mul(F a, F b) { return vmulq_f32(a, b); }
inline F div(F a, F b) { return vdivq_f32(a, b); }
inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F fnma(F a, F b, F c) { return vfmsq_f32(c, a, b); }
inline F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline F abs(F a) { return vabsq_f32(a); }
inline Mask greater(F a, F b) { return vcgtq_f32(a, b); }
inline F select(Mask mask, F a, F b) { return vbslq_f32(mask, a, b); }
inline float max_of(F a) {
  float m[4];
  store(m, a);
  for (int i = 1; i < 4; i++) m[0] = m[i] > m[0] ? m[i] : m[0];
  return m[0];
}

inline F to_float(I a) { return vcvtq_f32_s32(a); }
inline I to_int(F a) { return vcvtnq_s32_f32(a); }
inline I add_int(I a, I b) { return vaddq_s32(a, b); }
inline F power_of_two(I n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
inline int32_t sum_of(I a) { return vaddvq_s32(a); }

inline B low_nibbles(B b) { return {vandq_u8(b.v, vdupq_n_u8(15))}; }
inline B high_nibbles(B b) { return {vshrq_n_u8(b.v, 4)}; }
inline B add_fifth_bits(B nibbles, const uint8_t* bits) {
  uint8x16_t own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
  uint8x16_t present = vtstq_u8(vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1])), own);
  return {vorrq_u8(nibbles.v, vandq_u8(present, vdupq_n_u8(16)))};
}
inline B from_signed(B b) { return {veorq_u8(b.v, vdupq_n_u8(0x80))}; }
inline void keep(B&) {}
inline I dot_signed(I sum, uint8x16_t a, uint8x16_t b) {
  return vdotq_s32(sum, vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b));
}

using NibbleSum = I;
struct ByteSum {
  I v;
};
inline void begin(I& sum, int32_t zero) { sum = vdupq_n_s32(zero); }
inline void begin(ByteSum& sum, int32_t) { sum.v = vdupq_n_s32(0); }
inline void add_products(I& sum, B codes, B bytes) { sum = dot_signed(sum, codes.v, bytes.v); }
inline void add_products(ByteSum& sum, B codes, B bytes) { sum.v = dot_signed(sum.v, from_signed(codes).v, bytes.v); }
inline I read(I sum, int32_t) { return sum; }
inline I read(ByteSum sum, int32_t) { return sum.v; }

struct PairSum {
  I first, second;
};
struct PairScales {
  I scales[2], minima[2];  // of the second and the first block
};
inline void begin_first(PairSum& sum, int32_t start) { sum.second = vdupq_n_s32(start); }
inline void begin_second(PairSum& sum, int32_t start) {
  sum.first = sum.second, sum.second = vdupq_n_s32(start - PAIR_START);
}
inline void add_products(PairSum& sum, B codes, B bytes) { sum.second = dot_signed(sum.second, codes.v, bytes.v); }
inline PairSum pair_sum(I first, I second, const int32_t* starts) {
  return {vaddq_s32(first, vdupq_n_s32(starts[0])), vaddq_s32(second, vdupq_n_s32(starts[1] - PAIR_START))};
}
inline PairScales load_pair_scales(const uint8_t* p, int minima) {
  int16x8_t scales = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p)));
  int16x8_t sixteenths = vshlq_n_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p + minima))), 4);
  int16x8x2_t s = vuzpq_s16(scales, scales), m = vuzpq_s16(sixteenths, sixteenths);
  return {{vmovl_s16(vget_low_s16(s.val[0])), vmovl_s16(vget_low_s16(s.val[1]))},
          {vmovl_s16(vget_low_s16(m.val[0])), vmovl_s16(vget_low_s16(m.val[1]))}};
}
inline I total(PairSum sum, const PairScales& s, int32_t sums) {
  I found = vmlaq_s32(vmulq_s32(s.scales[1], sum.first), s.scales[0], sum.second);
  return vmlaq_n_s32(vmlaq_n_s32(found, s.minima[1], sums >> 16), s.minima[0], int16_t(sums));
}

inline void transpose(const uint8_t* const* rows, B* columns) {
  uint32x4_t r[4];
  for (int i = 0; i < 4; i++) r[i] = vreinterpretq_u32_u8(from_signed(load_bytes(rows[i])).v);
  uint64x2_t a = vreinterpretq_u64_u32(vzip1q_u32(r[0], r[1])), b = vreinterpretq_u64_u32(vzip1q_u32(r[2], r[3]));
  uint64x2_t c = vreinterpretq_u64_u32(vzip2q_u32(r[0], r[1])), d = vreinterpretq_u64_u32(vzip2q_u32(r[2], r[3]));
  columns[0].v = vreinterpretq_u8_u64(vzip1q_u64(a, b));
  columns[1].v = vreinterpretq_u8_u64(vzip2q_u64(a, b));
  columns[2].v = vreinterpretq_u8_u64(vzip1q_u64(c, d));
  columns[3].v = vreinterpretq_u8_u64(vzip2q_u64(c, d));
}

// Values stay bytes; each is widened to 16 bits when it is multiplied by the weight of its slot.
constexpr int CHANNELS = 4 * LANES;
constexpr int VALUE_BYTES = 4 * CHANNELS;
constexpr int MIX_PAIRS = 3, MIX_PARTS = 1;
inline void prepare_values(const uint8_t* const* slots, uint8_t* prepared) {
  for (int s = 0; s < 4; s++) __builtin_memcpy(prepared + s * CHANNELS, slots[s], CHANNELS);
}
inline void store_weights(uint8_t* weights, int, int first, I a) {
  vst1_s16((int16_t*)(weights + 2 * first), vmovn_s32(a));
}
using MixSum = I;
struct MixValues {
  int16x4_t v[4];
};
using MixWeights = int16x4_t;
inline MixSum mix_sum() { return vdupq_n_s32(0); }
inline MixValues load_values(const uint8_t* prepared, int vector) {
  MixValues values;
  for (int s = 0; s < 4; s++) {
    uint32_t four = load_group(prepared + s * CHANNELS + vector * LANES);
    values.v[s] = vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))));
  }
  return values;
}
inline MixWeights load_weights(const uint8_t* weights, int, int first) {
  return vld1_s16((const int16_t*)(weights + 2 * first));
}
inline void mix(MixSum* sum, MixValues values, MixWeights weights) {
  *sum = vmlal_lane_s16(*sum, values.v[0], weights, 0);
  *sum = vmlal_lane_s16(*sum, values.v[1], weights, 1);
  *sum = vmlal_lane_s16(*sum, values.v[2], weights, 2);
  *sum = vmlal_lane_s16(*sum, values.v[3], weights, 3);
}
inline void add_mix(const MixSum* sum, int32_t* high, int32_t* low) {
  store_int(high, vaddq_s32(load_int(high), vshrq_n_s32(*sum, 8)));
  store_int(low, vaddq_s32(load_int(low), vandq_s32(*sum, vdupq_n_s32(255))));
}

}  // namespace spaceport::SPACEPORT_SET
