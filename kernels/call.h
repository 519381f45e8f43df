// A node of the graph and one call of it: attributes, inputs and outputs, each checked before it is used.
//
// A bundle is untrusted input. The first thing that is not as expected becomes the status of the call, with what came
// and what was expected; what is read after that is empty, and the operator returns without computing.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "ort_api.h"
#include "scratch.h"

namespace spaceport {

extern const OrtFunctions* ort;  // set when the library is registered

constexpr int MAX_OPERATOR_INPUTS = 16;
constexpr int MAX_RANK = 4;
constexpr int MOST_ROWS = 1 << 20;

struct Tensor {
  void* data = nullptr;  // null: not there
  OrtType type = ORT_FLOAT;
  int rank = 0;
  int64_t dims[MAX_RANK] = {};

  long long count() const {  // not int64_t, which has another format on each system
    long long n = 1;
    for (int i = 0; i < rank; i++) n *= dims[i];
    return n;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  long long last() const { return rank ? dims[rank - 1] : 1; }
};

// Keeps the first failure.
class Failure {
public:
  OrtStatus* status = nullptr;

  explicit operator bool() const { return status; }

  __attribute__((format(printf, 3, 4))) void say(const char* node, const char* text, ...) {
    va_list values;
    va_start(values, text);
    say_values(node, text, values);
    va_end(values);
  }

  void say_values(const char* node, const char* text, va_list values) {
    if (status) return;
    char message[512];
    int at = snprintf(message, sizeof message, "spaceport %s: ", node);
    vsnprintf(message + at, sizeof message - at, text, values);
    status = ort->CreateStatus(ORT_INVALID_ARGUMENT, message);
  }

  // Keeps a status of the runtime, null for success.
  void keep(OrtStatus* s) {
    if (status && s)
      ort->ReleaseStatus(s);
    else if (s)
      status = s;
  }
};

inline bool read_tensor(const OrtValue* value, Tensor* t, Failure* failure, const char* node, const char* input) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  failure->keep(ort->GetTensorTypeAndShape(value, &info));
  if (*failure) return false;
  size_t rank = 0;
  failure->keep(ort->GetDimensionsCount(info, &rank));
  if (rank > MAX_RANK) failure->say(node, "input %s has %zu dimensions, expected at most %d", input, rank, MAX_RANK);
  t->rank = int(rank);
  if (!*failure) failure->keep(ort->GetDimensions(info, t->dims, rank));
  if (!*failure) failure->keep(ort->GetTensorElementType(info, &t->type));
  ort->ReleaseTensorTypeAndShapeInfo(info);
  if (!*failure) failure->keep(ort->GetTensorMutableData(const_cast<OrtValue*>(value), &t->data));
  return !*failure;
}

// What is known of a node when a session is opened.
struct Node {
  char name[128] = "";
  const Kernels* kernels = nullptr;
  const char* const* input_names = nullptr;
  int input_count = 0;
  Tensor constants[MAX_OPERATOR_INPUTS];  // initializers
};

// Reads attributes; all are required but the rank of an adapter.
class Attributes {
public:
  const char* const node;
  Failure* const failure;

  Attributes(const OrtKernelInfo* i, const char* n, Failure* f) : node(n), failure(f), info(i) {}

  long long integer(const char* name, long long least, long long most) {
    int64_t value = 0;
    if (*failure) return least;
    failure->keep(ort->KernelInfoGetAttribute_int64(info, name, &value));
    if (value >= least && value <= most) return value;
    failure->say(node, "%s is %lld, expected %lld to %lld", name, (long long)value, least, most);
    return least;
  }

  // A multiple of a block of inputs; 0 where it is absent.
  long long rank() {
    int64_t value = 0;
    if (*failure) return 0;
    if (OrtStatus* absent = ort->KernelInfoGetAttribute_int64(info, "rank", &value)) ort->ReleaseStatus(absent);
    if (value < 0 || value > MAX_INPUTS || value % BLOCK)
      failure->say(node, "rank is %lld, expected a multiple of %d up to %d", (long long)value, BLOCK, MAX_INPUTS);
    return value;
  }

  float number(const char* name) {
    float value = 0.0f;
    if (!*failure) failure->keep(ort->KernelInfoGetAttribute_float(info, name, &value));
    if (!(value >= -3e38f && value <= 3e38f)) failure->say(node, "%s is not finite", name);
    return value;
  }

  // The index of the attribute's value in a list of names.
  int choice(const char* name, const char* const* names, int count) {
    char value[64] = "";
    text(name, value, sizeof value);
    return *failure ? 0 : index(name, value, names, count);
  }

