// The functions of matrix_amx.h in plain C++, which also check what the instructions would refuse.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace spaceport::SPACEPORT_SET {

// As the instruction `ldtilecfg` reads them: sums, codes and weights.
struct MatrixSizes {
  int rows[3], row_bytes[3];
};

static thread_local MatrixSizes sizes = {};

inline void configure_matrices(int rows, int inputs) { sizes = {{rows, rows, inputs / 4}, {64, inputs, 64}}; }

inline void release_matrices() { sizes = {}; }

// Rows of a register; bytes that are not loaded are 0.
inline void load_matrix(int matrix, const void* from, int64_t stride, uint8_t (*to)[64]) {
  memset(to, 0, 16 * 64);
  for (int i = 0; i < sizes.rows[matrix]; i++)
    memcpy(to[i], static_cast<const uint8_t*>(from) + i * stride, size_t(sizes.row_bytes[matrix]));
}

inline void multiply_matrices(const int8_t* codes, const uint8_t* weights, int stride, int32_t (*sums)[LANES]) {
  int rows = sizes.rows[0], groups = sizes.rows[2];
  if (rows < 1 || rows > 16 || groups < 1 || groups > 16 || sizes.row_bytes[1] != 4 * groups) abort();
  uint8_t a[16][64], b[16][64];
  load_matrix(1, codes, BLOCK, a);
  load_matrix(2, weights, stride, b);
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < 16; n++) {
      int32_t sum = 0;
      for (int k = 0; k < groups; k++)
        for (int i = 0; i < 4; i++) sum += int8_t(a[m][4 * k + i]) * b[k][4 * n + i];
      sums[m][n] = sum;
    }
}

}  // namespace spaceport::SPACEPORT_SET
