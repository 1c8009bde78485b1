// Attention of queries over one head's keys and values: the committed rows of a sequence, which all of
// its queries see, and those new rows that each of them sees. Both come in text order.
#pragma once
#include <cmath>
#include <limits>

#include "vectors.h"

constexpr int BATCH = 6;  // queries that share a sweep over keys and values

// Sums over the lanes of 16 vectors, all in the same order.
static inline V sums_of(const V* v) {
  V a[8], b[4], c[2];
  for (int i = 0; i < 8; i++) {
    V x = v[2 * i], y = v[2 * i + 1];
    a[i] = __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 4; i++) {
    V x = a[2 * i], y = a[2 * i + 1];
    b[i] = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int i = 0; i < 2; i++) {
    V x = b[2 * i], y = b[2 * i + 1];
    c[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  V x = c[0], y = c[1];
  return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// A query's products with 16 keys.
static inline V scores_of(const float* query, const float* const* keys, int64_t d) {
  V sums[16] = {};
  for (int64_t c = 0; c < d; c += 16) {
    V q = load(query + c);
    for (int i = 0; i < 16; i++) sums[i] += load(keys[i] + c) * q;
  }
  return sums_of(sums);
}

static inline V scores_of(const float* query, const bf16* const* keys, int64_t d) {
  V sums[16] = {};
#ifdef __AVX512BF16__
  if (d % 32 == 0) {
    for (int64_t c = 0; c < d; c += 32) {
      __m512bh q = _mm512_cvtne2ps_pbh((__m512)load(query + c + 16), (__m512)load(query + c));
      for (int i = 0; i < 16; i++)
        sums[i] = (V)_mm512_dpbf16_ps((__m512)sums[i], q,
                                      (__m512bh)_mm512_loadu_si512(keys[i] + c));
    }
    return sums_of(sums);
  }
#endif
  for (int64_t c = 0; c < d; c += 16) {
    V q = load(query + c);
    for (int i = 0; i < 16; i++) sums[i] += load(keys[i] + c) * q;
  }
  return sums_of(sums);
}

template <class T>
struct Query {
  const float* q;   // [d], scaled
  const int* seen;  // new rows that it sees, in text order
  int num_seen;
  float* scores;    // [context + num_seen, and room for 32]
  Input<T>* out;    // [d]
  float scale;      // of the weights, once they are known
};

// Weighted sums of value rows for Q queries, N vectors of 16 from column c on.
template <class T, int Q, int N>
static void weigh(Query<T>* queries, const T* values, int64_t d, int64_t context, int64_t c) {
  V sums[Q][N] = {};
  for (int64_t j = 0; j < context; j++) {
    V v[N];
    for (int n = 0; n < N; n++) v[n] = load(values + j * d + c + 16 * n);
    for (int q = 0; q < Q; q++)
      for (int n = 0; n < N; n++) sums[q][n] += v[n] * queries[q].scores[j];
  }
  for (int q = 0; q < Q; q++) {
    for (int i = 0; i < queries[q].num_seen; i++) {
      const T* row = values + (context + queries[q].seen[i]) * d + c;
      for (int n = 0; n < N; n++) sums[q][n] += load(row + 16 * n) * queries[q].scores[context + i];
    }
    for (int n = 0; n < N; n++) put_input<T>(queries[q].out + c + 16 * n, sums[q][n] * queries[q].scale);
  }
}

template <class T, int Q>
static void weigh_all(Query<T>* queries, const T* values, int64_t d, int64_t context) {
  int64_t c = 0;
  for (; c + 64 <= d; c += 64) weigh<T, Q, 4>(queries, values, d, context, c);
  for (; c < d; c += 16) weigh<T, Q, 1>(queries, values, d, context, c);
}

// softmax(q K) V of up to BATCH queries over one head's keys and values of one slot.
template <class T>
static void attend(Query<T>* queries, int count, const T* keys, const T* values, int64_t d,
                   int64_t context) {
  const T* rows[16];
  for (int64_t j = 0; j < context; j += 16) {
    for (int i = 0; i < 16; i++) rows[i] = keys + std::min(j + i, context - 1) * d;
    for (int q = 0; q < count; q++) store(queries[q].scores + j, scores_of(queries[q].q, rows, d));
  }
  for (int q = 0; q < count; q++) {
    Query<T>& query = queries[q];
    float* s = query.scores;
    for (int j = 0; j < query.num_seen; j += 16) {
      for (int i = 0; i < 16; i++)
        rows[i] = keys + (context + query.seen[std::min(j + i, query.num_seen - 1)]) * d;
      store(s + context + j, scores_of(query.q, rows, d));
    }
    int64_t n = context + query.num_seen;
    store(s + n, all(-std::numeric_limits<float>::infinity()));
    V best = load(s), total{};
    for (int64_t j = 16; j < n; j += 16) best = larger(best, load(s + j));
    float top = largest(best);
    for (int64_t j = 0; j < n; j += 16) {
      V x = load(s + j);
      V e = x > -1e30f ? exponential(x - top) : V{};
      store(s + j, e);
      total += e;
    }
    query.scale = 1.0f / sum(total);
  }
  static_assert(BATCH == 6);
  switch (count) {
    case 1: return weigh_all<T, 1>(queries, values, d, context);
    case 2: return weigh_all<T, 2>(queries, values, d, context);
    case 3: return weigh_all<T, 3>(queries, values, d, context);
    case 4: return weigh_all<T, 4>(queries, values, d, context);
    case 5: return weigh_all<T, 5>(queries, values, d, context);
    case 6: return weigh_all<T, 6>(queries, values, d, context);
  }
}
