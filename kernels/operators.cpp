// The operators of a decoder layer as custom operators of ONNX Runtime: checks, scratch memory and threads.
//
// Rounding is the beginning of each product, so a layer is five nodes: NormProduct (q, k, v), Attend, AddProduct,
// GateProduct, AddProduct. Embed and Head are the first and the last.
#include "call.h"
#include "choose.h"
#include "visible_blocks.h"

#include <algorithm>
#include <new>

#if defined(_WIN32)
#define SPACEPORT_EXPORT extern "C" __declspec(dllexport)
#else
#define SPACEPORT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace spaceport {

const OrtFunctions* ort = nullptr;

namespace {

// The newest version of the operators' domain that a graph may import. The runtime does not compare them:
// native_library.py does, and has the same number.
constexpr int VERSION = 2;

const Kernels* chosen = nullptr;  // of sessions that are opened from now on

// A part of an operator that takes less than about 5 us is not worth a second thread: it takes 1 to 2 us to wake one.
// A block of weights takes 7 ns for each row, and 32 ns at least, because it must be read (Zen 4, AVX512-VNNI).
constexpr int64_t BLOCK_ROW_NS = 7, BLOCK_READ_NS = 32, LEAST_PART_NS = 5000;
constexpr int64_t MOST_PARTS = 64;
constexpr int PARALLEL_ROUNDING_ROWS = 16;

const char* const NORMS[] = {"none", "rms", "layer"};
const char* const ACTIVATIONS[] = {"none", "silu", "gelu", "gelu_tanh"};
const char* const FORMAT_NAMES[] = {"int4", "int4_k", "int4_pair", "int5", "int5_min", "int5_k", "int8", "int8_k16"};
constexpr int MOST_OUTPUTS = 1 << 24;

struct NormAttributes {
  Norm kind = NO_NORM;
  float epsilon = 0.0f;

  void read(Attributes& a) {
    kind = Norm(a.choice("norm", NORMS, 3));
    epsilon = a.number("epsilon");
  }

  NormOf inputs(Call& call, int gain, int bias, int64_t width) const {
    if (kind == NO_NORM) return {kind, nullptr, nullptr, epsilon};
    return {kind, call.vector(gain, width), call.vector(bias, width), epsilon};
  }
};

Format read_format(Attributes& a, const char* name) { return Format(a.choice(name, FORMAT_NAMES, FORMATS)); }

// Rounds rows, then multiplies them by one or several matrices, whose outputs are columns of the same rows.
void multiply(Call& call, const Kernels& kernels, const float* const* rows, int row_count, int inputs,
              const NormOf& norm, Product* products, int product_count) {
  if (call.failed()) return;
  int most = row_count, together = 1;
  for (int i = 0; i < product_count; i++) {
    if (products[i].format == INT4_PAIR) together = 2;
    most = std::min(most, kernels.tile_rows[FORMAT_TRAITS[products[i].format].bits < 8]);
  }
  int tiles = (row_count + most - 1) / most;
  int64_t count = row_count, blocks = inputs / BLOCK;
  bool alone = row_count < PARALLEL_ROUNDING_ROWS;
  int64_t temporaries = norm.kind == NO_NORM ? 0 : alone ? 1 : tiles;
  int64_t bytes = count * inputs + count * blocks * 26 + temporaries * inputs * 4 + 8 * 64;
  Scratch scratch((size_t(bytes)));
  if (scratch.failed()) return call.out_of_memory();
  uint8_t* at = scratch.data();
  RoundedRows rounded = {};
  rounded.rows = row_count, rounded.inputs = inputs, rounded.tiles = tiles, rounded.together = together;
  rounded.codes = (int8_t*)take(at, count * inputs);
  for (float** p : {&rounded.scales, &rounded.sums}) *p = (float*)take(at, count * blocks * 4);
  rounded.zeros = (int32_t*)take(at, count * blocks * 4);
  rounded.half_zeros = (int32_t*)take(at, count * blocks * 8);
  rounded.pairs = (int32_t*)take(at, count * blocks * 6);
  float* temporary = (float*)take(at, temporaries * inputs * 4);
  auto round = [&](int tile) {
    kernels.round_tile(rounded, tile, rows, norm, temporary + (alone ? 0 : int64_t(tile) * inputs));
  };
  call.parallel(tiles, round, alone);

  int64_t all_panels = 0;
  for (int i = 0; i < product_count; i++) all_panels += panels(products[i].outputs);
  int64_t row_ns = std::max(count * BLOCK_ROW_NS, BLOCK_READ_NS);
  int64_t parts = std::min({all_panels * blocks * row_ns / LEAST_PART_NS, all_panels, MOST_PARTS});
  parts -= parts % (parts < 4 ? 2 : 4);  // two or four threads have as much each
  parts = std::max(parts, int64_t(1));
  auto compute = [&](int part) {
    int64_t first = all_panels * part / parts, end = all_panels * (part + 1) / parts;
    for (int i = 0; i < product_count; i++) {
      int64_t own = panels(products[i].outputs);
      if (first < own && end > 0)
        kernels.product(products[i], rounded, int(first > 0 ? first : 0), int(end < own ? end : own));
      first -= own, end -= own;
    }
  };
  call.parallel(int(parts), compute);
}

// A low-rank adapter of some rows of a call: up * down * row is added to their products, before the activation. Other
// rows have the bytes that they have without one. An operator has its three inputs behind all others.
struct Adapter {
  long long rank = 0;  // 0: none

