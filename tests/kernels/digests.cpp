// Prints a digest of what every kernel of the chosen instruction set computes from seeded inputs, one line for each.
// Sets that compute the same bytes print the same lines, also on processors of another kind.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "choose.h"
#include "scratch.h"

using namespace spaceport;

namespace {

uint64_t state = 1;

uint32_t random_bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return uint32_t(state >> 33);
}

template <class T>
T* take(size_t count) {
  return static_cast<T*>(calloc(count, sizeof(T)));  // freed when the program ends
}

float* numbers(size_t count, float scale) {
  float* p = take<float>(count);
  for (size_t i = 0; i < count; i++) p[i] = float(int(random_bits() & 0xFFFF) - 0x8000) / 0x4000 * scale;
  return p;
}

// Random codes; float16 numbers of 2^-6 to 2^-4 wherever a block has some.
uint8_t* weights(Format format, int outputs, int inputs) {
  size_t count = size_t(packed_bytes(format, outputs, inputs));
  uint8_t* p = take<uint8_t>(count);
  for (size_t i = 0; i < count; i++) p[i] = uint8_t(random_bits());
  auto halves = [](uint8_t* at, int bytes) {
    for (int i = 1; i < bytes; i += 2) at[i] = uint8_t(0x24 + (at[i] & 7));
  };
  for (int panel = 0; panel < panels(outputs); panel++)
    for (int b = 0; b < inputs / BLOCK; b++) {
      uint8_t* block = p + panel * panel_bytes(format, inputs) + block_offset(format, b);
      Scales scales = FORMAT_TRAITS[format].scales;
      if (scales == OF_BLOCKS)
        halves(block + code_bytes(format), block_bytes(format) - code_bytes(format));
      else if (scales == OF_SUPERBLOCKS ? b % SUPERBLOCK == 0 : b == 0)
        halves(block - header_bytes(format), header_bytes(format));
    }
  return p;
}

void print(const char* name, int a, int b, const void* data, size_t bytes) {
  uint64_t digest = 14695981039346656037u;
  for (size_t i = 0; i < bytes; i++) digest = (digest ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  printf("%s %d %d %016llx\n", name, a, b, (unsigned long long)digest);
}

void products(const Kernels& kernels, Format format, int rows, Norm norm, Activation activation) {
  constexpr int inputs = 512, outputs = 80;
  int most = kernels.tile_rows[FORMAT_TRAITS[format].bits < 8], tiles = (rows + most - 1) / most;
  size_t blocks = size_t(rows) * inputs / BLOCK;
  int together = format == INT4_PAIR ? 2 : 1;
  RoundedRows r = {rows, inputs, tiles, together, take<int8_t>(size_t(rows) * inputs)};
  r.scales = take<float>(blocks), r.sums = take<float>(blocks), r.zeros = take<int32_t>(blocks);
  r.half_zeros = take<int32_t>(2 * blocks), r.pairs = take<int32_t>(2 * blocks);
  const float** x = take<const float*>(size_t(rows));
  for (int i = 0; i < rows; i++) x[i] = numbers(inputs, 1.0f + float(i));
  NormOf of = {norm, numbers(inputs, 1.0f), norm == LAYER_NORM ? numbers(inputs, 1.0f) : nullptr, 1e-5f};
  float* temporary = take<float>(inputs);
  for (int tile = 0; tile < tiles; tile++) kernels.round_tile(r, tile, x, of, temporary);
  bool gated = activation != NO_ACTIVATION;
  float* y = take<float>(size_t(rows) * outputs);
  Product p = {weights(format, outputs, inputs), format, gated ? 64 : outputs, numbers(outputs, 1.0f), activation, gated};
  p.residual = gated ? nullptr : numbers(size_t(rows) * outputs, 1.0f), p.y = y, p.stride = outputs;
  p.cap = norm == NO_NORM ? 30.0f : 0.0f;
  const float** addends = take<const float*>(size_t(rows));
  for (int i = 0; i < rows; i += 2) addends[i] = numbers(outputs + 3 + PANEL, 1.0f);
  p.addends = addends, p.first_addend = 3;
  kernels.product(p, r, 0, int(panels(p.outputs)));
  print(FORMAT_TRAITS[format].name, rows, int(norm), y, size_t(rows) * outputs * sizeof(float));
  float* row = take<float>(inputs);
  kernels.unpack_row(format, p.weights, inputs, 45, 1.5f, row);
  print("row", int(format), rows, row, inputs * sizeof(float));
}

void attention(const Kernels& kernels, int rows, int size, int seen, bool all) {
  int heads = 6, kv_heads = 2, slots = seen + 5;
  size_t cells = size_t(kv_heads) * slots;
  Attention a = {};
  a.rows = rows, a.heads = heads;
  a.qkv = numbers(size_t(rows) * (heads + 2 * kv_heads) * size, 1.0f);
  a.rotated = all ? size / 2 : size, a.interleaved = all;
  a.cos = numbers(size_t(rows) * size, 0.5f), a.sin = numbers(size_t(rows) * size, 0.5f);
  if (all) a.q_gain = numbers(size, 1.0f), a.k_gain = numbers(size, 1.0f), a.sinks = numbers(heads, 1.0f), a.cap = 3.0f;
  a.epsilon = 1e-6f, a.scale = 0.2f;
  int64_t* into = take<int64_t>(rows);
  for (int i = 0; i < rows; i++) into[i] = (i * 7) % seen;
  uint8_t* visible = take<uint8_t>(size_t(rows) * seen);
  for (int i = 0; i < rows * seen; i++) visible[i] = random_bits() & 1;
  a.slots = into, a.visible = visible, a.seen = seen;
  a.cache = {take<int8_t>(cells * size), take<int8_t>(cells * size), take<float>(2 * cells), 1, kv_heads, slots, size};
  for (size_t i = 0; i < cells * size; i++) a.cache.keys[i] = int8_t(random_bits()), a.cache.values[i] = int8_t(random_bits());
  for (size_t i = 0; i < 2 * cells; i++) a.cache.scales[i] = float(random_bits() & 255) / 8192;
  a.y = take<float>(size_t(rows) * heads * size);
  int count = (seen + SLOT_BLOCK - 1) / SLOT_BLOCK;
  int32_t* blocks = take<int32_t>(count);
  for (int i = 0; i < count; i++) blocks[i] = i;
  AttentionGroup group = {0, 0, rows, blocks, count};
  Scratch scratch(kernels.attend_scratch(a, group));
  for (int h = 0; h < kv_heads; h++) kernels.store(a, 0, h);
  for (int h = 0; h < kv_heads; h++) kernels.attend(a, group, h, scratch.data());
  print("attention", rows, size, a.y, size_t(rows) * heads * size * sizeof(float));
  print("keys", rows, size, a.cache.keys, cells * size);
  print("scales", rows, size, a.cache.scales, 2 * cells * sizeof(float));
}

}  // namespace

int main() {
  char message[256];
  const Kernels* kernels = choose_kernels(message, sizeof message);
  if (!kernels) return fprintf(stderr, "%s\n", message), 1;
  for (int format = 0; format < FORMATS; format++)
    for (int rows : {1, 2, 5, 6, 8, 9, 16, 17, 20, 40}) products(*kernels, Format(format), rows, Norm(rows % 3), Activation(rows % 4));
  for (int size : {8, 24, 64, 80, 128, 256})
    for (int rows : {1, 3, 8}) attention(*kernels, rows, size, 40 * rows, rows == 3);
  attention(*kernels, 2, 64, 1100, false);
}
