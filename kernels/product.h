// Products of rounded rows and packed weights.
//
// Sums of products of bytes are exact integers for each block of 32 inputs; a row adds its blocks in one fixed order.
// A tile of rows and outputs has all its sums in registers, and no row's sum contains anything of another row.
// With unsigned codes c and rounded activations a of scale s, an output is
//
//     y = sum over blocks of  scale * s * sum((c - zero) * a)  -  minimum * s * sum(a)
#pragma once

namespace spaceport::SPACEPORT_SET {

struct Tile {
  const int8_t* codes;
  const float *scales, *sums;
  const int32_t *zeros, *half_zeros, *pairs;
  const uint8_t* next;  // what is fetched for later,
  int lines;            // so many cache lines with each block
  uint8_t* unpacked;    // for matrices, codes of fewer than 8 bits as bytes,
  int kept;             // of so many blocks for all tiles; 0: of UNPACKED_TOGETHER for one
  bool unpacks;         // whether no earlier tile has done it
};

// In matrix_amx.h, for sets whose MATRIX_ROWS a tile can have.
void configure_matrices(int rows, int inputs);
void multiply_matrices(const int8_t* codes, const uint8_t* weights, int stride, int32_t (*sums)[LANES]);
void release_matrices();

constexpr int UNPACKED_TOGETHER = 8;        // blocks: a matrix is not loaded right after it was stored
constexpr int MOST_KEPT = 160;              // blocks of a panel that is unpacked once for all tiles
constexpr int UNPACKED_BYTES = 32 * LANES;  // of a block
constexpr int PAIRS_AHEAD = 8;              // of blocks: what is fetched into the first-level cache meanwhile

// Vectors of outputs that share the broadcasts of activations.
template <Format FORMAT, int ROWS>
constexpr int vectors_of_tile() {
  int sums = FORMAT_TRAITS[FORMAT].bits == 8 ? BYTE_SUM_REGISTERS : 1;
  for (int v = PANEL / LANES; v > 1; v /= 2)
    if (v * (ROWS * (sums + FLOAT_SUM_REGISTERS) + 1) + OTHER_REGISTERS <= REGISTERS) return v;
  return 1;
}

constexpr int nibble_offset(int group, int output) {
  return 256 * (output / 16) + 64 * (group / 2) + 4 * (output % 16);
}

// The byte with the high bits of an even output and, above them, of the next one.
constexpr int fifth_bit_offset(int group, int output) { return 512 + 64 * (output / 16) + 8 * group + output % 16 / 2; }

template <Format FORMAT>
inline B load_codes(const uint8_t* block, int group, int output) {
  if (FORMAT_TRAITS[FORMAT].bits == 8) return load_bytes(block + 128 * group + 4 * output);
  B pair = load_bytes(block + nibble_offset(group, output));
  B codes = group % 2 ? high_nibbles(pair) : low_nibbles(pair);
  return FORMAT_TRAITS[FORMAT].bits == 5 ? add_fifth_bits(codes, block + fifth_bit_offset(group, output)) : codes;
}

// Codes of blocks first..end as bytes, [8 groups][LANES outputs][4 inputs] each.
template <Format FORMAT>
inline void unpack_codes(const uint8_t* panel, int first, int end, int output, uint8_t* bytes) {
  for (int b = first; b < end; b++)
    for (int group = 0; group < 8; group++, bytes += sizeof(B)) {
      B codes = load_codes<FORMAT>(panel + block_offset(FORMAT, b), group, output);
      __builtin_memcpy(bytes, &codes, sizeof codes);
    }
}

// The scales of outputs from `output` on, of the first or second half of a block in blocks of 16.
template <Format FORMAT>
inline F load_scales(const uint8_t* block, const uint8_t* header, int output, int half) {
  const uint8_t* scales = block + code_bytes(FORMAT);
  if (FORMAT_TRAITS[FORMAT].scales == OF_BLOCKS) return load_half(scales + 2 * output);
  F factor = load_half(header + 2 * output);
  if (FORMAT == INT8_K16) return mul(load_signed(scales + PANEL * half + output), factor);
  return mul(load_unsigned(scales + output), factor);
}

template <Format FORMAT>
inline F load_minima(const uint8_t* block, const uint8_t* header, int output) {
  const uint8_t* minima = block + code_bytes(FORMAT) + scale_bytes(FORMAT);
  if (FORMAT_TRAITS[FORMAT].scales == OF_BLOCKS) return load_half(minima + 2 * output);
  return mul(load_unsigned(minima + output), load_half(header + 2 * PANEL + 2 * output));
}

inline F pair_factors(const uint8_t* panel, int output) {
  return mul(load_half(panel + 2 * output), set(PAIR_FACTOR));
}

// One tile of ROWS rows by VECTORS * LANES outputs.
template <Format FORMAT, int ROWS, int VECTORS>
inline __attribute__((always_inline)) void tile_part(const uint8_t* panel, int blocks, Tile t, int output,
                                                     float (*y)[PANEL]) {
  constexpr FormatTraits TRAITS = FORMAT_TRAITS[FORMAT];
  constexpr int GROUPS = TRAITS.scale_of / 4;  // groups of 4 inputs that share a scale
  constexpr int MOST_GROUPS = TRAITS.bits == 8 ? BYTE_SUM_GROUPS : TRAITS.bits == 5 ? FIVE_BIT_GROUPS : 8;
  constexpr int PART = GROUPS < MOST_GROUPS ? GROUPS : MOST_GROUPS;  // groups of an integer sum
  constexpr int STRIDE = TRAITS.bits == 8 ? 4 * PANEL : 4 * LANES;   // between groups, in matrices
  F sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) sums[m][v] = set(0.0f);
  const uint8_t *block = panel, *header = panel;
  for (int b = 0; b < blocks; b++, block += block_bytes(FORMAT)) {
    if (TRAITS.scales == OF_SUPERBLOCKS && b % SUPERBLOCK == 0) header = block, block += header_bytes(FORMAT);
    for (int line = 0; line < t.lines; line++, t.next += 64) __builtin_prefetch(t.next, 0, 2);
    const uint8_t* weights = block + 4 * output;  // of matrices
    if constexpr (ROWS >= MATRIX_ROWS && TRAITS.bits < 8) {
      uint8_t* unpacked = t.unpacked + (t.kept ? b : b % UNPACKED_TOGETHER) * UNPACKED_BYTES;
      int end = b + UNPACKED_TOGETHER < blocks ? b + UNPACKED_TOGETHER : blocks;
      if (t.unpacks && b % UNPACKED_TOGETHER == 0) unpack_codes<FORMAT>(panel, b, end, output, unpacked);
      weights = unpacked;
    }
    I totals[ROWS][VECTORS];
#pragma GCC unroll 2
    for (int part = 0; part < 8 / PART; part++) {
      const int half = part * PART / GROUPS;
      const bool begins = part * PART % GROUPS == 0, ends = (part + 1) * PART % GROUPS == 0;
      const int32_t* zeros = TRAITS.scale_of == 16 ? t.half_zeros + half * ROWS : t.zeros;
      auto zero = [&](int m) { return TRAITS.zero && begins ? zeros[m] >> (8 - TRAITS.bits) : 0; };
      if constexpr (ROWS >= MATRIX_ROWS) {
        alignas(64) int32_t products[ROWS + 1][LANES];
        multiply_matrices(t.codes + TRAITS.scale_of * half, weights + STRIDE * GROUPS * half, STRIDE, products);
        for (int m = 0; m < ROWS; m++) totals[m][0] = add_int(load_int(products[m]), set_int(zero(m)));
      } else {
        std::conditional_t<TRAITS.bits == 8, ByteSum, NibbleSum> products[ROWS][VECTORS];
        for (int m = 0; m < ROWS; m++)
          for (int v = 0; v < VECTORS; v++) begin(products[m][v], zero(m));
#pragma GCC unroll 8
        for (int j = part * PART; j < (part + 1) * PART; j++) {
          B codes[VECTORS];
          for (int v = 0; v < VECTORS; v++) codes[v] = load_codes<FORMAT>(block, j, output + v * LANES);
#pragma GCC unroll 12
          for (int m = 0; m < ROWS; m++) {
            B a = set_group(t.codes + 4 * (j * ROWS + m));
            if (VECTORS > 1) keep(a);
            for (int v = 0; v < VECTORS; v++) add_products(products[m][v], codes[v], a);
          }
        }
        for (int m = 0; m < ROWS; m++)
          for (int v = 0; v < VECTORS; v++) {
            I total = read(products[m][v], zero(m));
            totals[m][v] = begins ? total : add_int(totals[m][v], total);
          }
      }
      for (int v = 0; v < VECTORS && ends; v++) {
        F scales = load_scales<FORMAT>(block, header, output + v * LANES, half);
        for (int m = 0; m < ROWS; m++)
          sums[m][v] = fma(to_float(totals[m][v]), mul(scales, set(t.scales[m])), sums[m][v]);
      }
    }
    if constexpr (TRAITS.minimum)
      for (int v = 0; v < VECTORS; v++) {
        F minima = load_minima<FORMAT>(block, header, output + v * LANES);
        for (int m = 0; m < ROWS; m++) sums[m][v] = fnma(minima, set(t.sums[m]), sums[m][v]);
      }
    t.codes += BLOCK * ROWS;
    t.scales += ROWS;
    t.sums += ROWS;
    t.zeros += ROWS;
    t.half_zeros += 2 * ROWS;
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(y[m] + output + v * LANES, sums[m][v]);
}

// The same for int4_pair. A pair of blocks adds an integer to each sum,
//     q1 * sum((c1 - 8) * a1) + q2 * sum((c2 - 8) * a2) - 16 * (m1 * sum(a1) + m2 * sum(a2)),
// with scales q and minima m in units of the output's factor.
template <int ROWS, int VECTORS>
inline __attribute__((always_inline)) void pair_part(const uint8_t* panel, int blocks, Tile t, int output,
                                                     float (*y)[PANEL]) {
  F sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) sums[m][v] = set(0.0f);
  const uint8_t* pair = panel + header_bytes(INT4_PAIR);
  for (int b = 0; b < blocks; b += 2, pair += PAIR_BYTES) {
    for (int line = 0; line < 2 * t.lines; line++, t.next += 64) __builtin_prefetch(t.next, 0, 2);
    if (t.lines && !output)
      for (int at = 0; at < PAIR_BYTES; at += 64) __builtin_prefetch(pair + PAIRS_AHEAD * PAIR_BYTES + at, 0, 3);
    PairSum products[ROWS][VECTORS];
    if constexpr (ROWS >= MATRIX_ROWS) {
      uint8_t* unpacked = t.unpacked + (t.kept ? b : b % UNPACKED_TOGETHER) * UNPACKED_BYTES;
      int end = b + UNPACKED_TOGETHER < blocks ? b + UNPACKED_TOGETHER : blocks;
      if (t.unpacks && b % UNPACKED_TOGETHER == 0) unpack_codes<INT4_PAIR>(panel, b, end, output, unpacked);
      alignas(64) int32_t found[2][ROWS + 1][LANES];
      for (int i = 0; i < 2; i++)
        multiply_matrices(t.codes + i * BLOCK * ROWS, unpacked + i * UNPACKED_BYTES, 4 * LANES, found[i]);
      for (int m = 0; m < ROWS; m++)
        products[m][0] = pair_sum(load_int(found[0][m]), load_int(found[1][m]), t.pairs + 3 * m);
    } else {
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++) begin_first(products[m][v], t.pairs[3 * m]);
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        if (i == 1)
          for (int m = 0; m < ROWS; m++)
            for (int v = 0; v < VECTORS; v++) begin_second(products[m][v], t.pairs[3 * m + 1]);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
          B codes[VECTORS];
          for (int v = 0; v < VECTORS; v++)
            codes[v] = load_codes<INT4_PAIR>(pair + i * code_bytes(INT4_PAIR), j, output + v * LANES);
#pragma GCC unroll 12
          for (int m = 0; m < ROWS; m++) {
            B a = set_group(t.codes + i * BLOCK * ROWS + 4 * (j * ROWS + m));
            if (VECTORS > 1) keep(a);
            for (int v = 0; v < VECTORS; v++) add_products(products[m][v], codes[v], a);
          }
        }
      }
    }
    for (int v = 0; v < VECTORS; v++) {
      PairScales scales = load_pair_scales(pair + PAIR_SCALES + 2 * (output + v * LANES), 2 * PANEL);
      for (int m = 0; m < ROWS; m++)
        sums[m][v] = fma(to_float(total(products[m][v], scales, t.pairs[3 * m + 2])), set(t.scales[m]), sums[m][v]);
    }
    t.codes += 2 * BLOCK * ROWS, t.scales += 2 * ROWS, t.pairs += 3 * ROWS;
  }
  for (int v = 0; v < VECTORS; v++) {
    F factors = pair_factors(panel, output + v * LANES);
    for (int m = 0; m < ROWS; m++) store(y[m] + output + v * LANES, mul(sums[m][v], factors));
  }
}