  // As multiply above; from `input` on are the indices of the adapted rows, `down` and `up`.
  void multiply(Call& call, const Kernels& kernels, int input, const float* const* rows, int row_count, int inputs,
                const NormOf& norm, Product* products, int product_count) const {
    Tensor adapted = call.input(input, ORT_INT64);
    long long count = adapted.data ? adapted.count() : 0, outputs = 0;
    for (int i = 0; i < product_count; i++) outputs += products[i].outputs;
    const uint8_t* down = rank ? call.weights(input + 1, INT8, rank, inputs) : nullptr;
    const uint8_t* up = rank ? call.weights(input + 2, INT8, outputs, rank) : nullptr;
    if (call.failed()) return;
    if ((adapted.data || adapted.rank) != (rank > 0))
      return call.fail("input adapted is %s with an adapter of rank %lld", rank ? "absent" : "there", rank);
    if (!count) return spaceport::multiply(call, kernels, rows, row_count, inputs, norm, products, product_count);
    if (count > MOST_ROWS) return call.fail("input adapted has %lld rows, expected at most %d", count, MOST_ROWS);
    // A panel more than the sums, so that the last one can be read whole.
    Scratch memory(size_t(2 * count + row_count) * sizeof(float*) + size_t(count * (rank + outputs) + PANEL) * 4);
    if (memory.failed()) return call.out_of_memory();
    const float **own = reinterpret_cast<const float**>(memory.data()), **middle = own + count;
    const float** addends = middle + count;
    float *low = reinterpret_cast<float*>(addends + row_count), *sums = low + count * rank;
    for (int i = 0; i < row_count; i++) addends[i] = nullptr;
    for (long long i = 0; i < count; i++) {
      long long row = adapted.as<const int64_t>()[i];
      if (row < 0 || row >= row_count) return call.fail("adapted row %lld, expected 0 to %d", row, row_count - 1);
      own[i] = rows[row], middle[i] = low + i * rank, addends[row] = sums + i * outputs;
    }
    Product first = {down, INT8, int(rank)}, second = {up, INT8, int(outputs)};
    first.y = low, first.stride = rank;
    second.y = sums, second.stride = outputs;
    spaceport::multiply(call, kernels, own, int(count), inputs, norm, &first, 1);
    spaceport::multiply(call, kernels, middle, int(count), int(rank), NormOf{}, &second, 1);
    for (int i = 0, column = 0; i < product_count; column += products[i++].outputs)
      products[i].addends = addends, products[i].first_addend = column;
    spaceport::multiply(call, kernels, rows, row_count, inputs, norm, products, product_count);
  }
};

// Pointers to adjacent rows.
struct RowPointers {
  RowPointers(Call& call, long long count) : memory(size_t(count) * sizeof(float*)) {
    if (memory.failed()) call.out_of_memory();
    pointers = reinterpret_cast<const float**>(memory.data());
  }
  RowPointers(Call& call, const Tensor& t, long long count) : RowPointers(call, count) {
    if (call.failed()) return;
    for (long long i = 0; i < count; i++) pointers[i] = t.as<const float>() + i * t.last();
  }
  Scratch memory;
  const float** pointers;
};

// Rows of the packed matrix of the vocabulary.
struct Embed {
  static constexpr const char* NAME = "Embed";
  static constexpr const char* INPUTS[] = {"ids", "weights"};
  static constexpr OrtType TYPES[] = {ORT_INT64, ORT_UINT8};
  static constexpr int REQUIRED = 2;

