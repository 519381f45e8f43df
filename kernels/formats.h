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
// Two blocks of int4_pair lie together: codes of the first and the second, then for each output the scales of the
// second and of the first block, unsigned bytes, then likewise 16ths of their minima, signed ones. The panel begins
// with 32 float16 numbers, 4096 times the factors that multiply all scales and minima of an output. Its rounded
// activations have one scale for both blocks, so that what is added up for these is an integer.
#pragma once
#include <cstddef>
#include <cstdint>

namespace spaceport {

constexpr int BLOCK = 32;      // inputs of a block, and of one scale of the rounded activations
constexpr int PANEL = 32;      // outputs of a panel
constexpr int SUPERBLOCK = 8;  // blocks of a superblock
constexpr int MAX_INPUTS = 1 << 17;
constexpr float PAIR_FACTOR = 1.0f / 4096;  // of a float16 number
constexpr int MINIMUM_UNIT = 16;            // of a byte

enum Format { INT4, INT4_K, INT4_PAIR, INT5, INT5_MINIMUM, INT5_K, INT8, INT8_K16, FORMATS };
enum Scales { OF_BLOCKS, OF_SUPERBLOCKS, OF_PAIRS };

struct FormatTraits {
  const char* name;
  int bits;       // of a code
  int zero;       // code of weight 0, before the minimum is subtracted: 0 or 2^(bits - 1)
  bool minimum;   // blocks have minima
  Scales scales;  // float16 numbers of blocks, or bytes
  int scale_of;   // inputs that share a scale: 32 or 16
};

constexpr FormatTraits FORMAT_TRAITS[FORMATS] = {
    {"int4", 4, 0, true, OF_BLOCKS, 32},              // GGUF: Q4_0, Q4_1
    {"int4_k", 4, 0, true, OF_SUPERBLOCKS, 32},       // Q4_K
    {"int4_pair", 4, 8, true, OF_PAIRS, 32},          // rounded by the export
    {"int5", 5, 16, false, OF_BLOCKS, 32},            // Q5_0
    {"int5_min", 5, 0, true, OF_BLOCKS, 32},          // Q5_1
    {"int5_k", 5, 0, true, OF_SUPERBLOCKS, 32},       // Q5_K
    {"int8", 8, 128, false, OF_BLOCKS, 32},           // Q8_0
    {"int8_k16", 8, 128, false, OF_SUPERBLOCKS, 16},  // Q6_K; scales are signed bytes
};

constexpr int code_bytes(int format) { return FORMAT_TRAITS[format].bits * BLOCK * PANEL / 8; }

constexpr int scale_bytes(int format) {
  return PANEL * (BLOCK / FORMAT_TRAITS[format].scale_of) * (FORMAT_TRAITS[format].scales == OF_BLOCKS ? 2 : 1);
}

constexpr int block_bytes(int format) {
  return code_bytes(format) + scale_bytes(format) * (FORMAT_TRAITS[format].minimum ? 2 : 1);
}

constexpr int header_bytes(int format) {
  const FormatTraits& t = FORMAT_TRAITS[format];
  return t.scales == OF_BLOCKS ? 0 : t.scales == OF_SUPERBLOCKS && t.minimum ? 4 * PANEL : 2 * PANEL;
}

// How many headers the first `blocks` blocks of a panel have among them.
constexpr int64_t headers(int format, int64_t blocks) {
  return FORMAT_TRAITS[format].scales == OF_SUPERBLOCKS ? (blocks + SUPERBLOCK - 1) / SUPERBLOCK : 1;
}

constexpr int64_t panel_bytes(int format, int64_t inputs) {
  int64_t blocks = inputs / BLOCK;
  return blocks * block_bytes(format) + headers(format, blocks) * header_bytes(format);
}

constexpr int64_t panels(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

constexpr int64_t packed_bytes(int format, int64_t outputs, int64_t inputs) {
  return panels(outputs) * panel_bytes(format, inputs);
}

constexpr int PAIR_SCALES = 2 * code_bytes(INT4_PAIR), PAIR_MINIMA = PAIR_SCALES + 2 * PANEL;  // within a pair
constexpr int PAIR_BYTES = PAIR_MINIMA + 2 * PANEL;

// Where the codes of a block begin within its panel.
constexpr int64_t block_offset(int format, int64_t block) {
  if (format == INT4_PAIR) return header_bytes(format) + block / 2 * PAIR_BYTES + block % 2 * code_bytes(format);
  return block * block_bytes(format) + headers(format, block + 1) * header_bytes(format);
}

}  // namespace spaceport
