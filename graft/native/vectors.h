// Vectors of 16 floats in the compiler's own terms (AVX-512, AVX2 or whatever there is), bf16, and
// the few functions over them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef float V __attribute__((vector_size(64)));
typedef float Vu __attribute__((vector_size(64), aligned(4)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
typedef uint16_t Hu __attribute__((vector_size(32), aligned(2)));

struct bf16 {
  uint16_t bits;
};

static inline V all(float x) { return V{} + x; }
static inline V load(const float* p) { return *(const Vu*)p; }
static inline V load(const bf16* p) {
  return (V)(__builtin_convertvector((H) * (const Hu*)p, U) << 16);
}
static inline void store(float* p, V x) { *(Vu*)p = x; }
static inline H rounded(V x) {  // to the nearest bf16, ties to even
  U u = (U)x;
  return __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, H);
}
static inline void store(bf16* p, V x) { *(Hu*)p = rounded(x); }
static inline V larger(V a, V b) { return a > b ? a : b; }
static inline float sum(V x) {
  float total = 0;
  for (int i = 0; i < 8; i++) total += x[i] + x[i + 8];
  return total;
}
static inline float largest(V x) {
  float best = x[0];
  for (int i = 1; i < 16; i++) best = std::max(best, x[i]);
  return best;
}

static inline bool any(I mask) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
  uint64_t words[8];
  memcpy(words, &mask, 64);
  uint64_t bits = 0;
  for (uint64_t word : words) bits |= word;
  return bits;
#endif
}

static inline V exponential(V x) {  // relative error 2e-7; anything below -87 gives about 1e-38
  x = larger(x, all(-87.0f));
  x = x < 88.0f ? x : all(88.0f);
  V n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to an integer
  V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * (V)((__builtin_convertvector(n, I) + 127) << 23);
}

// What a product takes in. The dot-product instruction multiplies pairs of bf16; without it bf16
// inputs are kept as the floats that they are.
template <class T>
struct InputOf {
  typedef float type;
};
#ifdef __AVX512BF16__
template <>
struct InputOf<bf16> {
  typedef bf16 type;
};
#endif
template <class T>
using Input = typename InputOf<T>::type;

static inline void put(float*, float* p, V x) { store(p, x); }
static inline void put(bf16*, bf16* p, V x) { store(p, x); }
static inline void put(bf16*, float* p, V x) {
  store(p, (V)(__builtin_convertvector(rounded(x), U) << 16));
}
template <class T>
static inline void put_input(Input<T>* p, V x) {
  put((T*)nullptr, p, x);
}