  Format format = INT8;
  long long outputs = 0, inputs = 0;
  float scale = 1.0f;

  void read(Attributes& a) {
    format = read_format(a, "format");
    outputs = a.integer("vocabulary", 1, MOST_OUTPUTS);
    inputs = a.integer("width", 1, MAX_INPUTS);
    scale = a.number("scale");
  }

  void compute(Call& call, const Kernels& kernels) const {
    Tensor ids = call.input(0, ORT_INT64);
    const uint8_t* weights = call.weights(1, format, outputs, inputs);
    if (call.failed()) return;
    if (!ids.data || ids.count() < 1) return call.fail("input ids has no token, expected at least one");
    long long count = ids.count();
    int64_t dims[] = {count, inputs};
    const int64_t* tokens = ids.as<const int64_t>();
    for (long long i = 0; i < count; i++)
      if (tokens[i] < 0 || tokens[i] >= outputs)
        return call.fail("token %lld, expected 0 to %lld", (long long)tokens[i], outputs - 1);
    float* y = call.output<float>(0, dims, 2);
    if (call.failed()) return;
    for (long long i = 0; i < count; i++)
      kernels.unpack_row(format, weights, int(inputs), tokens[i], scale, y + i * inputs);
  }
};

// A norm and up to three products of its rows, side by side; each has an optional bias.
struct NormProduct {
  static constexpr const char* NAME = "NormProduct";
  static constexpr const char* INPUTS[] = {"x",     "gain",     "norm_bias", "weights", "bias", "weights2",
                                           "bias2", "weights3", "bias3",     "adapted", "down", "up"};
  static constexpr OrtType TYPES[] = {ORT_FLOAT, ORT_FLOAT, ORT_FLOAT, ORT_UINT8, ORT_FLOAT, ORT_UINT8,
                                      ORT_FLOAT, ORT_UINT8, ORT_FLOAT, ORT_INT64, ORT_UINT8, ORT_UINT8};
  static constexpr int REQUIRED = 1;
  static constexpr int MOST = 3;

  NormAttributes norm;
  Adapter adapter;
  Activation activation = NO_ACTIVATION;
  int count = 0;
  long long outputs[MOST] = {};
  Format formats[MOST] = {};

  void read(Attributes& a) {
    norm.read(a);
    adapter.rank = a.rank();
    activation = Activation(a.choice("activation", ACTIVATIONS, 4));
    int64_t sizes[16];
    count = a.integers("widths", sizes, 16);
    if (!*a.failure && (count < 1 || count > MOST))
      a.failure->say(a.node, "widths has %d sizes, expected 1 to %d", count, MOST);
    char names[128] = "";
    a.text("formats", names, sizeof names);
    char* name = names;
    for (int i = 0; i < count && !*a.failure; i++) {
      if (sizes[i] < 1 || sizes[i] > MOST_OUTPUTS)
        a.failure->say(a.node, "widths has %lld, expected 1 to %d", (long long)sizes[i], MOST_OUTPUTS);
      outputs[i] = sizes[i];
      char* comma = strchr(name, ',');
      if (!comma != (i + 1 == count))
        return a.failure->say(a.node, "formats is %.80s, expected %d names", names, count);
      if (comma) *comma = 0;
      formats[i] = Format(a.index("formats", name, FORMAT_NAMES, FORMATS));
      if (comma) name = comma + 1;
    }
  }

