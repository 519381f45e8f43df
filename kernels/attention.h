// Attention over 8-bit keys and values whose result does not depend on the order of the KV slots.
//
// A key or value has one scale for each slot and head, computed when it is stored: nothing is calibrated.
// Scores are exact integer sums, scaled by query and key. Weights are rounded to 15 bits relative to the row's largest
// product of weight and value scale, so that sums over slots are integers too, and any order of slots gives equal bits.
// Slots come in blocks of 16; blocks that no row of a group sees are not read. A row that sees a key or value that is
// not finite is NaN, as in floats; rows that do not see it are unchanged.
//
//     y = sum over slots of  round(32767 * w * value_scale / largest) * value,   w = exp(score - largest score),
//     times  largest / 32767 / (sum over slots of round(65536 * w) / 65536)
#pragma once

namespace spaceport::SPACEPORT_SET {

constexpr float WEIGHT_STEPS = 32767.0f, TOTAL_STEPS = 65536.0f;
constexpr float HIDDEN = -3e38f, LEAST_SCORE = -2.9e38f;  // the score of a slot that a row does not see; all others
constexpr int MIX_SLOTS = 256;                            // slots whose values are prepared at a time
constexpr int SCORE_PAIRS = 8;                            // rows and heads that score at a time
constexpr int MAX_CHANNELS = (MAX_HEAD_SIZE + CHANNELS - 1) / CHANNELS * CHANNELS;

// RMS norm of a head, where a family has one, and the rotation by the angles of a row.
inline void turn_head(const Attention& a, const float* x, const float* gain, int row, float* y) {
  int size = a.cache.size, half = a.rotated / 2;
  if (gain) {
    float factor = 1.0f / __builtin_sqrtf(row_sum(x, size, 0.0f, 2) / float(size) + a.epsilon);
    for (int i = 0; i < size; i++) y[i] = x[i] * factor * gain[i];
  } else {
    __builtin_memcpy(y, x, size * sizeof(float));
  }
  const float *cos = a.cos + int64_t(row) * half, *sin = a.sin + int64_t(row) * half;
  float first[MAX_HEAD_SIZE / 2], second[MAX_HEAD_SIZE / 2];
  int step = a.interleaved ? 2 : 1, apart = a.interleaved ? 1 : half;
  for (int i = 0; i < half; i++) first[i] = y[i * step], second[i] = y[i * step + apart];
  for (int i = 0; i < half; i++) {
    y[i * step] = __builtin_fmaf(first[i], cos[i], -(second[i] * sin[i]));
    y[i * step + apart] = __builtin_fmaf(second[i], cos[i], first[i] * sin[i]);
  }
}

// LANES numbers, zeros after the first `count`.
inline F load_part(const float* x, int count) {
  if (count >= LANES) return load(x);
  float padded[LANES] = {};
  __builtin_memcpy(padded, x, count * sizeof(float));
  return load(padded);
}

// Rounds a head of up to MAX_HEAD_SIZE channels to 8 bits; returns its scale.
inline float round_head(const float* x, int size, int8_t* codes, int32_t* zero) {
  F largest = set(0.0f);
  for (int i = 0; i < size; i += LANES) largest = max(largest, magnitude(load_part(x + i, size - i)));
  float top = max_of(largest);
  F factor = set(factor_of(top));
  I total = set_int(0);
  alignas(64) int8_t rounded[MAX_HEAD_SIZE + 16];
  for (int i = 0; i < size; i += LANES) {
    I code = to_code(mul(load_part(x + i, size - i), factor));
    total = add_int(total, code);
    store_bytes(rounded + i, code);
  }
  __builtin_memcpy(codes, rounded, size);
  *zero = -128 * sum_of(total);
  return scale_of(top);
}

inline void store_rows(const Attention& a, int request, int kv_head) {
  const KvCache& c = a.cache;
  int64_t width = int64_t(a.heads + 2 * c.heads) * c.size;
  float head[MAX_HEAD_SIZE];
  int32_t zero;
  int each = a.rows / c.requests;
  for (int row = request * each; row < (request + 1) * each; row++) {
    const float* key = a.qkv + row * width + int64_t(a.heads + kv_head) * c.size;
    int64_t slot = a.slots[row], at = (c.first_slot(request, kv_head) + slot) * c.size;
    turn_head(a, key, a.k_gain, row, head);
    c.key_scales(request, kv_head)[slot] = round_head(head, c.size, c.keys + at, &zero);
    c.value_scales(request, kv_head)[slot] = round_head(key + int64_t(c.heads) * c.size, c.size, c.values + at, &zero);
  }
}

// What a group of rows needs, for the query heads of one KV head: a pair is a row and a query head.
struct Work {
  int pairs, seen, stride, channels;  // slots of the listed blocks; between pairs; channels of a head, padded
  int8_t* queries;                    // tiles of up to SCORE_PAIRS pairs: [size / 4][pairs][4]
  float *query_scales, *scores, *largest, *sum_scales, *key_scales, *value_scales;  // largest: LANES of each pair
  int32_t *query_zeros, *visible_at, *high, *low;  // visible_at: where the row of a pair begins in `visible`
  uint8_t *visible, *weights, *values;

