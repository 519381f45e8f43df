// Packed weights: what their bytes mean, for all instruction sets.
//
// A matrix of `outputs` x `inputs` weights is stored as panels of 32 outputs, a panel as blocks of 32 inputs.
// A block holds the unsigned codes of its 32 x 32 weights and, for each output, a scale and often a minimum.
// Codes lie as a multiply-add of bytes wants them: the four inputs 4j..4j+3 of an output are adjacent bytes.
// Outputs after the last one are padded with zero weights; `inputs` is a multiple of 32, of 256 with superblocks.
//
//     weight = scale * (code - zero) - minimum
//
// 8-bit codes: [8 groups of 4 inputs][32 outputs][4 inputs], 1024 bytes.
// 4-bit codes: [2 halves of 16 outputs][4 pairs of groups][16 outputs][4 inputs], 512 bytes; the even group of a pair
// is in the low nibbles.
// 5-bit codes: their low 4 bits as those of 4-bit codes, then [2 halves of 16 outputs][8 groups] words of 64 bits with
// the high bits of [16 outputs][4 inputs], the first in the lowest bit, 640 bytes.
// Behind the codes: 32 scales, then 32 minima if there are any, float16 each.
// Superblocks of 256 inputs begin with 32 float16 factors of scales, then 32 of minima; the scales and minima of their
// blocks are bytes that these multiply.
#pragma once
#include <cstddef>
#include <cstdint>

namespace spaceport {

constexpr int BLOCK = 32;      // inputs of a block, and of one scale of the rounded activations
constexpr int PANEL = 32;      // outputs of a panel
constexpr int SUPERBLOCK = 8;  // blocks of a superblock
constexpr int MAX_INPUTS = 1 << 17;

enum Format { INT4, INT4_K, INT5, INT5_MINIMUM, INT5_K, INT8, INT8_K16, FORMATS };

struct FormatTraits {
  const char* name;
  int bits;      // of a code
  int zero;      // code of weight 0, before the minimum is subtracted: 0 or 2^(bits - 1)
  bool minimum;  // blocks have minima
  bool super;    // scales and minima are bytes within superblocks
  int scale_of;  // inputs that share a scale: 32 or 16
};

constexpr FormatTraits FORMAT_TRAITS[FORMATS] = {
    {"int4", 4, 0, true, false, 32},        // GGUF: Q4_0, Q4_1
    {"int4_k", 4, 0, true, true, 32},       // Q4_K
    {"int5", 5, 16, false, false, 32},      // Q5_0
    {"int5_min", 5, 0, true, false, 32},    // Q5_1
    {"int5_k", 5, 0, true, true, 32},       // Q5_K
    {"int8", 8, 128, false, false, 32},     // Q8_0
    {"int8_k16", 8, 128, false, true, 16},  // Q6_K; scales are signed bytes
};

constexpr int code_bytes(int format) { return FORMAT_TRAITS[format].bits * BLOCK * PANEL / 8; }

constexpr int scale_bytes(int format) {
  return PANEL * (BLOCK / FORMAT_TRAITS[format].scale_of) * (FORMAT_TRAITS[format].super ? 1 : 2);
}

constexpr int block_bytes(int format) {
  return code_bytes(format) + scale_bytes(format) * (FORMAT_TRAITS[format].minimum ? 2 : 1);
}

constexpr int header_bytes(int format) {
  const FormatTraits& t = FORMAT_TRAITS[format];
  return !t.super ? 0 : t.minimum ? 4 * PANEL : 2 * PANEL;
}

constexpr int64_t panel_bytes(int format, int64_t inputs) {
  int64_t blocks = inputs / BLOCK;
  return blocks * block_bytes(format) + blocks / SUPERBLOCK * header_bytes(format);
}

constexpr int64_t panels(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

constexpr int64_t packed_bytes(int format, int64_t outputs, int64_t inputs) {
  return panels(outputs) * panel_bytes(format, inputs);
}

// Where a block begins within its panel.
constexpr int64_t block_offset(int format, int64_t block) {
  return block * block_bytes(format) + (block / SUPERBLOCK + 1) * header_bytes(format);
}

}  // namespace spaceport