  void compute(Call& call, const Kernels& kernels) const {
    Tensor x = call.rows(0);
    if (call.failed()) return;
    long long rows = x.count() / x.last(), width = 0;
    Product products[MOST];
    for (int i = 0; i < count; i++) {
      const uint8_t* weights = call.weights(3 + 2 * i, formats[i], outputs[i], x.last());
      products[i] = {weights, formats[i], int(outputs[i]), call.vector(4 + 2 * i, outputs[i]), activation};
      width += outputs[i];
    }
    NormOf of = norm.inputs(call, 1, 2, x.last());
    int64_t dims[] = {rows, width};
    float* y = call.output<float>(0, dims, 2);
    if (call.failed()) return;
    for (int i = 0; i < count; i++) {
      products[i].y = y, products[i].stride = width;
      y += outputs[i];
    }
    RowPointers pointers(call, x, rows);
    adapter.multiply(call, kernels, 9, pointers.pointers, int(rows), int(x.last()), of, products, count);
  }
};

// A product that is added to the residual.
struct AddProduct {
  static constexpr const char* NAME = "AddProduct";
  static constexpr const char* INPUTS[] = {"x", "residual", "weights", "bias", "adapted", "down", "up"};
  static constexpr OrtType TYPES[] = {ORT_FLOAT, ORT_FLOAT, ORT_UINT8, ORT_FLOAT, ORT_INT64, ORT_UINT8, ORT_UINT8};
  static constexpr int REQUIRED = 3;

  Adapter adapter;
  Format format = INT8;
  long long outputs = 0;

  void read(Attributes& a) {
    adapter.rank = a.rank();
    format = read_format(a, "format");
    outputs = a.integer("width", 1, MOST_OUTPUTS);
  }

  void compute(Call& call, const Kernels& kernels) const {
    Tensor x = call.rows(0), residual = call.rows(1);
    if (call.failed()) return;
    long long rows = x.count() / x.last();
    int64_t dims[] = {rows, outputs};
    if (residual.last() != outputs || residual.count() != rows * outputs)
      return call.fail("input residual has %lld numbers in rows of %lld, expected %lld rows of %lld", residual.count(),
                       residual.last(), rows, outputs);
    const uint8_t* weights = call.weights(2, format, outputs, x.last());
    const float* bias = call.vector(3, outputs);
    float* y = call.output<float>(0, dims, 2);
    if (call.failed()) return;
    Product product = {weights, format, int(outputs), bias};
    product.residual = residual.as<const float>(), product.y = y, product.stride = outputs;
    RowPointers pointers(call, x, rows);
    adapter.multiply(call, kernels, 4, pointers.pointers, int(rows), int(x.last()), NormOf{}, &product, 1);
  }
};

// The first half of an MLP: norm, gate and up, activated gate times up.
struct GateProduct {
  static constexpr const char* NAME = "GateProduct";
  static constexpr const char* INPUTS[] = {"x", "gain", "norm_bias", "weights", "bias", "adapted", "down", "up"};
  static constexpr OrtType TYPES[] = {ORT_FLOAT, ORT_FLOAT, ORT_FLOAT, ORT_UINT8,
                                      ORT_FLOAT, ORT_INT64, ORT_UINT8, ORT_UINT8};
  static constexpr int REQUIRED = 1;

  NormAttributes norm;
  Adapter adapter;
  Activation activation = SILU;
  Format format = INT8;
  long long outputs = 0;  // of gate and up together

  void read(Attributes& a) {
    norm.read(a);
    adapter.rank = a.rank();
    activation = Activation(a.choice("activation", ACTIVATIONS, 4));
    format = read_format(a, "format");
    outputs = 2 * a.integer("width", 1, MOST_OUTPUTS / 2);
  }