  // Scores of a block of slots lie together, for all pairs.
  float* score(int pair, int at) const {
    return scores + (int64_t(at / SLOT_BLOCK) * pairs + pair) * SLOT_BLOCK + at % SLOT_BLOCK;
  }
};

// Lays out the scratch memory; from null, to measure it.
inline size_t lay_out(const Attention& a, const AttentionGroup& g, uint8_t* scratch, Work* w) {
  uint8_t* at = scratch;
  int64_t pairs = int64_t(g.rows) * (a.heads / a.cache.heads), seen = int64_t(g.block_count) * SLOT_BLOCK;
  int64_t stride = seen + SLOT_BLOCK;  // powers of two would compete for the same places of the first-level cache
  w->pairs = int(pairs), w->seen = int(seen), w->stride = int(stride);
  w->channels = (a.cache.size + CHANNELS - 1) / CHANNELS * CHANNELS;
  w->queries = (int8_t*)take(at, pairs * a.cache.size);
  for (float** p : {&w->query_scales, &w->sum_scales}) *p = (float*)take(at, pairs * 4);
  for (float** p : {&w->key_scales, &w->value_scales}) *p = (float*)take(at, seen * 4);
  for (int32_t** p : {&w->query_zeros, &w->visible_at}) *p = (int32_t*)take(at, pairs * 4);
  for (int32_t** p : {&w->high, &w->low}) *p = (int32_t*)take(at, pairs * w->channels * 4);
  w->visible = take(at, g.rows * seen);
  w->weights = take(at, pairs * 2 * stride);
  w->values = take(at, MIX_SLOTS / 4 * VALUE_BYTES);
  w->largest = (float*)take(at, pairs * LANES * 4);
  w->scores = (float*)take(at, pairs * stride * 4);
  return size_t(at - scratch);
}

inline int tile_pairs(int left) { return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

inline void prepare_queries(const Attention& a, const AttentionGroup& g, int kv_head, const Work& w) {
  int size = a.cache.size, share = a.heads / a.cache.heads;
  int64_t width = int64_t(a.heads + 2 * a.cache.heads) * size;
  float head[MAX_HEAD_SIZE];
  int8_t codes[MAX_HEAD_SIZE];
  for (int first = 0; first < w.pairs;) {
    int count = tile_pairs(w.pairs - first);
    for (int i = 0; i < count; i++) {
      int pair = first + i, row = g.first + pair / share;
      w.visible_at[pair] = pair / share * w.seen;
      turn_head(a, a.qkv + row * width + int64_t(kv_head * share + pair % share) * size, a.q_gain, row, head);
      w.query_scales[pair] = round_head(head, size, codes, w.query_zeros + pair) * a.scale;
      int8_t* out = w.queries + int64_t(first) * size + 4 * i;
      for (int j = 0; j < size / 4; j++) __builtin_memcpy(out + 4 * j * count, codes + 4 * j, 4);
    }
    first += count;
  }
}

// Scales and visibility of the listed slots, side by side.
inline void collect_slots(const Attention& a, const AttentionGroup& g, int kv_head, const Work& w) {
  const float* key_scales = a.cache.key_scales(g.request, kv_head);
  const float* value_scales = a.cache.value_scales(g.request, kv_head);
  for (int b = 0; b < g.block_count; b++) {
    int slot = g.blocks[b] * SLOT_BLOCK, count = a.seen - slot < SLOT_BLOCK ? a.seen - slot : SLOT_BLOCK;
    int at = b * SLOT_BLOCK;
    for (int i = 0; i < SLOT_BLOCK; i++) {
      w.key_scales[at + i] = i < count ? key_scales[slot + i] : 0.0f;
      w.value_scales[at + i] = i < count ? value_scales[slot + i] : 0.0f;
    }
    for (int row = 0; row < g.rows; row++) {
      uint8_t* out = w.visible + int64_t(row) * w.seen + at;
      const uint8_t* in = a.visible + int64_t(g.first + row) * a.seen + slot;
      if (count == SLOT_BLOCK) {
        __builtin_memcpy(out, in, SLOT_BLOCK);
        continue;
      }
      for (int i = 0; i < SLOT_BLOCK; i++) out[i] = i < count ? in[i] : 0;
    }
  }
}

// Pointers to the rows of `count` slots of a block, or to a copy that is padded with zeros behind the last channels.
template <int COUNT>
inline void slot_rows(const Attention& a, const int8_t* base, int slot, int channel, const uint8_t** rows,
                      uint8_t (*padded)[CHANNELS]) {
  int left = a.cache.size - channel;
  for (int i = 0; i < COUNT; i++) {
    int s = slot + i < a.seen ? slot + i : a.seen - 1;  // invisible, but readable
    rows[i] = (const uint8_t*)base + int64_t(s) * a.cache.size + channel;
    if (left >= CHANNELS) continue;
    __builtin_memset(padded[i], 0, CHANNELS);
    __builtin_memcpy(padded[i], rows[i], left);
    rows[i] = padded[i];
  }
}

template <int COUNT>
inline void score_tile(const Attention& a, const Work& w, const B* columns, int groups, int pair, const int8_t* queries,
                       F key_scales, int at) {
  I totals[COUNT];
  for (I& total : totals) total = set_int(0);
  for (int first = 0; first < groups; first += BYTE_SUM_GROUPS) {
    ByteSum sums[COUNT];
    int end = groups - first < BYTE_SUM_GROUPS ? groups : first + BYTE_SUM_GROUPS;
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) begin(sums[i], first ? 0 : w.query_zeros[pair + i]);
#pragma GCC unroll 4
    for (int j = first; j < end; j++, queries += 4 * COUNT)
#pragma GCC unroll 8
      for (int i = 0; i < COUNT; i++) add_products(sums[i], columns[j], set_group(queries + 4 * i));
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) totals[i] = add_int(totals[i], read(sums[i], first ? 0 : w.query_zeros[pair + i]));
  }
  F scores[COUNT];
#pragma GCC unroll 8
  for (int i = 0; i < COUNT; i++) scores[i] = mul(mul(to_float(totals[i]), key_scales), set(w.query_scales[pair + i]));
  if (a.cap != 0.0f)
    for (F& score : scores) score = mul(set(a.cap), tanh(div(score, set(a.cap))));
  const uint8_t* visible = w.visible + at;
  const int32_t* visible_at = w.visible_at + pair;
  float *out = w.score(pair, at), *largest = w.largest + pair * LANES;
#pragma GCC unroll 8
  for (int i = 0; i < COUNT; i++) {
    F score = select(load_mask(visible + visible_at[i]), scores[i], set(HIDDEN));
    store(out + i * SLOT_BLOCK, score);
    store(largest + i * LANES, max(load(largest + i * LANES), score));
  }
}

