// Rounds the rows of a tile to 8 bits in blocks of 32 inputs, after their norm.
//
// Each block of a row, or each pair of blocks, has its own scale, so an outlier spoils 31 or 63 neighbours and no more:
// neither rotation nor calibration is needed. What has no magnitude above 1e-30 becomes 0. The scale of what has an
// infinity or a NaN is NaN, and so is all that is computed from the row.
//
//     code = round(x * (127 / largest)),    x is about (largest / 127) * code
#pragma once

namespace spaceport::SPACEPORT_SET {

// x -> (x - mean) / deviation * gain + bias; RMS norm has no mean and no bias.
inline void normalize(const NormOf& norm, const float* x, int count, float* y) {
  float mean = norm.kind == LAYER_NORM ? row_sum(x, count, 0.0f, 1) / float(count) : 0.0f;
  float variance = row_sum(x, count, mean, 2) / float(count);
  F factor = set(1.0f / __builtin_sqrtf(variance + norm.epsilon)), center = set(mean);
  for (int k = 0; k < count; k += LANES) {
    F v = mul(sub(load(x + k), center), factor);
    if (norm.gain) v = mul(v, load(norm.gain + k));
    if (norm.bias) v = add(v, load(norm.bias + k));
    store(y + k, v);
  }
}

constexpr int HALF_VECTORS = 16 / LANES;  // of half a block
constexpr float SMALLEST = 1e-30f;

// Magnitudes, infinity for what is not a number, so that a maximum finds it.
inline F magnitude(F x) { return select(greater(set(INFINITY), abs(x)), abs(x), set(INFINITY)); }

// What numbers of up to this magnitude are multiplied by to become codes, and what their codes are multiplied by.
inline float factor_of(float largest) { return largest > SMALLEST ? 127.0f / largest : 0.0f; }
inline float scale_of(float largest) { return largest < INFINITY ? largest > SMALLEST ? largest / 127.0f : 0.0f : NAN; }

inline float largest_of(const float* x, int count) {
  F largest = set(0.0f);
  for (int i = 0; i < count; i += LANES) largest = max(largest, magnitude(load(x + i)));
  return max_of(largest);
}

// Row `m` of a tile of `count` rows from `first` on.
inline void round_row(const RoundedRows& r, int first, int count, int m, const float* x) {
  int64_t at = int64_t(first) * (r.inputs / BLOCK);
  int adjacent = count >= MATRIX_ROWS ? BLOCK : 4, step = count >= MATRIX_ROWS ? 4 : 4 * count;
  int8_t* codes = r.codes + at * BLOCK + adjacent * m;
  float top = 0.0f;
  for (int b = 0; b < r.inputs / BLOCK; b++, x += BLOCK, codes += BLOCK * count) {
    if (b % r.together == 0) top = largest_of(x, r.together * BLOCK);
    float scale = scale_of(top);
    F factor = set(factor_of(top));
    alignas(64) int8_t block[BLOCK];
    int sum[2];
    for (int half = 0; half < 2; half++) {
      I total = set_int(0);
      for (int i = half * HALF_VECTORS; i < (half + 1) * HALF_VECTORS; i++) {
        I code = to_code(mul(load(x + LANES * i), factor));
        total = add_int(total, code);
        store_bytes(block + LANES * i, code);
      }
      sum[half] = sum_of(total);
      r.half_zeros[2 * at + (2 * b + half) * count + m] = -128 * sum[half];
    }
    for (int j = 0; j < BLOCK / 4; j++) __builtin_memcpy(codes + j * step, block + 4 * j, 4);
    int64_t place = at + b * count + m;
    int both = sum[0] + sum[1];
    r.scales[place] = scale;
    r.sums[place] = float(both) * scale;
    r.zeros[place] = -128 * both;
    if (r.together == 2) {
      int32_t* pair = r.pairs + (at / 2 + b / 2 * count + m) * 3;
      pair[b % 2] = b % 2 * PAIR_START - 8 * both;
      pair[2] = b % 2 ? pair[2] | (-both & 0xFFFF) : int32_t(uint32_t(-both) << 16);
    }
  }
}

inline void round_tile(const RoundedRows& r, int tile, const float* const* rows, const NormOf& norm, float* temporary) {
  int first = tile_begin(r, tile), count = tile_begin(r, tile + 1) - first;
  for (int m = 0; m < count; m++) {
    const float* x = rows[first + m];
    if (norm.kind != NO_NORM) normalize(norm, x, r.inputs, temporary), x = temporary;
    round_row(r, first, count, m, x);
  }
}

}  // namespace spaceport::SPACEPORT_SET