  void compute(Call& call, const Kernels& kernels) const {
    Tensor x = call.rows(0);
    if (call.failed()) return;
    if (outputs % PANEL) return call.fail("width is %lld, expected a multiple of %d", outputs / 2, PANEL / 2);
    long long rows = x.count() / x.last();
    int64_t dims[] = {rows, outputs / 2};
    const uint8_t* weights = call.weights(3, format, outputs, x.last());
    const float* bias = call.vector(4, outputs);
    NormOf of = norm.inputs(call, 1, 2, x.last());
    float* y = call.output<float>(0, dims, 2);
    if (call.failed()) return;
    Product product = {weights, format, int(outputs), bias, activation, true};
    product.y = y, product.stride = outputs / 2;
    RowPointers pointers(call, x, rows);
    adapter.multiply(call, kernels, 5, pointers.pointers, int(rows), int(x.last()), of, &product, 1);
  }
};

// Logits of chosen rows; the first dimension of `rows` is the requests, whose rows are counted from 0.
struct Head {
  static constexpr const char* NAME = "Head";
  static constexpr const char* INPUTS[] = {"x", "rows", "gain", "norm_bias", "weights", "bias"};
  static constexpr OrtType TYPES[] = {ORT_FLOAT, ORT_INT64, ORT_FLOAT, ORT_FLOAT, ORT_UINT8, ORT_FLOAT};
  static constexpr int REQUIRED = 2;

  NormAttributes norm;
  Format format = INT8;
  long long outputs = 0;
  float cap = 0.0f;

  void read(Attributes& a) {
    norm.read(a);
    format = read_format(a, "format");
    outputs = a.integer("vocabulary", 1, MOST_OUTPUTS);
    cap = a.number("cap");
  }

  void compute(Call& call, const Kernels& kernels) const {
    Tensor x = call.rows(0), chosen_rows = call.input(1, ORT_INT64);
    if (call.failed()) return;
    long long rows = x.count() / x.last(), count = chosen_rows.data ? chosen_rows.count() : 0;
    if (count < 1 || count > rows) return call.fail("input rows has %lld numbers, expected 1 to %lld", count, rows);
    long long requests = chosen_rows.rank > 1 ? chosen_rows.dims[0] : 1, each = rows / requests;
    if (rows % requests) return call.fail("%lld rows of %lld requests, expected as many of each", rows, requests);
    const int64_t* chosen_of = chosen_rows.as<const int64_t>();
    const uint8_t* weights = call.weights(4, format, outputs, x.last());
    const float* bias = call.vector(5, outputs);
    NormOf of = norm.inputs(call, 2, 3, x.last());
    RowPointers pointers(call, count);
    if (call.failed()) return;
    for (long long i = 0; i < count; i++) {
      if (chosen_of[i] < 0 || chosen_of[i] >= each)
        return call.fail("row %lld, expected 0 to %lld", (long long)chosen_of[i], each - 1);
      long long row = i / (count / requests) * each + chosen_of[i];
      pointers.pointers[i] = x.as<const float>() + row * x.last();
    }
    int64_t dims[MAX_RANK + 1];
    memcpy(dims, chosen_rows.dims, sizeof chosen_rows.dims);
    dims[chosen_rows.rank] = outputs;
    float* y = call.output<float>(0, dims, chosen_rows.rank + 1);
    if (call.failed()) return;
    Product product = {weights, format, int(outputs), bias};
    product.y = y, product.stride = outputs, product.cap = cap;
    multiply(call, kernels, pointers.pointers, int(count), int(x.last()), of, &product, 1);
  }
};

// Stores the keys and values of rows in their slots, then attends to the slots that each row may see.
struct Attend {
  static constexpr const char* NAME = "Attend";
  static constexpr const char* INPUTS[] = {"qkv",    "cos",    "sin",    "slots",  "visible", "keys",
                                           "values", "scales", "q_gain", "k_gain", "sinks"};
  static constexpr OrtType TYPES[] = {ORT_FLOAT, ORT_FLOAT, ORT_FLOAT, ORT_INT64, ORT_BOOL, ORT_INT8,
                                      ORT_INT8,  ORT_FLOAT, ORT_FLOAT, ORT_FLOAT, ORT_FLOAT};
  static constexpr int REQUIRED = 8;