inline void score(const Attention& a, const AttentionGroup& g, int kv_head, const Work& w) {
  const int8_t* keys = a.cache.keys + a.cache.first_slot(g.request, kv_head) * a.cache.size;
  int groups = a.cache.size / 4;
  B columns[MAX_CHANNELS / 4];
  for (int i = 0; i < w.pairs * LANES; i++) w.largest[i] = HIDDEN;
  uint8_t padded[LANES][CHANNELS];
  for (int at = 0; at < w.seen; at += LANES) {
    int slot = g.blocks[at / SLOT_BLOCK] * SLOT_BLOCK + at % SLOT_BLOCK;
    for (int channel = 0; channel < a.cache.size; channel += CHANNELS) {
      const uint8_t* rows[LANES];
      slot_rows<LANES>(a, keys, slot, channel, rows, padded);
      transpose(rows, columns + channel / 4);
    }
    F key_scales = load(w.key_scales + at);
    for (int pair = 0; pair < w.pairs;) {
      const int8_t* queries = w.queries + int64_t(pair) * a.cache.size;
      int count = tile_pairs(w.pairs - pair);
      with_constant(Below<4>(), __builtin_ctz(unsigned(count)),
                    [&](auto power) { score_tile<1 << power>(a, w, columns, groups, pair, queries, key_scales, at); });
      pair += count;
    }
  }
}