template <Format FORMAT, int ROWS>
void tile_of(const uint8_t* panel, int blocks, Tile& t, float (*y)[PANEL]) {
  constexpr int VECTORS = vectors_of_tile<FORMAT, ROWS>();
  constexpr int PARTS = PANEL / (VECTORS * LANES);
  t.lines = (t.lines + PARTS - 1) / PARTS;
  for (int part = 0; part < PARTS; part++, t.next += 64 * t.lines * blocks) {
    if constexpr (FORMAT == INT4_PAIR)
      pair_part<ROWS, VECTORS>(panel, blocks, t, part * VECTORS * LANES, y);
    else
      tile_part<FORMAT, ROWS, VECTORS>(panel, blocks, t, part * VECTORS * LANES, y);
    if (ROWS >= MATRIX_ROWS) t.unpacked += t.kept * UNPACKED_BYTES;
  }
}

// Bias, addend, activation, cap and residual of one row, then the row's outputs of this panel go to y.
inline void finish_row(const Product& p, const float* sums, int panel, int row) {
  float t[PANEL];
  int count = p.outputs - panel * PANEL < PANEL ? p.outputs - panel * PANEL : PANEL;
  const float* bias = p.bias ? p.bias + panel * PANEL : nullptr;
  float padded[PANEL] = {};
  if (bias && count < PANEL) __builtin_memcpy(padded, bias, count * sizeof(float)), bias = padded;
  const float* addend = p.addends ? p.addends[row] : nullptr;
  if (addend) addend += p.first_addend + panel * PANEL;
  for (int k = 0; k < PANEL; k += LANES) {
    F v = load(sums + k);
    if (bias) v = add(v, load(bias + k));
    if (addend) v = add(v, load(addend + k));
    store(t + k, p.gated && k >= PANEL / 2 ? v : activated(p.activation, v));
  }
  int width = p.gated ? PANEL / 2 : PANEL;
  if (p.gated) {
    count /= 2;
    for (int k = 0; k < width; k += LANES) store(t + k, mul(load(t + k), load(t + PANEL / 2 + k)));
  }
  if (p.cap != 0.0f)
    for (int k = 0; k < width; k += LANES) store(t + k, mul(set(p.cap), tanh(div(load(t + k), set(p.cap)))));
  int64_t at = row * p.stride + int64_t(panel) * width;
  for (int k = 0; k < count; k++) p.y[at + k] = p.residual ? t[k] + p.residual[at + k] : t[k];
}