  long long heads = 0, interleaved = 0;
  float scale = 0.0f, cap = 0.0f, epsilon = 0.0f;

  void read(Attributes& a) {
    heads = a.integer("heads", 1, 1 << 12);
    interleaved = a.integer("interleaved", 0, 1);
    scale = a.number("scale");
    cap = a.number("cap");
    epsilon = a.number("epsilon");
  }

  // Everything but outputs and shared memory: `cache` still is the input's.
  Attention inputs(Call& call) const {
    Attention a = {};
    Tensor qkv = call.rows(0), cos = call.rows(1), sin = call.rows(2), slots = call.input(3, ORT_INT64);
    Tensor visible = call.input(4, ORT_BOOL), keys = call.input(5, ORT_INT8), values = call.input(6, ORT_INT8);
    Tensor scales = call.input(7, ORT_FLOAT);
    if (call.failed()) return a;
    if (keys.rank != 4 || keys.count() < 1)
      return call.fail("input keys has %d dimensions and %lld bytes, expected requests x heads x slots x head size",
                       keys.rank, keys.data ? keys.count() : 0),
             a;
    long long rows = qkv.count() / qkv.last(), requests = keys.dims[0], kv_heads = keys.dims[1];
    long long count = keys.dims[2], size = keys.dims[3];
    if (requests > rows || rows % requests)
      call.fail("%lld rows of %lld requests, expected as many of each", rows, requests);
    if (size % 8 || size > MAX_HEAD_SIZE)
      call.fail("head size %lld, expected a multiple of 8 up to %d", size, MAX_HEAD_SIZE);
    if (kv_heads > heads || heads % kv_heads)
      call.fail("%lld query heads for %lld KV heads, expected a multiple", heads, kv_heads);
    if (count > (1 << 24)) call.fail("%lld slots, expected at most %d", count, 1 << 24);
    if (qkv.last() != (heads + 2 * kv_heads) * size)
      call.fail("input qkv has rows of %lld, expected %lld", qkv.last(), (heads + 2 * kv_heads) * size);
    if (values.rank != 4 || memcmp(values.dims, keys.dims, sizeof keys.dims))
      call.fail("input values has %lld bytes, expected the shape of keys, %lld", values.count(), keys.count());
    if (scales.count() != 2 * requests * kv_heads * count || scales.last() != count)
      call.fail("input scales has %lld numbers in rows of %lld, expected %lld in rows of %lld", scales.count(),
                scales.last(), 2 * requests * kv_heads * count, count);
    long long rotated = 2 * cos.last();
    if (rotated > size || cos.count() != rows * cos.last() || sin.count() != cos.count() || sin.last() != cos.last())
      call.fail("cos and sin have %lld and %lld numbers in rows of %lld, expected %lld rows of up to %lld", cos.count(),
                sin.count(), cos.last(), rows, size / 2);
    if (slots.count() != rows) call.fail("input slots has %lld, expected %lld", slots.count(), rows);
    if (call.failed()) return a;
    const int64_t* into = slots.as<const int64_t>();
    for (long long i = 0; i < rows; i++)
      if (into[i] < 0 || into[i] >= count)
        return call.fail("slot %lld, expected 0 to %lld", (long long)into[i], count - 1), a;
    long long seen = visible.last();
    if (!visible.data || seen < 1 || seen > count || seen > MAX_SEEN)
      call.fail("input visible has rows of %lld slots, expected 1 to %lld", seen,
                (count < MAX_SEEN ? count : MAX_SEEN));
    if (!call.failed() && visible.count() != rows * seen)
      call.fail("input visible has %lld marks, expected %lld rows of %lld slots", visible.count(), rows, seen);
    if (call.failed()) return a;
    a.rows = int(rows), a.heads = int(heads);
    a.qkv = qkv.as<const float>();
    a.cos = cos.as<const float>(), a.sin = sin.as<const float>();
    a.rotated = int(rotated), a.interleaved = interleaved;
    a.q_gain = call.vector(8, size), a.k_gain = call.vector(9, size), a.sinks = call.vector(10, heads);
    a.epsilon = epsilon, a.scale = scale, a.cap = cap;
    a.slots = into;
    a.visible = visible.as<const uint8_t>();
    a.seen = int(seen);
    a.cache = {keys.as<int8_t>(), values.as<int8_t>(), scales.as<float>(), int(requests),
               int(kv_heads),     int(count),          int(size)};
    return a;
  }

