// Linear layers over packed weights, norms, and RoPE.
//
// A pass over few rows is bound by reading the weights once. They are packed for it: blocks of 16
// outputs, [outputs / 16][inputs][16] in fp32 and [outputs / 16][inputs / 2][16][2] in bf16, the
// layout of the dot-product instruction, so that one input, broadcast, meets 16 outputs and no sum
// crosses lanes. Up to 16 rows share one sweep over the weights.
#pragma once
#include <array>
#include <cmath>
#include <utility>

#include "team.h"
#include "vectors.h"

struct Linear {  // packed; bias is fp32 or null
  const void* weight;
  const float* bias;
  int64_t out, in;
};

#ifdef __AVX512F__
constexpr int GROUP = 16;  // rows that share a sweep over the weights: their sums stay in registers
#else
constexpr int GROUP = 4;
#endif
constexpr int CHUNK = 12;  // blocks of outputs that stay in the second-level cache for all groups
constexpr int TILE = CHUNK * 16;

// Sums of M rows and NB blocks of 16 outputs.
template <int M, int NB>
static inline void block(const float* w, const float* x, int64_t in, float* y) {
  V sums[M][NB] = {};
  for (int64_t k = 0; k < in; k++) {
    V weights[NB];
    for (int n = 0; n < NB; n++) {
      const float* p = w + (n * in + k) * 16;
      weights[n] = load(p);
      __builtin_prefetch(p + 512);
    }
    for (int m = 0; m < M; m++)
      for (int n = 0; n < NB; n++) sums[m][n] += weights[n] * x[m * in + k];
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < NB; n++) store(y + m * TILE + n * 16, sums[m][n]);
}

#ifdef __AVX512BF16__
template <int M, int NB>
static inline void block(const bf16* w, const bf16* x, int64_t in, float* y) {
  __m512 sums[M][NB] = {};
  int64_t pairs = in / 2;
  for (int64_t k = 0; k < pairs; k++) {
    __m512bh weights[NB];
    for (int n = 0; n < NB; n++) {
      const bf16* p = w + (n * pairs + k) * 32;
      weights[n] = (__m512bh)_mm512_loadu_si512(p);
      _mm_prefetch((const char*)(p + 1024), _MM_HINT_T0);
    }
    for (int m = 0; m < M; m++) {
      int32_t pair;
      memcpy(&pair, x + m * in + 2 * k, 4);
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int n = 0; n < NB; n++) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], weights[n], both);
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < NB; n++) _mm512_storeu_ps(y + m * TILE + n * 16, sums[m][n]);
}
#else
template <int M, int NB>
static inline void block(const bf16* w, const float* x, int64_t in, float* y) {
  V sums[M][NB] = {};
  typedef uint32_t Uu __attribute__((vector_size(64), aligned(4)));
  for (int64_t k = 0; k < in; k += 2) {
    V even[NB], odd[NB];
    for (int n = 0; n < NB; n++) {
      const bf16* p = w + (n * in + k) * 16;
      U both = *(const Uu*)p;
      even[n] = (V)(both << 16);
      odd[n] = (V)(both & 0xffff0000u);
      __builtin_prefetch(p + 1024);
    }
    for (int m = 0; m < M; m++)
      for (int n = 0; n < NB; n++) {
        sums[m][n] += even[n] * x[m * in + k];
        sums[m][n] += odd[n] * x[m * in + k + 1];
      }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < NB; n++) store(y + m * TILE + n * 16, sums[m][n]);
}
#endif

template <class T, int M>
static void some_rows(const T* w, const Input<T>* x, int64_t in, int blocks, float* y) {
  constexpr int NB = GROUP < 16 ? 1 : M <= 4 ? 4 : M <= 8 ? 3 : M <= 12 ? 2 : 1;
  int b = 0;
  for (; b + NB <= blocks; b += NB) block<M, NB>(w + b * in * 16, x, in, y + b * 16);
  for (; b < blocks; b++) block<M, 1>(w + b * in * 16, x, in, y + b * 16);
}

template <class T, int... M>
static auto kernels(std::integer_sequence<int, M...>) {
  typedef void (*Kernel)(const T*, const Input<T>*, int64_t, int, float*);
  return std::array<Kernel, sizeof...(M)>{some_rows<T, M + 1>...};
}

// tile [rows][TILE] = x [rows, in] times `blocks` packed blocks from w on.
template <class T>
static void multiply(const T* w, const Input<T>* x, int64_t rows, int64_t in, int blocks, float* tile) {
  static const auto of_rows = kernels<T>(std::make_integer_sequence<int, GROUP>());
  int64_t groups = (rows + GROUP - 1) / GROUP;
  for (int64_t g = 0; g < groups; g++) {
    int64_t first = rows * g / groups, last = rows * (g + 1) / groups;
    of_rows[last - first - 1](w, x + first * in, in, blocks, tile + first * TILE);
  }
}

// This thread's share of outputs [from, to) of a linear layer over x [rows, in], a tile at a time:
// then(first output, how many), the sums being in tile [rows][TILE].
template <class T, class Then>
static void product(const Team& team, const Linear& linear, const Input<T>* x, int64_t rows,
                    float* tile, int64_t from, int64_t to, Then then) {
  int64_t start = from / 16, work = (to + 15) / 16 - start;
  int64_t last = start + team.last(work);
  for (int64_t b = start + team.first(work); b < last; b += CHUNK) {
    int blocks = (int)std::min<int64_t>(CHUNK, last - b);
    const T* w = (const T*)linear.weight + b * linear.in * 16;
    multiply<T>(w, x, rows, linear.in, blocks, tile);
    int64_t first = b * 16, count = std::min(to - first, (int64_t)blocks * 16);
    if (linear.bias)
      for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < count; i++) tile[m * TILE + i] += linear.bias[first + i];
    then(first, count);
  }
}

// Norms and RoPE.

static inline float inverse_rms(const float* x, int64_t n, double eps) {
  V squares{};
  for (int64_t i = 0; i < n; i += 16) squares += load(x + i) * load(x + i);
  return 1.0f / std::sqrt(sum(squares) / (float)n + (float)eps);
}

template <class T>
static void normalise(const float* x, const float* gain, int64_t rows, int64_t n, double eps,
                      Input<T>* out) {
  for (int64_t m = 0; m < rows; m++, x += n, out += n) {
    float scale = inverse_rms(x, n, eps);
    for (int64_t i = 0; i < n; i += 16) put_input<T>(out + i, load(x + i) * scale * load(gain + i));
  }
}

// One head of queries or keys in place: RMSNorm where there is a gain, then RoPE (halves rotated).
static void prepare(float* x, const float* gain, int64_t d, double eps, const float* cos,
                    const float* sin) {
  if (gain) {
    float scale = inverse_rms(x, d, eps);
    for (int64_t i = 0; i < d; i++) x[i] = x[i] * scale * gain[i];
  }
  for (int64_t i = 0; i < d / 2; i++) {
    float low = x[i], high = x[i + d / 2];
    x[i] = low * cos[i] - high * sin[i];
    x[i + d / 2] = high * cos[i] + low * sin[i];
  }
}
