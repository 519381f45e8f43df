// The computations of the operators as one table of functions for each instruction set.
//
// Callers have checked every size; nothing here checks again. Each row is computed by itself: which rows are beside it,
// how they are tiled and which thread computes them changes no bit of its result. All sets return the same bytes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace spaceport {

enum Norm { NO_NORM, RMS_NORM, LAYER_NORM };
enum Activation { NO_ACTIVATION, SILU, GELU, GELU_TANH };

struct NormOf {
  Norm kind;
  const float* gain;  // null: 1
  const float* bias;  // null: 0
  float epsilon;
};

// Rows rounded to 8 bits in blocks of 32 inputs, in tiles of nearly equal size. Within a tile of m rows:
//   codes [inputs / 4][m][4], scales, sums and zeros [inputs / 32][m], half_zeros [inputs / 16][m],
//   pairs [inputs / 64][m][3]
// From MATRIX_ROWS of the instruction set on: codes [inputs / 32][m][32].
struct RoundedRows {
  int rows, inputs, tiles;
  int together;         // blocks that share a scale: 1, or 2 for weights in pairs
  int8_t* codes;
  float* scales;        // of a block: value = scale * code
  float* sums;          // scale * sum of codes of a block
  int32_t* zeros;       // -128 * sum of codes of a block
  int32_t* half_zeros;  // the same for each half of a block
  // Of two blocks that share a scale: -8 times the sum of codes of the first, of the second plus PAIR_START, and both
  // sums, negated, as the higher and the lower 16 bits.
  int32_t* pairs;
};

constexpr int PAIR_START = 1 << 15;  // makes sums of products of a block unsigned numbers of 16 bits

struct Product {
  const uint8_t* weights;  // packed
  Format format;
  int outputs;                  // without padding; gated: of gate and up together
  const float* bias = nullptr;  // null: none. outputs, in the order of the packed weights
  Activation activation = NO_ACTIVATION;
  bool gated = false;  // each panel holds 16 outputs of the gate, then the same 16 of up; y has outputs / 2 columns
  const float* residual = nullptr;  // null: none. Added; rows and columns as those of y
  float* y = nullptr;
  int64_t stride = 0;  // between rows of y and of the residual
  float cap = 0.0f;    // 0: none. y = cap * tanh(y / cap)
  // What is added to each row before its activation; null: nothing to any row, or to this one. As the bias, from
  // `first_addend` on, and readable to the end of the last panel.
  const float* const* addends = nullptr;
  int first_addend = 0;
};

// Keys and values of a layer; each slot and head of a request has a scale for its key and one for its value.
struct KvCache {
  int8_t *keys, *values;  // requests x heads x slots x size
  float* scales;          // requests x 2 x heads x slots: of keys, of values
  int requests, heads, slots, size;

  int64_t first_slot(int request, int head) const { return (int64_t(request) * heads + head) * slots; }
  float* key_scales(int request, int head) const { return scales + (int64_t(request) * 2 * heads + head) * slots; }
  float* value_scales(int request, int head) const { return key_scales(request, heads + head); }
};

struct Attention {
  int rows, heads;               // of all requests together, each has as many; query heads
  const float* qkv;              // rows x (heads + 2 * cache.heads) * size
  const float *cos, *sin;        // rows x rotated / 2
  int rotated;                   // leading channels of a head that are rotated
  bool interleaved;              // pairs of rotated channels are adjacent, instead of half of `rotated` apart
  const float *q_gain, *k_gain;  // null: no norm. RMS norm over a head, before the rotation: size
  float epsilon;
  const float* sinks;      // null: none. Logits that take weight and give no value: heads
  float scale, cap;        // of scores; cap 0: none
  const int64_t* slots;    // where each row is stored
  const uint8_t* visible;  // rows x seen: 1 = may see the slot
  int seen;                // first slots of a request that its rows may see at all
  KvCache cache;
  float* y;  // rows x heads * size
};

// Rows of a request that attend together and the blocks of 16 slots that any of them sees.
struct AttentionGroup {
  int request, first, rows;
  const int32_t* blocks;
  int block_count;
};

struct Kernels {
  const char* name;
  int tile_rows[2];  // most rows of a tile: of 8-bit weights, of weights of fewer bits
  // Rounds the rows of one tile after their norm; `temporary` holds `inputs` floats.
  void (*round_tile)(const RoundedRows&, int tile, const float* const* rows, const NormOf&, float* temporary);
  // Computes panels first..end of a product.
  void (*product)(const Product&, const RoundedRows&, int first, int end);
  // One row of a packed matrix times a factor: `inputs` floats.
  void (*unpack_row)(Format, const uint8_t* weights, int inputs, int64_t row, float factor, float* y);
  // Stores keys and values of the rows of a request for one KV head.
  void (*store)(const Attention&, int request, int kv_head);
  // Attends with a group of rows and the query heads of one KV head.
  void (*attend)(const Attention&, const AttentionGroup&, int kv_head, uint8_t* scratch);
  size_t (*attend_scratch)(const Attention&, const AttentionGroup&);
};

constexpr int SLOT_BLOCK = 16;
constexpr int MAX_HEAD_SIZE = 256;
constexpr int MAX_SEEN = 1 << 16;  // sums of 8-bit products stay below 2^31

// Tile `t` holds rows tile_begin(t) to tile_begin(t + 1).
constexpr int tile_begin(const RoundedRows& r, int tile) { return int(int64_t(r.rows) * tile / r.tiles); }

}  // namespace spaceport