  void compute(Call& call, const Kernels& kernels) const {
    Attention a = inputs(call);
    if (call.failed()) return;
    const KvCache from = a.cache;
    long long requests = from.requests, heads_of = from.heads, count = from.slots, size = from.size;
    int64_t dims[] = {a.rows, heads * size}, cache_dims[] = {requests, heads_of, count, size};
    int64_t scale_dims[] = {requests, 2 * heads_of, count};
    a.y = call.output<float>(0, dims, 2);
    a.cache.keys = call.output<int8_t>(1, cache_dims, 4);
    a.cache.values = call.output<int8_t>(2, cache_dims, 4);
    a.cache.scales = call.output<float>(3, scale_dims, 3);
    if (call.failed()) return;
    // Outputs bound to the memory of the inputs are updated in place.
    size_t bytes = size_t(requests * heads_of * count * size);
    size_t scale_bytes = size_t(requests * 2 * heads_of * count) * sizeof(float);
    if (a.cache.keys != from.keys) memmove(a.cache.keys, from.keys, bytes);
    if (a.cache.values != from.values) memmove(a.cache.values, from.values, bytes);
    if (a.cache.scales != from.scales) memmove(a.cache.scales, from.scales, scale_bytes);

    VisibleBlocks blocks(a);
    if (blocks.failed()) return call.out_of_memory();
    bool together = blocks.work_ns() < 2 * LEAST_PART_NS;
    auto store = [&](int part) { kernels.store(a, part / int(heads_of), part % int(heads_of)); };
    auto attend = [&](int part) {
      const AttentionGroup& group = blocks.group(part / int(heads_of));
      Scratch scratch(kernels.attend_scratch(a, group));
      if (scratch.failed()) return blocks.fail();
      kernels.attend(a, group, part % int(heads_of), scratch.data());
    };
    call.parallel(int(requests * heads_of), store, together);
    call.parallel(blocks.groups() * int(heads_of), attend, together);
    if (blocks.failed()) call.out_of_memory();
  }
};

// How an operator is presented to the runtime.
template <class Operator>
struct Definition : OrtCustomOp {
  struct Opened {
    Node node;
    Operator op;
  };
  static constexpr int INPUT_COUNT = int(sizeof Operator::TYPES / sizeof *Operator::TYPES);
  static constexpr bool STORES = sizeof Operator::TYPES / sizeof *Operator::TYPES == 11;  // outputs: y, and the cache

  static OrtStatus* open(const OrtCustomOp*, const void*, const OrtKernelInfo* info, void** kernel) {
    Failure failure;
    void* memory = malloc(sizeof(Opened));  // not new, which would need a C++ library
    if (!memory) return ort->CreateStatus(ORT_FAIL, "no memory is left");
    Opened* opened = new (memory) Opened;
    Node& node = opened->node;
    char path[512] = "";
    size_t length = sizeof path, count = 0;
    if (OrtStatus* unnamed = ort->KernelInfo_GetNodeName(info, path, &length)) ort->ReleaseStatus(unnamed);
    snprintf(node.name, sizeof node.name, "%s %.100s", Operator::NAME, path);
    node.kernels = chosen;
    node.input_names = Operator::INPUTS;
    failure.keep(ort->KernelInfo_GetInputCount(info, &count));
    node.input_count = int(count) < INPUT_COUNT ? int(count) : INPUT_COUNT;
    for (int i = 0; i < node.input_count && !failure; i++) {
      int constant = 0;
      const OrtValue* value = nullptr;
      failure.keep(ort->KernelInfoGetConstantInput_tensor(info, size_t(i), &constant, &value));
      if (!failure && constant && value)
        read_tensor(value, &node.constants[i], &failure, node.name, Operator::INPUTS[i]);
    }
    Attributes attributes(info, node.name, &failure);
    if (!failure) opened->op.read(attributes);
    if (failure)
      free(opened);
    else
      *kernel = opened;
    return failure.status;
  }