// With many rows, as many tiles as fit into the second-level cache are multiplied by all panels before the next ones.
// From FETCH_ROWS on, the next panel is fetched meanwhile; of int4_pair, what lies PAIR_AHEAD bytes ahead, and what is
// PAIRS_AHEAD pairs ahead into the first-level cache. With fewer rows the processor's own prefetching is better.
constexpr int64_t CACHED_CODES = 384 << 10, PAIR_AHEAD = 32 << 10;

template <Format FORMAT>
void product_of(const Product& p, const RoundedRows& r, int first, int end) {
  constexpr int MOST = FORMAT_TRAITS[FORMAT].bits == 8 ? TILE_ROWS_8 : TILE_ROWS_4;
  int blocks = r.inputs / BLOCK;
  int64_t size = panel_bytes(FORMAT, r.inputs);
  int64_t tile_codes = int64_t(r.inputs) * (r.rows / r.tiles + 1);
  int group = int(CACHED_CODES / tile_codes > 1 ? CACHED_CODES / tile_codes : 1);
  int shared = 64 * (group < r.tiles ? group : r.tiles), lines = (block_bytes(FORMAT) + shared - 1) / shared;
  if (r.rows < FETCH_ROWS[FORMAT_TRAITS[FORMAT].bits < 8]) lines = 0;
  float y[MOST][PANEL];
  constexpr bool MATRICES = MOST >= MATRIX_ROWS, UNPACKS = MATRICES && FORMAT_TRAITS[FORMAT].bits < 8;
  alignas(UNPACKS ? 64 : 1) uint8_t unpacked[UNPACKS ? PANEL / LANES * MOST_KEPT * UNPACKED_BYTES : 1];
  int kept = group > 1 && r.tiles > 1 && blocks <= MOST_KEPT ? blocks : 0;
  int most_rows = r.rows - tile_begin(r, r.tiles - 1);  // others also load the next row, for nothing
  if constexpr (MATRICES)
    if (most_rows >= MATRIX_ROWS) configure_matrices(most_rows, FORMAT_TRAITS[FORMAT].scale_of);
  for (int start = 0; start < r.tiles; start += group)
    for (int panel = first; panel < end; panel++) {
      const uint8_t* weights = p.weights + panel * size;
      Tile t = {};
      t.next = weights + (FORMAT == INT4_PAIR ? PAIR_AHEAD : size);
      for (int tile = start; tile < r.tiles && tile < start + group; tile++) {
        int row = tile_begin(r, tile), rows = tile_begin(r, tile + 1) - row;
        int64_t at = int64_t(row) * blocks;
        t.codes = r.codes + int64_t(row) * r.inputs, t.scales = r.scales + at, t.sums = r.sums + at;
        t.zeros = r.zeros + at, t.half_zeros = r.half_zeros + 2 * at, t.lines = lines;
        t.pairs = r.pairs + at / 2 * 3;
        if (UNPACKS) t.unpacked = unpacked, t.kept = kept, t.unpacks = !kept || tile == start;
        with_constant(Below<MOST>(), rows - 1, [&](auto i) { tile_of<FORMAT, i + 1>(weights, blocks, t, y); });
        for (int m = 0; m < rows; m++) finish_row(p, y[m], panel, row + m);
      }
    }
  if constexpr (MATRICES) release_matrices();
}

