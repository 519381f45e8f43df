// The vector layer in plain C++: the meaning of each operation, and what runs on processors without a set of their own.
//
// Every set defines the same names for its own registers; LANES numbers of 32 bits fit into one.
//   F float32 lanes, I int32 lanes, Mask one bit a lane, B 4 * LANES bytes, read as 4 neighbours for each lane
//   NibbleSum, ByteSum: sums of products of unsigned codes and signed bytes, 4 neighbours to a lane. A NibbleSum takes
//   up to 8 groups of 4-bit codes or FIVE_BIT_GROUPS of 5-bit ones, a ByteSum BYTE_SUM_GROUPS; then it is read as I.
//   They are exact in every set, however a set computes them.
#pragma once
#include <cstdint>
#include <cstring>

namespace spaceport::SPACEPORT_SET {

constexpr int LANES = 4;
constexpr int REGISTERS = 16;
constexpr int MATRIX_ROWS = 17;  // rows from which a tile is multiplied as a matrix: more than one has
constexpr int FLOAT_SUM_REGISTERS = 1, OTHER_REGISTERS = 2;
constexpr int BYTE_SUM_REGISTERS = 1, BYTE_SUM_GROUPS = 64, FIVE_BIT_GROUPS = 8;
constexpr int TILE_ROWS_8 = 2, TILE_ROWS_4 = 2;  // most rows of a tile, by the bits of codes: more spill registers
constexpr int FETCH_ROWS[2] = {2, 2};            // codes of 8 bits, of fewer

struct F {
  float v[LANES];
};
struct I {
  int32_t v[LANES];
};
struct B {
  uint8_t v[4 * LANES];
};
struct Mask {
  bool v[LANES];
};

template <class R, class Op>
inline R each(Op op) {
  R r;
  for (int i = 0; i < int(sizeof r.v / sizeof *r.v); i++) r.v[i] = op(i);
  return r;
}
// Returns a vector R of these numbers, one for each i.
#define SPACEPORT_EACH(R, number) return each<R>([&](int i) { return number; })

template <class To, class From>
inline To bits_of(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Memory. No alignment is needed.
inline F load(const float* p) { SPACEPORT_EACH(F, p[i]); }
inline void store(float* p, F a) { memcpy(p, a.v, sizeof a.v); }
inline I load_int(const int32_t* p) { SPACEPORT_EACH(I, p[i]); }
inline void store_int(int32_t* p, I a) { memcpy(p, a.v, sizeof a.v); }
inline B load_bytes(const void* p) {
  B b;
  memcpy(b.v, p, sizeof b.v);
  return b;
}
inline F set(float a) { SPACEPORT_EACH(F, (void(i), a)); }
inline I set_int(int32_t a) { SPACEPORT_EACH(I, (void(i), a)); }
inline B set_group(const void* p) {
  B b;
  for (int i = 0; i < LANES; i++) memcpy(b.v + 4 * i, p, 4);
  return b;
}
inline F load_half(const void* p) {  // float16, denormals included
  return each<F>([&](int i) {
    uint16_t h;
    memcpy(&h, static_cast<const uint8_t*>(p) + 2 * i, 2);
    uint32_t exponent = h >> 10 & 31, fraction = h & 1023, sign = uint32_t(h & 0x8000) << 16;
    uint32_t bits = bits_of<uint32_t>(float(fraction) * (1.0f / (1 << 24)));
    if (exponent) bits = (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    return bits_of<float>(bits | sign);
  });
}
inline F load_unsigned(const uint8_t* p) { SPACEPORT_EACH(F, float(p[i])); }
inline F load_signed(const uint8_t* p) { SPACEPORT_EACH(F, float(int8_t(p[i]))); }
inline Mask load_mask(const uint8_t* p) { SPACEPORT_EACH(Mask, p[i] != 0); }
inline void store_bytes(int8_t* p, I a) {
  for (int i = 0; i < LANES; i++) p[i] = int8_t(a.v[i]);
}

// Float lanes: each is rounded once, as IEEE 754 says.
inline F add(F a, F b) { SPACEPORT_EACH(F, a.v[i] + b.v[i]); }
inline F sub(F a, F b) { SPACEPORT_EACH(F, a.v[i] - b.v[i]); }
inline F mul(F a, F b) { SPACEPORT_EACH(F, a.v[i] * b.v[i]); }
inline F div(F a, F b) { SPACEPORT_EACH(F, a.v[i] / b.v[i]); }
inline F fma(F a, F b, F c) { SPACEPORT_EACH(F, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline F fnma(F a, F b, F c) { SPACEPORT_EACH(F, __builtin_fmaf(-a.v[i], b.v[i], c.v[i])); }
inline F max(F a, F b) { SPACEPORT_EACH(F, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F min(F a, F b) { SPACEPORT_EACH(F, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F abs(F a) { SPACEPORT_EACH(F, __builtin_fabsf(a.v[i])); }
inline Mask greater(F a, F b) { SPACEPORT_EACH(Mask, a.v[i] > b.v[i]); }
inline F select(Mask mask, F a, F b) { SPACEPORT_EACH(F, mask.v[i] ? a.v[i] : b.v[i]); }
inline float max_of(F a) {
  float m = a.v[0];
  for (float x : a.v) m = x > m ? x : m;
  return m;
}

// Integer lanes.
inline F to_float(I a) { SPACEPORT_EACH(F, float(a.v[i])); }
// To nearest, ties to even; exact for magnitudes up to 2^22.
inline I to_int(F a) { SPACEPORT_EACH(I, bits_of<int32_t>(a.v[i] + 12582912.0f) - 0x4B400000); }
inline I add_int(I a, I b) { SPACEPORT_EACH(I, int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i]))); }
// For -126 <= n <= 127.
inline F power_of_two(I n) { SPACEPORT_EACH(F, bits_of<float>(uint32_t(n.v[i] + 127) << 23)); }
inline int32_t sum_of(I a) {
  uint32_t s = 0;
  for (int32_t x : a.v) s += uint32_t(x);
  return int32_t(s);
}

// Multiply-add of bytes.
inline B low_nibbles(B b) { SPACEPORT_EACH(B, uint8_t(b.v[i] & 15)); }
inline B high_nibbles(B b) { SPACEPORT_EACH(B, uint8_t(b.v[i] >> 4)); }
// Nibbles plus 16 where a bit is set, the lowest bit for the first.
inline B add_fifth_bits(B nibbles, const uint8_t* bits) {
  for (int i = 0; i < 4 * LANES; i += 8) {  // eight at a time: byte k has bit k, which moves to bit 4
    uint64_t eight, own = uint64_t(bits[i / 8]) * 0x0101010101010101 & 0x8040201008040201;
    memcpy(&eight, nibbles.v + i, 8);
    eight |= ((own + 0x7F7F7F7F7F7F7F7F) & 0x8080808080808080) >> 3;
    memcpy(nibbles.v + i, &eight, 8);
  }
  return nibbles;
}
inline I dot(I sum, B codes, B bytes) {
  return each<I>([&](int i) {
    int32_t s = sum.v[i];
    for (int k = 4 * i; k < 4 * i + 4; k++) s += int32_t(codes.v[k]) * int8_t(bytes.v[k]);
    return s;
  });
}

// `zero` is the code of zero times the negated sum of the bytes; a set adds it where that costs least, so a sum begins
// and is read with the same one. The code of zero of a ByteSum is 128.
using NibbleSum = I;
using ByteSum = I;
inline void begin(I& sum, int32_t zero) { sum = set_int(zero); }
inline void add_products(I& sum, B codes, B bytes) { sum = dot(sum, codes, bytes); }
inline I read(I sum, int32_t) { return sum; }

// Sums of two blocks of int4_pair. Each begins with the code of zero times the negated sum of the bytes, the second
// plus PAIR_START; a set may have both in one register, and may leave that to the end.
struct PairSum {
  I first, second;
};
struct PairScales {
  int16_t scales[2 * LANES], minima[2 * LANES];  // of the second and the first block
};
inline void begin_first(PairSum& sum, int32_t start) { sum.second = set_int(start); }
inline void begin_second(PairSum& sum, int32_t start) {
  sum.first = sum.second, sum.second = set_int(start - PAIR_START);
}
inline void add_products(PairSum& sum, B codes, B bytes) { sum.second = dot(sum.second, codes, bytes); }
inline PairSum pair_sum(I first, I second, const int32_t* starts) {
  return {add_int(first, set_int(starts[0])), add_int(second, set_int(starts[1] - PAIR_START))};
}
inline PairScales load_pair_scales(const uint8_t* p, int minima) {
  PairScales s;
  for (int i = 0; i < 2 * LANES; i++) s.scales[i] = p[i], s.minima[i] = int16_t(MINIMUM_UNIT * int8_t(p[minima + i]));
  return s;
}
inline I total(PairSum sum, const PairScales& s, int32_t sums) {
  return each<I>([&](int i) {
    return s.scales[2 * i + 1] * sum.first.v[i] + s.scales[2 * i] * sum.second.v[i] +
           s.minima[2 * i + 1] * (sums >> 16) + s.minima[2 * i] * int16_t(sums);
  });
}
inline void keep(B&) {}

// LANES rows of 4 * LANES signed bytes -> columns[j] = group j of every row, as codes around 128.
inline void transpose(const uint8_t* const* rows, B* columns) {
  for (int j = 0; j < LANES; j++)
    for (int i = 0; i < 4 * LANES; i++) columns[j].v[i] = uint8_t(rows[i / 4][4 * j + i % 4] ^ 0x80);
}

// Sums over slots of 15-bit weights times values, for 4 * LANES channels: 256 * high + low is the sum.
// Four slots are added at a time, at most 256 to a sum.
constexpr int CHANNELS = 4 * LANES;
constexpr int VALUE_BYTES = 4 * CHANNELS;  // of the prepared values of four slots
constexpr int MIX_PAIRS = 1;               // rows and heads that mix at a time
constexpr int MIX_PARTS = 1;               // MixSums of a sum
inline void prepare_values(const uint8_t* const* slots, uint8_t* prepared) {
  for (int s = 0; s < 4; s++) memcpy(prepared + s * CHANNELS, slots[s], CHANNELS);
}
// LANES weights of slots first.. of `count`: 2 bytes each.
inline void store_weights(uint8_t* weights, int, int first, I a) {
  for (int i = 0; i < LANES; i++) {
    int16_t w = int16_t(a.v[i]);
    memcpy(weights + 2 * (first + i), &w, 2);
  }
}
using MixSum = I;  // of LANES channels
struct MixValues {
  int8_t v[4][LANES];  // slots x channels
};
struct MixWeights {
  int16_t v[4];
};
inline MixSum mix_sum() { return set_int(0); }
inline MixValues load_values(const uint8_t* prepared, int vector) {
  MixValues values;
  for (int s = 0; s < 4; s++) memcpy(values.v[s], prepared + s * CHANNELS + vector * LANES, LANES);
  return values;
}
inline MixWeights load_weights(const uint8_t* weights, int, int first) {
  MixWeights w;
  memcpy(w.v, weights + 2 * first, sizeof w.v);
  return w;
}
inline void mix(MixSum* sum, MixValues values, MixWeights weights) {
  for (int s = 0; s < 4; s++)
    for (int c = 0; c < LANES; c++) sum->v[c] += weights.v[s] * values.v[s][c];
}
inline void add_mix(const MixSum* sum, int32_t* high, int32_t* low) {
  for (int c = 0; c < LANES; c++) {
    high[c] += sum->v[c] >> 8;
    low[c] += sum->v[c] & 255;
  }
}

}  // namespace spaceport::SPACEPORT_SET