  Definition() {
    memset(static_cast<OrtCustomOp*>(this), 0, sizeof(OrtCustomOp));
    version = ORT_VERSION;
    GetName = [](const OrtCustomOp*) { return Operator::NAME; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return "CPUExecutionProvider"; };
    GetInputTypeCount = [](const OrtCustomOp*) { return size_t(INPUT_COUNT); };
    GetInputType = [](const OrtCustomOp*, size_t i) { return Operator::TYPES[i]; };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
      return int(i) < Operator::REQUIRED ? ORT_REQUIRED : ORT_OPTIONAL;
    };
    GetOutputTypeCount = [](const OrtCustomOp*) { return size_t(STORES ? 4 : 1); };
    GetOutputType = [](const OrtCustomOp*, size_t i) { return i == 1 || i == 2 ? ORT_INT8 : ORT_FLOAT; };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return ORT_REQUIRED; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
    auto none = [](const OrtCustomOp*) { return 0; };
    GetVariadicInputMinArity = GetVariadicInputHomogeneity = none;
    GetVariadicOutputMinArity = GetVariadicOutputHomogeneity = none;
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return 1 << 30; };
    GetAliasMap = [](int**, int**) { return size_t(0); };
    ReleaseAliasMap = [](int*, int*) {};
    ReleaseMayInplace = [](int*, int*) {};
    GetMayInplace = [](int** from, int** to) {
      static int inputs[] = {5, 6, 7}, outputs[] = {1, 2, 3};
      *from = inputs, *to = outputs;
      return size_t(STORES ? 3 : 0);
    };
    CreateKernelV2 = open;
    KernelDestroy = free;
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      const Opened& opened = *static_cast<Opened*>(kernel);
      Call call(opened.node, context);
      opened.op.compute(call, *opened.node.kernels);
      return call.failure.status;
    };
  }
};

const Definition<Embed> EMBED;
const Definition<NormProduct> NORM_PRODUCT;
const Definition<Attend> ATTEND;
const Definition<AddProduct> ADD_PRODUCT;
const Definition<GateProduct> GATE_PRODUCT;
const Definition<Head> HEAD;

}  // namespace
}  // namespace spaceport

// The instruction set that sessions opened now would use; empty where SPACEPORT_KERNELS names none that there is.
SPACEPORT_EXPORT const char* spaceport_instruction_set() {
  char message[256];
  const spaceport::Kernels* kernels = spaceport::choose_kernels(message, sizeof message);
  return kernels ? kernels->name : "";
}

// The names of the instruction sets that this processor has, the fastest first, with commas between them.
SPACEPORT_EXPORT void spaceport_instruction_sets(char* names, size_t size) { spaceport::list_kernels(names, size); }

SPACEPORT_EXPORT int spaceport_kernels_version() { return spaceport::VERSION; }

// What SessionOptions.register_custom_ops_library calls.
SPACEPORT_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace spaceport;
  const void* const* table = base->GetApi(ORT_VERSION);
  if (!table) return nullptr;  // the runtime is older than 1.18; it finds no operators and says so
  static const OrtFunctions functions(table);
  ort = &functions;
  char message[256];
  const Kernels* kernels = choose_kernels(message, sizeof message);
  if (!kernels) return ort->CreateStatus(ORT_INVALID_ARGUMENT, message);
  chosen = kernels;
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* status = ort->CreateCustomOpDomain("spaceport", &domain)) return status;
  const OrtCustomOp* operators[] = {&EMBED, &NORM_PRODUCT, &ATTEND, &ADD_PRODUCT, &GATE_PRODUCT, &HEAD};
  for (const OrtCustomOp* op : operators)
    if (OrtStatus* status = ort->CustomOpDomain_Add(domain, op)) return status;
  return ort->AddCustomOpDomain(options, domain);
}
