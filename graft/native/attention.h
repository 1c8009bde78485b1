// Attention of queries over one head's keys and values: the committed rows of a sequence, which all of
// its queries see, and those new rows that each of them sees. Both come in text order.
#pragma once
#include <cmath>
#include <limits>
#include <type_traits>

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

// A query's products with 16 keys [D]; D = 0 takes the width from d.
template <int D>
static inline V scores_of(const float* query, const float* const* keys, int64_t d) {
  V sums[16] = {};
  for (int64_t c = 0; c < (D ? D : d); c += 16) {
    V q = load(query + c);
    for (int i = 0; i < 16; i++) sums[i] += load(keys[i] + c) * q;
  }
  return sums_of(sums);
}

template <int D>
static inline V scores_of(const Input<bf16>* query, const bf16* const* keys, int64_t d) {
  V sums[16] = {};
#ifdef __AVX512BF16__
  if (d % 32 == 0) {
    for (int64_t c = 0; c < (D ? D : d); c += 32) {
      __m512bh q = (__m512bh)_mm512_loadu_si512(query + c);
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
  const Input<T>* q;  // [d], scaled
  const int* seen;    // new rows that it sees, in text order
  int num_seen;
  float* scores;      // [context + num_seen, and room for 32]
  Input<T>* out;      // [d]
  float scale;        // of the weights, once they are known

  // The row of keys or values at place j of its text.
  const T* row(const T* rows, int64_t j, int64_t d, int64_t context) const {
    return rows + (j < context ? j : context + seen[j - context]) * d;
  }
};

// scores[from ..] against the rows at places `from` to `to` of a query's text.
template <class T, int D>
static void score_rows(const Query<T>& query, const T* keys, int64_t d, int64_t context, int64_t from,
                       int64_t to) {
  const T* rows[16];
  for (int64_t j = from; j < to; j += 16) {
    for (int i = 0; i < 16; i++) rows[i] = query.row(keys, std::min(j + i, to - 1), d, context);
    store(query.scores + j, scores_of<D>(query.q, rows, d));
  }
}

// Scores of all places of a query's text; where D is known, sixteen neighbours need no addresses.
template <class T, int D>
static void score(const Query<T>& query, const T* keys, int64_t d, int64_t context) {
  int64_t whole = 0;
  if constexpr (D > 0) {
    for (; whole + 16 <= context; whole += 16) {
      const T* first = keys + whole * D;
      const T* rows[16] = {first,          first + D,      first + 2 * D,  first + 3 * D,
                           first + 4 * D,  first + 5 * D,  first + 6 * D,  first + 7 * D,
                           first + 8 * D,  first + 9 * D,  first + 10 * D, first + 11 * D,
                           first + 12 * D, first + 13 * D, first + 14 * D, first + 15 * D};
      store(query.scores + whole, scores_of<D>(query.q, rows, D));
    }
  }
  score_rows<T, D>(query, keys, d, context, whole, context + query.num_seen);
}

// Weighted sums of value rows for Q queries, N vectors of 16 from column c on.
template <class T, int Q, int N>
static void weigh(const Query<T>* queries, const T* values, int64_t d, int64_t context, int64_t c) {
  V sums[Q][N] = {};
  for (int64_t j = 0; j < context; j++) {
    V v[N];
    for (int n = 0; n < N; n++) v[n] = load(values + j * d + c + 16 * n);
    for (int q = 0; q < Q; q++)
      for (int n = 0; n < N; n++) sums[q][n] += v[n] * queries[q].scores[j];
  }
  for (int q = 0; q < Q; q++) {
    for (int64_t j = context; j < context + queries[q].num_seen; j++) {
      const T* row = queries[q].row(values, j, d, context) + c;
      for (int n = 0; n < N; n++) sums[q][n] += load(row + 16 * n) * queries[q].scores[j];
    }
    for (int n = 0; n < N; n++) put_input<T>(queries[q].out + c + 16 * n, sums[q][n] * queries[q].scale);
  }
}

#ifdef __AVX512BF16__
// The same in bf16, two places of the text at a time (they are pairs by place, so a pair is the same
// whatever is context and whatever is new), N times 32 columns. Weights are bf16 here.
template <int N>
static inline void two_rows(const bf16* one, const bf16* other, __m512bh (*both)[2]) {
  for (int n = 0; n < N; n++) {
    __m512i a = _mm512_loadu_si512(one + 32 * n), b = _mm512_loadu_si512(other + 32 * n);
    both[n][0] = (__m512bh)_mm512_unpacklo_epi16(a, b);
    both[n][1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
  }
}

template <int N>
static inline void add_pair(__m512 (*sums)[2], const float* weights, int64_t j, __m512bh (*both)[2]) {
  int32_t pair;
  memcpy(&pair, (const bf16*)weights + j, 4);
  __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
  for (int n = 0; n < N; n++)
    for (int half = 0; half < 2; half++)
      sums[n][half] = _mm512_dpbf16_ps(sums[n][half], both[n][half], weight);
}

template <int Q, int N>
static void weigh_pairs(const Query<bf16>* queries, const bf16* values, int64_t d, int64_t context,
                        int64_t c) {
  __m512 sums[Q][N][2] = {};
  __m512bh both[N][2];
  int64_t shared = context / 2 * 2;
  for (int64_t j = 0; j < shared; j += 2) {
    two_rows<N>(values + j * d + c, values + (j + 1) * d + c, both);
    for (int q = 0; q < Q; q++) add_pair<N>(sums[q], queries[q].scores, j, both);
  }
  for (int q = 0; q < Q; q++) {
    const Query<bf16>& query = queries[q];
    int64_t end = context + query.num_seen;
    for (int64_t j = shared; j < end; j += 2) {  // an odd one's partner weighs nothing
      int64_t next = std::min(j + 1, end - 1);
      two_rows<N>(query.row(values, j, d, context) + c, query.row(values, next, d, context) + c, both);
      add_pair<N>(sums[q], query.scores, j, both);
    }
    for (int n = 0; n < N; n++) {  // pairs were taken four columns at a time
      V low = (V)sums[q][n][0] * query.scale, high = (V)sums[q][n][1] * query.scale;
      bf16* out = query.out + c + 32 * n;
      put_input<bf16>(out, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7,
                                                   20, 21, 22, 23));
      put_input<bf16>(out + 16, __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12,
                                                        13, 14, 15, 28, 29, 30, 31));
    }
  }
}
#endif

template <class T>
static constexpr bool weighs_pairs(int64_t d) {
#ifdef __AVX512BF16__
  return std::is_same_v<T, bf16> && d % 32 == 0;
#else
  return d < 0;
#endif
}

template <class T, int Q>
static void weigh_all(const Query<T>* queries, const T* values, int64_t d, int64_t context) {
  int64_t c = 0;
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, bf16>) {
    if (weighs_pairs<T>(d)) {
      for (; c + 64 <= d; c += 64) weigh_pairs<Q, 2>(queries, values, d, context, c);
      for (; c < d; c += 32) weigh_pairs<Q, 1>(queries, values, d, context, c);
      return;
    }
  }
#endif
  for (; c + 64 <= d; c += 64) weigh<T, Q, 4>(queries, values, d, context, c);
  for (; c < d; c += 16) weigh<T, Q, 1>(queries, values, d, context, c);
}

