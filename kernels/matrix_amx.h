// AMX: one instruction multiplies two matrices of bytes, in registers that hold up to 16 rows of 64 bytes.
//
//     sums [rows][16 outputs] = codes [rows][inputs] * weights [inputs / 4][16 outputs][4]
//
// Tests put plain C++ in place of these functions; they never ran on a processor with AMX. MATRIX_ROWS is an estimate.
// Not by intrinsics: with those of GCC 12, stores may move behind the loads of matrices that read what they wrote.
#pragma once
#include <cstdint>

namespace spaceport::SPACEPORT_SET {

// Each thread has sizes of its own: rows of a tile, 32 inputs or 16.
inline void configure_matrices(int rows, int inputs) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } sizes = {1, 0, {}, {64, uint16_t(inputs), 64}, {uint8_t(rows), uint8_t(rows), uint8_t(inputs / 4)}};
  asm volatile("ldtilecfg %0" ::"m"(sizes));
}

// Rows of codes are BLOCK bytes apart, groups of weights `stride`.
inline void multiply_matrices(const int8_t* codes, const uint8_t* weights, int stride, int32_t (*sums)[LANES]) {
  asm volatile(
      "tileloadd (%0, %1, 1), %%tmm1\n\t"
      "tileloadd (%2, %3, 1), %%tmm2\n\t"
      "tilezero %%tmm0\n\t"
      "tdpbsud %%tmm2, %%tmm1, %%tmm0\n\t"  // signed by unsigned bytes
      "tilestored %%tmm0, (%4, %5, 1)" ::"r"(codes),
      "r"(int64_t(BLOCK)), "r"(weights), "r"(int64_t(stride)), "r"(sums), "r"(int64_t(sizeof *sums))
      : "memory");
}

// Threads with configured matrices keep 8 KB more when they are interrupted.
inline void release_matrices() { asm volatile("tilerelease"); }

}  // namespace spaceport::SPACEPORT_SET