  int index(const char* name, const char* value, const char* const* names, int count) {
    char list[160] = "";
    for (int i = 0; i < count; i++) {
      if (!strcmp(value, names[i])) return i;
      snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "", names[i]);
    }
    failure->say(node, "%s is %.40s, expected one of %s", name, value, list);
    return 0;
  }

  void text(const char* name, char* value, size_t size) {
    size_t needed = size;
    if (!*failure) failure->keep(ort->KernelInfoGetAttribute_string(info, name, value, &needed));
  }

  int integers(const char* name, int64_t* values, int most) {
    size_t count = size_t(most);
    if (!*failure) failure->keep(ort->KernelInfoGetAttributeArray_int64(info, name, values, &count));
    return *failure ? 0 : int(count);
  }

private:
  const OrtKernelInfo* info;
};

class Call {
public:
  Call(const Node& n, OrtKernelContext* c) : node(n), context(c) {}

  Failure failure;

  bool failed() const { return failure.status; }

  __attribute__((format(printf, 2, 3))) void fail(const char* text, ...) {
    va_list values;
    va_start(values, text);
    failure.say_values(node.name, text, values);
    va_end(values);
  }

  const char* name(int input) const { return node.input_names[input]; }

  // An input; without data where an optional one is absent.
  Tensor input(int index, OrtType type) {
    Tensor t;
    if (failed() || index >= node.input_count) return t;
    t = node.constants[index];
    if (!t.data) {
      const OrtValue* value = nullptr;
      failure.keep(ort->KernelContext_GetInput(context, size_t(index), &value));
      if (failed() || !value || !read_tensor(value, &t, &failure, node.name, name(index))) return Tensor();
    }
    if (t.type != type) fail("input %s has element type %d, expected %d", name(index), int(t.type), int(type));
    return t;
  }

  // A vector of `count` numbers, or null where it is absent.
  const float* vector(int index, long long count) {
    Tensor t = input(index, ORT_FLOAT);
    if (failed() || (!t.data && !t.rank)) return nullptr;
    if (t.count() != count) fail("input %s has %lld numbers, expected %lld", name(index), t.count(), count);
    return static_cast<const float*>(t.data);
  }

  // Rows of numbers: any leading dimensions.
  Tensor rows(int index) {
    Tensor t = input(index, ORT_FLOAT);
    if (failed()) return t;
    if (t.rank < 2 || t.count() < 1)
      fail("input %s has %lld numbers in %d dimensions, expected at least one row", name(index), t.data ? t.count() : 0,
           t.rank);
    if (!failed() && t.count() / t.last() > MOST_ROWS)
      fail("input %s has %lld rows, expected at most %d", name(index), t.count() / t.last(), MOST_ROWS);
    return t;
  }

  const uint8_t* weights(int index, Format format, long long outputs, long long inputs) {
    Tensor t = input(index, ORT_UINT8);
    if (failed()) return nullptr;
    const FormatTraits& traits = FORMAT_TRAITS[format];
    int multiple = traits.scales == OF_SUPERBLOCKS ? BLOCK * SUPERBLOCK : traits.scales == OF_PAIRS ? 2 * BLOCK : BLOCK;
    if (inputs < multiple || inputs % multiple || inputs > MAX_INPUTS)
      fail("rows have %lld numbers, expected a multiple of %d up to %d for %s weights", inputs, multiple, MAX_INPUTS,
           traits.name);
    long long expected = packed_bytes(format, outputs, inputs);
    if (!failed() && (!t.data || t.count() != expected))
      fail("input %s has %lld bytes, expected %lld for %lld x %lld weights as %s", name(index), t.data ? t.count() : 0,
           expected, outputs, inputs, traits.name);
    return failed() ? nullptr : static_cast<const uint8_t*>(t.data);
  }

  template <class T>
  T* output(int index, const int64_t* dims, int rank) {
    OrtValue* value = nullptr;
    void* data = nullptr;
    if (!failed()) failure.keep(ort->KernelContext_GetOutput(context, size_t(index), dims, size_t(rank), &value));
    if (!failed() && !value) fail("output %d is missing", index);
    if (!failed()) failure.keep(ort->GetTensorMutableData(value, &data));
    return failed() ? nullptr : static_cast<T*>(data);
  }

  // Runs work(0) to work(parts - 1), by the threads of the session unless together.
  template <class Work>
  void parallel(int parts, Work& work, bool together = false) {
    if (parts <= 1 || together) {
      for (int i = 0; i < parts; i++) work(i);
      return;
    }
    auto part = [](void* data, size_t i) { (*static_cast<Work*>(data))(int(i)); };
    failure.keep(ort->KernelContext_ParallelFor(context, part, size_t(parts), 0, &work));
  }

  void out_of_memory() { fail("no memory is left"); }

private:
  const Node& node;
  OrtKernelContext* context;
};

}  // namespace spaceport