// Scores to weights exp(score - largest), in place; as bf16 where value rows are taken in pairs.
template <class T>
static void weights_of(Query<T>& query, int64_t n, int64_t d) {
  float* s = query.scores;
  store(s + n, all(-std::numeric_limits<float>::infinity()));
  V best = load(s), total{};
  for (int64_t j = 16; j < n; j += 16) best = larger(best, load(s + j));
  float top = largest(best);
  for (int64_t j = 0; j < n; j += 16) {
    V x = load(s + j);
    V e = x > -1e30f ? exponential(x - top) : V{};
    if (weighs_pairs<T>(d)) {
      store((bf16*)s + j, e);
      e = load((bf16*)s + j);
    } else {
      store(s + j, e);
    }
    total += e;
  }
  query.scale = 1.0f / sum(total);
}

// softmax(q K) V of up to BATCH queries over one head's keys and values of one sequence.
template <class T>
static void attend(Query<T>* queries, int count, const T* keys, const T* values, int64_t d,
                   int64_t context) {
  for (int q = 0; q < count; q++) {
    if (d == 64)
      score<T, 64>(queries[q], keys, d, context);
    else if (d == 128)
      score<T, 128>(queries[q], keys, d, context);
    else
      score<T, 0>(queries[q], keys, d, context);
    weights_of<T>(queries[q], context + queries[q].num_seen, d);
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