// Scores of a pair become its weights: two bytes for each slot, and what their sums are multiplied by.
inline void weigh(const Attention& a, const Work& w, int pair, int head) {
  float top = max_of(load(w.largest + pair * LANES));
  if (a.sinks && a.sinks[head] > top) top = a.sinks[head];
  I total = set_int(0);
  F product = set(0.0f), zero = product;
  for (int at = 0; at < w.seen; at += LANES) {
    F score = load(w.score(pair, at));
    Mask hidden = greater(set(LEAST_SCORE), score);
    F weight = select(hidden, zero, exp(sub(score, set(top))));
    total = add_int(total, to_int(mul(weight, set(TOTAL_STEPS))));
    weight = select(hidden, zero, mul(weight, load(w.value_scales + at)));
    product = max(product, magnitude(weight));
    store(w.score(pair, at), weight);
  }
  float most = max_of(product);
  F factor = set(most > SMALLEST ? WEIGHT_STEPS / most : 0.0f);  // 0 also where a score or a scale is not finite
  uint8_t* weights = w.weights + int64_t(pair) * 2 * w.stride;
  for (int at = 0; at < w.seen; at += LANES)
    store_weights(weights, w.stride, at, to_int(mul(load(w.score(pair, at)), factor)));
  int32_t parts[LANES];
  store_int(parts, total);
  int64_t sum = 0;
  for (int32_t part : parts) sum += part;
  if (a.sinks) {
    store_int(parts, to_int(mul(exp(sub(set(a.sinks[head]), set(top))), set(TOTAL_STEPS))));
    sum += parts[0];
  }
  float scale = sum > 0 && most > SMALLEST ? most * (TOTAL_STEPS / WEIGHT_STEPS) / float(sum) : 0.0f;
  w.sum_scales[pair] = most < INFINITY ? scale : NAN;
}

template <int COUNT>
inline void mix_tile(const Work& w, int pair, int first, int count, int channel) {
  MixSum sums[COUNT][4][MIX_PARTS];
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 8
    for (int v = 0; v < 4 * MIX_PARTS; v++) sums[i][v / MIX_PARTS][v % MIX_PARTS] = mix_sum();
  const uint8_t *weights = w.weights + int64_t(pair) * 2 * w.stride, *prepared = w.values;
  for (int at = first; at < first + count; at += 4, prepared += VALUE_BYTES)
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) {
      auto weight = load_weights(weights + int64_t(i) * 2 * w.stride, w.stride, at);
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) mix(sums[i][v], load_values(prepared, v), weight);
    }
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; i++) {
    int64_t out = int64_t(pair + i) * w.channels + channel;
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) add_mix(sums[i][v], w.high + out + v * LANES, w.low + out + v * LANES);
  }
}

inline void mix_values(const Attention& a, const AttentionGroup& g, int kv_head, const Work& w) {
  const int8_t* values = a.cache.values + a.cache.first_slot(g.request, kv_head) * a.cache.size;
  __builtin_memset(w.high, 0, int64_t(w.pairs) * w.channels * 4);
  __builtin_memset(w.low, 0, int64_t(w.pairs) * w.channels * 4);
  uint8_t padded[4][CHANNELS];
  for (int first = 0; first < w.seen; first += MIX_SLOTS) {
    int count = w.seen - first < MIX_SLOTS ? w.seen - first : MIX_SLOTS;
    for (int channel = 0; channel < a.cache.size; channel += CHANNELS) {
      for (int at = 0; at < count; at += 4) {
        int slot = g.blocks[(first + at) / SLOT_BLOCK] * SLOT_BLOCK + at % SLOT_BLOCK;
        const uint8_t* rows[4];
        slot_rows<4>(a, values, slot, channel, rows, padded);
        prepare_values(rows, w.values + int64_t(at / 4) * VALUE_BYTES);
      }
      int pair = 0;
      for (; pair + MIX_PAIRS <= w.pairs; pair += MIX_PAIRS) mix_tile<MIX_PAIRS>(w, pair, first, count, channel);
      for (; pair < w.pairs; pair++) mix_tile<1>(w, pair, first, count, channel);
    }
  }
}

inline size_t attend_scratch(const Attention& a, const AttentionGroup& g) {
  Work w;
  return lay_out(a, g, nullptr, &w);
}

inline void attend(const Attention& a, const AttentionGroup& g, int kv_head, uint8_t* scratch) {
  Work w;
  lay_out(a, g, scratch, &w);
  int share = a.heads / a.cache.heads, size = a.cache.size;
  prepare_queries(a, g, kv_head, w);
  collect_slots(a, g, kv_head, w);
  score(a, g, kv_head, w);
  for (int pair = 0; pair < w.pairs; pair++) weigh(a, w, pair, kv_head * share + pair % share);
  mix_values(a, g, kv_head, w);
  for (int pair = 0; pair < w.pairs; pair++) {
    const int32_t *high = w.high + int64_t(pair) * w.channels, *low = w.low + int64_t(pair) * w.channels;
    float* y = a.y + (int64_t(g.first + pair / share) * a.heads + kv_head * share + pair % share) * size;
    for (int c = 0; c < size; c++)  // one form of the sum for all sets, before it is rounded
      y[c] = __builtin_fmaf(float(high[c] + (low[c] >> 8)), 256.0f, float(low[c] & 255)) * w.sum_scales[pair];
  }
}

}  // namespace spaceport::SPACEPORT_SET
