// Functions of vectors and sums of rows, in one order of operations for every instruction set.
#pragma once
#include <cmath>
#include <utility>

namespace spaceport::SPACEPORT_SET {

template <int END>
using Below = std::make_integer_sequence<int, END>;

// Does work(value) with a value of the sequence that is a constant for it.
template <class Work, int... N>
inline void with_constant(std::integer_sequence<int, N...>, int value, Work work) {
  ((value == N ? work(std::integral_constant<int, N>()) : void()), ...);
}

// A number that is rounded to a code of 8 bits. What is not a number becomes -127, in every set.
inline I to_code(F x) { return to_int(min(max(x, set(-127.0f)), set(127.0f))); }

// Relative error below 2e-7 from -86 to 88; outside of that, the value at the end. Not a number stays so: of the two
// operands of min and max, it is the second that is returned where one is not a number.
//     exp(x) = 2^n * exp(x - n * log(2)), the second factor by a polynomial of Cephes
inline F exp(F x) {
  x = max(set(-86.0f), min(set(88.0f), x));
  I exponent = to_int(mul(x, set(1.44269504f)));
  F n = to_float(exponent);
  F r = fnma(n, set(-2.12194440e-4f), fnma(n, set(0.693359375f), x));
  F p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set(1.0f));
  return mul(p, power_of_two(exponent));
}

//     tanh(x) = 1 - 2 / (exp(2x) + 1)
inline F tanh(F x) { return sub(set(1.0f), div(set(2.0f), add(exp(add(x, x)), set(1.0f)))); }

inline F silu(F x) { return div(x, add(set(1.0f), exp(sub(set(0.0f), x)))); }

inline F gelu_tanh(F x) {
  F inner = mul(set(0.7978845608f), fma(mul(mul(x, x), set(0.044715f)), x, x));
  return mul(mul(set(0.5f), x), add(set(1.0f), tanh(inner)));
}

// GELU by the error function, which has an absolute error below 2e-7 (Abramowitz and Stegun, 7.1.26).
inline F gelu(F x) {
  F z = mul(abs(x), set(0.7071067812f)), t = div(set(1.0f), fma(set(0.3275911f), z, set(1.0f)));
  F p = set(1.061405429f);
  p = fma(p, t, set(-1.453152027f));
  p = fma(p, t, set(1.421413741f));
  p = fma(p, t, set(-0.284496736f));
  p = fma(p, t, set(0.254829592f));
  F tail = mul(mul(set(0.5f), mul(p, t)), exp(sub(set(0.0f), mul(z, z))));  // of the normal distribution, beyond |x|
  return sub(max(x, set(0.0f)), mul(abs(x), tail));
}

inline F activated(Activation kind, F x) {
  return kind == SILU ? silu(x) : kind == GELU ? gelu(x) : kind == GELU_TANH ? gelu_tanh(x) : x;
}

constexpr int SUM_VECTORS = 16 / LANES;  // sums of rows have 16 lanes in every set

// Adds 16 lanes by halves.
inline float sum_lanes(const F* lanes) {
  float s[16];
  for (int i = 0; i < SUM_VECTORS; i++) store(s + LANES * i, lanes[i]);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) s[i] += s[i + half];
  return s[0];
}

// The sum over a row of (x - center)^power, power 1 or 2, for a count that is a multiple of 8.
inline float row_sum(const float* x, int count, float center, int power) {
  F lanes[SUM_VECTORS], c = set(center);
  for (F& lane : lanes) lane = set(0.0f);
  float tail[16] = {};
  for (int k = 0; k < count; k += 16) {
    const float* p = x + k;
    if (count - k < 16) {  // values equal to the center add nothing
      for (int i = 0; i < 16; i++) tail[i] = i < count - k ? p[i] : center;
      p = tail;
    }
    for (int i = 0; i < SUM_VECTORS; i++) {
      F v = sub(load(p + LANES * i), c);
      lanes[i] = power == 2 ? fma(v, v, lanes[i]) : add(lanes[i], v);
    }
  }
  return sum_lanes(lanes);
}

}  // namespace spaceport::SPACEPORT_SET