template <Format FORMAT>
void unpack_row_of(const uint8_t* weights, int inputs, int64_t row, float factor, float* y) {
  constexpr FormatTraits TRAITS = FORMAT_TRAITS[FORMAT];
  const uint8_t* panel = weights + row / PANEL * panel_bytes(FORMAT, inputs);
  int output = int(row % PANEL), vector = output / LANES * LANES, lane = output % LANES;
  float factors[LANES];
  store(factors, FORMAT == INT4_PAIR ? mul(pair_factors(panel, vector), set(factor)) : set(factor));
  for (int b = 0; b < inputs / BLOCK; b++) {
    const uint8_t* block = panel + block_offset(FORMAT, b);
    int first = TRAITS.scales == OF_SUPERBLOCKS ? b / SUPERBLOCK * SUPERBLOCK : 0;
    const uint8_t* header = panel + block_offset(FORMAT, first) - header_bytes(FORMAT);
    for (int group = 0; group < 8; group++) {
      float scales[LANES], minima[LANES] = {};
      if constexpr (FORMAT == INT4_PAIR) {
        const uint8_t* at = panel + block_offset(FORMAT, b / 2 * 2) + PAIR_SCALES + 2 * output + (b + 1) % 2;
        scales[lane] = at[0], minima[lane] = float(MINIMUM_UNIT * int8_t(at[PAIR_MINIMA - PAIR_SCALES]));
      } else {
        store(scales, load_scales<FORMAT>(block, header, vector, TRAITS.scale_of == 16 ? group / 4 : 0));
        if constexpr (TRAITS.minimum) store(minima, load_minima<FORMAT>(block, header, vector));
      }
      const uint8_t *bytes = block + 128 * group + 4 * output, *pair = block + nibble_offset(group, output);
      int fifths = TRAITS.bits == 5 ? block[fifth_bit_offset(group, output)] >> output % 2 * 4 : 0;
      for (int i = 0; i < 4; i++) {
        int code = TRAITS.bits == 8 ? bytes[i] : (pair[i] >> group % 2 * 4 & 15) + (fifths >> i & 1) * 16;
        *y++ = __builtin_fmaf(float(code - TRAITS.zero), scales[lane], -minima[lane]) * factors[lane];
      }
    }
  }
}

inline void product(const Product& p, const RoundedRows& r, int first, int end) {
  with_constant(Below<FORMATS>(), p.format, [&](auto n) { product_of<Format(+n)>(p, r, first, end); });
}

inline void unpack_row(Format f, const uint8_t* weights, int inputs, int64_t row, float factor, float* y) {
  with_constant(Below<FORMATS>(), f, [&](auto n) { unpack_row_of<Format(+n)>(weights, inputs, row, factor, y); });
}

}  // namespace spaceport::SPACEPORT_SET
