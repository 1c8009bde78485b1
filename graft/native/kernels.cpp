// Whole passes of a target and of a drafter over a few rows, each one call and one parallel region.
//
// A pass over few rows is bound by reading the weights once. They are packed for it: blocks of 16
// outputs, [outputs / 16][inputs][16] in fp32 and [outputs / 16][inputs / 2][16][2] in bf16, the
// layout of the dot-product instruction, so that one input, broadcast, meets 16 outputs and no sum
// crosses lanes. Up to 16 rows share one sweep over the weights.
//
// Every number of a row is summed in the same order whatever rows stand beside it, however many
// they are and however threads divide the work: attention goes over a row's keys in text order, be
// they context or ancestors in a tree. So a row's result depends on its own text alone, bit by bit,
// in bf16 as in fp32 (tests/test_native.py). Do not compile with -ffast-math.
//
// T is the type of weights, cache and outputs: float or bf16. Sums, norms, softmax and the residual
// stream are fp32 either way.

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// ---------------------------------------------------------------------------------- what is passed

struct Linear {  // packed; bias is fp32 or null
  const void* weight;
  const float* bias;
  int64_t out, in;
};

struct Layer {  // norms are fp32; q_norm and k_norm may be null
  const float *attention_norm, *q_norm, *k_norm, *feed_forward_norm;
  Linear qkv, output, gate_up, down;
};

struct Model {
  int64_t is_bf16, num_layers, hidden, heads, kv_heads, head_dim, intermediate;
  double eps;
  const Layer* layers;
  const void* embedding;   // [V, hidden] T, not packed
  const float* final_norm;
  Linear head;
  const float *cos, *sin;  // [positions, head_dim / 2] of RoPE
};

struct Slot {  // one sequence: its cache, and its rows of this pass, which lie together
  void* cache;  // [layers][keys, values][kv_heads][capacity][head_dim] T
  int64_t capacity, length, rows;
  const uint8_t* visible;  // [rows, rows]: row i sees new row j; it sees all `length` committed ones
};

struct Rows {
  int64_t count, num_slots;
  const int64_t *tokens, *positions;
  const Slot* slots;
};

// ------------------------------------------------------------------------------------- vectors of 16

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

// ------------------------------------------------------------------------------------------ threads

struct Barrier {
  std::atomic<int> waiting{0}, phase{0};
  int threads = 1;
  void wait() {
    if (threads == 1) return;
    int now = phase.load(std::memory_order_acquire);
    if (waiting.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      waiting.store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase.load(std::memory_order_acquire) == now; spins++) {
      if (spins > 4000) {
        sched_yield();  // somebody else needs this core
      } else {
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
    }
  }
};

struct Team {  // one of the threads that run a pass together
  int thread, threads;
  Barrier* barrier;
  int64_t first(int64_t work) const { return work * thread / threads; }
  int64_t last(int64_t work) const { return work * (thread + 1) / threads; }
  void wait() const { barrier->wait(); }
};

struct Arena {  // memory handed out piece by piece; without a base it only counts
  char* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t count) {
    int64_t at = used;
    used += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return (T*)(base + at);
  }
};

// Runs body(team, arena) on all threads, over memory that is kept for the next pass.
template <class Measure, class Body>
static void together(int threads, Measure measure, Body body) {
  thread_local std::vector<char> memory;
  Arena size{nullptr};
  measure(size);
  if ((int64_t)memory.size() < size.used + 64) memory.resize(size.used + 64);
  char* base = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    barrier.threads = omp_get_num_threads();
    body(Team{omp_get_thread_num(), barrier.threads, &barrier}, Arena{base});
  }
}

// ----------------------------------------------------------------------------------------- products

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

// ------------------------------------------------------------------------------------ norms and rope

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

// ---------------------------------------------------------------------------------------- attention

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

// ------------------------------------------------------------------------------------------- blocks

template <class T>
struct Buffers {
  float *x, *qkv, *tile, *scores;      // tile, scores: this thread's
  Input<T>*normed, *attended, *inner;  // normed: this thread's
  int *slot_of, *row_in_slot;          // of each row
  int *seen, *num_seen;                // [rows][most], [rows]: the new rows that each sees
  int64_t most = 0, longest = 0;       // rows of a slot; keys of a row

  Buffers(Arena& arena, const Model& m, const Rows& rows, int thread, int threads) {
    for (int64_t s = 0; s < rows.num_slots; s++) {
      most = std::max(most, rows.slots[s].rows);
      longest = std::max(longest, rows.slots[s].length + rows.slots[s].rows);
    }
    int64_t n = rows.count;
    x = arena.take<float>(n * m.hidden);
    qkv = arena.take<float>(n * (m.heads + 2 * m.kv_heads) * m.head_dim);
    attended = arena.take<Input<T>>(n * m.heads * m.head_dim);
    inner = arena.take<Input<T>>(n * m.intermediate);
    slot_of = arena.take<int>(n);
    row_in_slot = arena.take<int>(n);
    seen = arena.take<int>(n * most);
    num_seen = arena.take<int>(n);
    for (int t = 0; t < threads; t++) {  // every thread finds its own
      auto* own_tile = arena.take<float>(2 * n * TILE);
      auto* own_scores = arena.take<float>(BATCH * (longest + 32));
      auto* own_normed = arena.take<Input<T>>(n * m.hidden);
      if (t == thread) tile = own_tile, scores = own_scores, normed = own_normed;
    }
  }

  void index(const Rows& rows) {  // by one thread
    for (int s = 0, row = 0; s < rows.num_slots; s++) {
      const Slot& slot = rows.slots[s];
      for (int i = 0; i < slot.rows; i++, row++) {
        slot_of[row] = s;
        row_in_slot[row] = i;
        num_seen[row] = 0;
        for (int j = 0; j < slot.rows; j++)
          if (slot.visible[i * slot.rows + j]) seen[row * most + num_seen[row]++] = j;
      }
    }
  }
};

// Keys or values of one head of one layer: [capacity, head_dim].
template <class T>
static inline T* cached(const Slot& slot, const Model& m, int64_t layer, int is_value, int64_t head) {
  int64_t at = (layer * 2 + is_value) * m.kv_heads + head;
  return (T*)slot.cache + at * slot.capacity * m.head_dim;
}

// Puts a key or a value [d] into its cache row; keys are normed and rotated first.
template <class T>
static void remember(const Model& m, int64_t index, const Slot& slot, int64_t part, float* head,
                     int64_t position, int64_t row) {
  int64_t d = m.head_dim;
  int is_value = part >= m.kv_heads;
  if (!is_value)
    prepare(head, m.layers[index].k_norm, d, m.eps, m.cos + position * d / 2, m.sin + position * d / 2);
  T* to = cached<T>(slot, m, index, is_value, part % m.kv_heads) + row * d;
  for (int64_t c = 0; c < d; c += 16) store(to + c, load(head + c));
}

// One block: b.x [rows, hidden] in place.
template <class T>
static void run_layer(const Team& team, const Model& m, int64_t index, const Rows& rows,
                      const Buffers<T>& b) {
  const Layer& layer = m.layers[index];
  int64_t n = rows.count, d = m.head_dim, H = m.hidden, parts = m.heads + 2 * m.kv_heads;
  int64_t width = parts * d, group = m.heads / m.kv_heads;

  normalise<T>(b.x, layer.attention_norm, n, H, m.eps, b.normed);
  product<T>(team, layer.qkv, b.normed, n, b.tile, 0, width, [&](int64_t first, int64_t count) {
    for (int64_t r = 0; r < n; r++) memcpy(b.qkv + r * width + first, b.tile + r * TILE, count * 4);
  });
  team.wait();

  float scale = 1.0f / std::sqrt((float)d);
  for (int64_t i = team.first(n * parts), end = team.last(n * parts); i < end; i++) {
    int64_t r = i / parts, part = i % parts, position = rows.positions[r];
    float* head = b.qkv + r * width + part * d;
    if (part < m.heads) {
      prepare(head, layer.q_norm, d, m.eps, m.cos + position * d / 2, m.sin + position * d / 2);
      for (int64_t c = 0; c < d; c++) head[c] *= scale;
    } else {
      const Slot& slot = rows.slots[b.slot_of[r]];
      remember<T>(m, index, slot, part - m.heads, head, position, slot.length + b.row_in_slot[r]);
    }
  }
  team.wait();

  // Queries in the order kv head, row, head of the group: neighbours share keys and values.
  for (int64_t i = team.first(n * m.heads), end = team.last(n * m.heads); i < end;) {
    int64_t kv_head = i / (n * group), slot_index = b.slot_of[i / group % n];
    Query<T> queries[BATCH];
    int count = 0;
    for (; count < BATCH && i < end; count++, i++) {
      int64_t r = i / group % n, head = kv_head * group + i % group;
      if (i / (n * group) != kv_head || b.slot_of[r] != slot_index) break;
      queries[count] = {b.qkv + r * width + head * d, b.seen + r * b.most, b.num_seen[r],
                        b.scores + count * (b.longest + 32),
                        b.attended + (r * m.heads + head) * d, 0};
    }
    const Slot& slot = rows.slots[slot_index];
    attend<T>(queries, count, cached<T>(slot, m, index, 0, kv_head),
              cached<T>(slot, m, index, 1, kv_head), d, slot.length);
  }
  team.wait();

  auto add = [&](int64_t first, int64_t count) {
    for (int64_t r = 0; r < n; r++)
      for (int64_t c = 0; c < count; c += 16) {
        float* x = b.x + r * H + first + c;
        store(x, load(x) + load(b.tile + r * TILE + c));
      }
  };
  product<T>(team, layer.output, b.attended, n, b.tile, 0, H, add);
  team.wait();

  // Gate and up of the same columns are one thread's, so the activation needs no barrier.
  normalise<T>(b.x, layer.feed_forward_norm, n, H, m.eps, b.normed);
  const T* weight = (const T*)layer.gate_up.weight;
  int64_t inner = m.intermediate, blocks = inner / 16;
  float* up = b.tile + n * TILE;
  for (int64_t f = team.first(blocks), end = team.last(blocks); f < end; f += CHUNK) {
    int some = (int)std::min<int64_t>(CHUNK, end - f);
    multiply<T>(weight + f * 16 * H, b.normed, n, H, some, b.tile);
    multiply<T>(weight + (blocks + f) * 16 * H, b.normed, n, H, some, up);
    for (int64_t r = 0; r < n; r++)
      for (int64_t c = 0; c < some * 16; c += 16) {
        V gate = load(b.tile + r * TILE + c);
        V silu = gate / (exponential(-gate) + 1.0f);
        put_input<T>(b.inner + r * inner + f * 16 + c, silu * load(up + r * TILE + c));
      }
  }
  team.wait();
  product<T>(team, layer.down, b.inner, n, b.tile, 0, H, add);
  team.wait();
}

template <class T>
static void embed(const Model& m, int64_t token, float* x) {
  for (int64_t c = 0; c < m.hidden; c += 16)
    store(x + c, load((const T*)m.embedding + token * m.hidden + c));
}

// ---------------------------------------------------------------------------------- pass of a target

struct Wanted {  // of a target's pass; null where not
  int64_t first_row, num_taps;  // logits and best from this row on
  const int64_t* tapped;        // blocks whose outputs are wanted
  void *logits, *taps;          // T [rows - first_row, outputs of the head], [rows, num_taps * hidden]
  int64_t* best;                // the likeliest token, the first of equals
};

struct Best {
  V value;
  I token;
};

template <class T>
static void decode(const Model& m, const Rows& rows, const Wanted& wanted, int threads) {
  int64_t n = rows.count, H = m.hidden, vocabulary = m.head.out, asked = n - wanted.first_row;
  auto measure = [&](Arena& arena) {
    arena.take<Best>(asked * threads);
    Buffers<T>(arena, m, rows, 0, threads);
  };
  together(threads, measure, [&](const Team& team, Arena arena) {
    Best* all_best = arena.take<Best>(asked * team.threads);
    Buffers<T> b(arena, m, rows, team.thread, team.threads);
    if (team.thread == 0) b.index(rows);
    for (int64_t r = team.first(n); r < team.last(n); r++) embed<T>(m, rows.tokens[r], b.x + r * H);
    team.wait();
    for (int64_t layer = 0; layer < m.num_layers; layer++) {
      run_layer<T>(team, m, layer, rows, b);
      for (int64_t tap = 0; tap < wanted.num_taps; tap++) {
        if (wanted.tapped[tap] != layer) continue;
        for (int64_t r = team.first(n); r < team.last(n); r++) {
          T* to = (T*)wanted.taps + (r * wanted.num_taps + tap) * H;
          for (int64_t c = 0; c < H; c += 16) store(to + c, load(b.x + r * H + c));
        }
      }
    }
    if (asked == 0) return;
    Best* own = all_best + asked * team.thread;
    for (int64_t r = 0; r < asked; r++) own[r] = {all(-std::numeric_limits<float>::infinity()), I{}};
    normalise<T>(b.x + wanted.first_row * H, m.final_norm, asked, H, m.eps, b.normed);
    const I lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    product<T>(team, m.head, b.normed, asked, b.tile, 0, vocabulary,
               [&](int64_t first, int64_t count) {
                 for (int64_t r = 0; r < asked; r++) {
                   T* to = (T*)wanted.logits + r * vocabulary + first;
                   for (int64_t c = 0; c < count; c += 16) {
                     T out[16];
                     store(out, load(b.tile + r * TILE + c));
                     memcpy(to + c, out, std::min<int64_t>(16, count - c) * sizeof(T));
                     V value = load(out);  // rounded: equals are then equal here too
                     I token = lanes + (int32_t)(first + c);
                     I better = (value > own[r].value) & (token < (int32_t)vocabulary);
                     own[r].value = better ? value : own[r].value;
                     own[r].token = better ? token : own[r].token;
                   }
                 }
               });
    team.wait();
    for (int64_t r = team.first(asked); r < team.last(asked); r++) {
      float top = -std::numeric_limits<float>::infinity();
      int64_t token = 0;
      for (int t = 0; t < team.threads; t++)
        for (int i = 0; i < 16; i++) {
          float value = all_best[t * asked + r].value[i];
          int64_t at = all_best[t * asked + r].token[i];
          if (value > top || (value == top && at < token)) top = value, token = at;
        }
      wanted.best[r] = token;
    }
  });
}

// --------------------------------------------------------------------------------- pass of a drafter

struct Drafting {
  Linear fc;                 // taps to features
  const float* hidden_norm;
  const void* taps;          // T [new_taps, fc.in] of the tokens behind the cache's committed ones
  int64_t new_taps, candidates;
  void* hidden;              // T [D, hidden]
  int64_t* tokens;           // [D, candidates], rows of the head
  float *log_probs, *cosines;  // [D, candidates], [D - 1]
};

// The best k of logits [n, and room up to a multiple of 16], best first, the first of equals first.
static void candidates_of(float* logits, int64_t n, int64_t k, int64_t* tokens, float* log_probs) {
  for (int64_t i = n; i % 16; i++) logits[i] = -std::numeric_limits<float>::infinity();
  V most = load(logits), total{};
  for (int64_t i = 16; i < n; i += 16) most = larger(most, load(logits + i));
  float top = largest(most), least = -std::numeric_limits<float>::infinity();
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += 16) {
    V x = load(logits + i);
    total += exponential(x - top);
    if (!any(x > least)) continue;
    for (int64_t j = i; j < std::min(i + 16, n); j++) {
      if (found == k && !(logits[j] > least)) continue;
      int64_t at = found < k ? found++ : k - 1;
      for (; at > 0 && log_probs[at - 1] < logits[j]; at--)
        log_probs[at] = log_probs[at - 1], tokens[at] = tokens[at - 1];
      log_probs[at] = logits[j], tokens[at] = j;
      if (found == k) least = log_probs[k - 1];
    }
  }
  float norm = top + std::log(sum(total));
  for (int64_t i = 0; i < k; i++) log_probs[i] -= norm;
}

// Context features of new taps into the cache; then, where there are rows, a draft behind them:
// rows.slots[0].length counts the new taps already.
template <class T>
static void draft(const Model& m, const Rows& rows, const Drafting& drafting, int threads) {
  int64_t n = rows.count, c = drafting.new_taps, H = m.hidden, d = m.head_dim, D = n - 1;
  int64_t parts = 2 * m.kv_heads, width = parts * d, in = drafting.fc.in;
  int64_t room = (m.head.out + 15) / 16 * 16;
  const Slot& slot = rows.slots[0];
  struct Own {
    float *features, *keys_values, *logits, *tile;
    Input<T>*taps, *normed;
  };
  auto lay_out = [&](Arena& arena, int thread, int team) {
    Own own{arena.take<float>(c * H), arena.take<float>(m.num_layers * c * width),
            arena.take<float>(std::max<int64_t>(D, 0) * room), nullptr, nullptr, nullptr};
    for (int t = 0; t < team; t++) {
      auto* tile = arena.take<float>(c * TILE);
      auto* taps = arena.take<Input<T>>(std::is_same_v<Input<T>, T> ? 0 : c * in);
      auto* normed = arena.take<Input<T>>(c * H);
      if (t == thread) own.tile = tile, own.taps = taps, own.normed = normed;
    }
    return own;
  };
  auto measure = [&](Arena& arena) {
    lay_out(arena, 0, threads);
    Buffers<T>(arena, m, rows, 0, threads);
  };
  together(threads, measure, [&](const Team& team, Arena arena) {
    Own own = lay_out(arena, team.thread, team.threads);
    Buffers<T> b(arena, m, rows, team.thread, team.threads);
    if (team.thread == 0) b.index(rows);
    const Input<T>* taps = own.taps;
    if constexpr (std::is_same_v<Input<T>, T>) {
      taps = (const T*)drafting.taps;
    } else {
      for (int64_t i = 0; i < c * in; i += 16)
        put_input<T>(own.taps + i, load((const T*)drafting.taps + i));
    }
    product<T>(team, drafting.fc, taps, c, own.tile, 0, H, [&](int64_t first, int64_t count) {
      for (int64_t r = 0; r < c; r++)
        memcpy(own.features + r * H + first, own.tile + r * TILE, count * 4);
    });
    team.wait();
    normalise<T>(own.features, drafting.hidden_norm, c, H, m.eps, own.normed);
    for (int64_t layer = 0; layer < m.num_layers; layer++) {
      float* to = own.keys_values + layer * c * width;
      int64_t from = m.heads * d;
      product<T>(team, m.layers[layer].qkv, own.normed, c, own.tile, from, from + width,
                 [&](int64_t first, int64_t count) {
                   for (int64_t r = 0; r < c; r++)
                     memcpy(to + r * width + first - from, own.tile + r * TILE, count * 4);
                 });
    }
    team.wait();
    int64_t work = m.num_layers * c * parts, start = slot.length - c;
    for (int64_t i = team.first(work); i < team.last(work); i++) {
      int64_t part = i % parts, r = i / parts % c, layer = i / parts / c;
      float* head = own.keys_values + (layer * c + r) * width + part * d;
      remember<T>(m, layer, slot, part, head, start + r, start + r);
    }
    if (n == 0) return;
    for (int64_t r = team.first(n); r < team.last(n); r++) embed<T>(m, rows.tokens[r], b.x + r * H);
    team.wait();
    for (int64_t layer = 0; layer < m.num_layers; layer++) run_layer<T>(team, m, layer, rows, b);
    float* x = b.x + H;  // row 0 is the root
    normalise<T>(x, m.final_norm, D, H, m.eps, b.normed);
    product<T>(team, m.head, b.normed, D, b.tile, 0, m.head.out, [&](int64_t first, int64_t count) {
      for (int64_t r = 0; r < D; r++)
        memcpy(own.logits + r * room + first, b.tile + r * TILE, count * 4);
    });
    team.wait();
    int64_t k = drafting.candidates;
    for (int64_t r = team.first(D); r < team.last(D); r++) {
      candidates_of(own.logits + r * room, m.head.out, k, drafting.tokens + r * k,
                    drafting.log_probs + r * k);
      float scale = inverse_rms(x + r * H, H, m.eps);
      V dot{}, squares{}, before{};
      for (int64_t i = 0; i < H; i += 16) {
        V gain = load(m.final_norm + i);
        V state = load(x + r * H + i) * scale * gain;
        store((T*)drafting.hidden + r * H + i, state);
        if (r == 0) continue;
        V other = load(x + (r - 1) * H + i) * gain;  // its scale cancels
        dot += state * other, squares += state * state, before += other * other;
      }
      if (r) drafting.cosines[r - 1] = sum(dot) / std::sqrt(sum(squares) * sum(before));
    }
  });
}

// ---------------------------------------------------------------------------------- edges of a draft

struct Scorer {  // the bilinear term of scorer/terms.py, and the temperatures around it
  Linear gate_state;  // fp32 [2 * width, hidden]: what opens the gate, and the state's own say
  const float *depth, *none;                   // [D, width], [width]
  const float *temperature, *rest, *offset;    // [D] each
  const _Float16 *parent, *child, *grandparent;  // [V, width]; the last may be null
  int64_t D, K, width, hidden;
  double shrink;
};

struct Scored {
  int64_t root, hidden_is_bf16, stride;  // of tokens and log_probs, [D, stride]
  const int64_t* tokens;
  const float* log_probs;
  const void* hidden;  // [D, hidden]
  float* rows;         // [D, 1 + K + G, K + 1] logits that add up
};

static inline V load(const _Float16* p) {
  typedef _Float16 F __attribute__((vector_size(32)));
  F x;
  memcpy(&x, p, 32);
  return __builtin_convertvector(x, V);
}

static void score(const Scorer& s, const Scored& to) {
  int64_t D = s.D, K = s.K, R = s.width, H = s.hidden, fans = K * (s.grandparent ? 2 : 1);
  auto body = [&](const Team& team, Arena arena) {
    float *states = arena.take<float>(D * H), *tile = arena.take<float>(D * TILE);
    float *projected = arena.take<float>(D * 2 * R), *query = arena.take<float>(R);
    float *children = arena.take<float>((K + 1) * R), *scores = arena.take<float>(K + 17);
    for (int64_t d = 0; d < D; d++) {
      float* x = states + d * H;
      for (int64_t i = 0; i < H; i += 16)
        store(x + i, to.hidden_is_bf16 ? load((const bf16*)to.hidden + d * H + i)
                                       : load((const float*)to.hidden + d * H + i));
      float scale = inverse_rms(x, H, 1e-6);
      for (int64_t i = 0; i < H; i += 16) store(x + i, load(x + i) * scale);
    }
    product<float>(team, s.gate_state, states, D, tile, 0, 2 * R, [&](int64_t first, int64_t count) {
      for (int64_t d = 0; d < D; d++)
        memcpy(projected + d * 2 * R + first, tile + d * TILE, count * 4);
    });
    memcpy(children + K * R, s.none, R * 4);
    for (int64_t d = 0; d < D; d++) {
      const int64_t* tokens = to.tokens + d * to.stride;
      float *gate = projected + d * 2 * R, *state = gate + R;
      for (int64_t i = 0; i < R; i += 16) {
        V open = load(gate + i) + load(s.depth + d * R + i);
        store(gate + i, 2.0f / (exponential(-open) + 1.0f));
      }
      for (int64_t c = 0; c < K; c++)
        for (int64_t i = 0; i < R; i += 16) store(children + c * R + i, load(s.child + tokens[c] * R + i));

      float *row = to.rows + d * (1 + fans) * (K + 1), mass = 0;
      for (int64_t c = 0; c < K; c++) {
        float log_prob = to.log_probs[d * to.stride + c];
        mass += std::exp(log_prob);
        row[c] = log_prob * s.temperature[d];
      }
      row[K] = std::log(std::max(1 - mass, 1e-4f)) * s.rest[d] + s.offset[d];
      for (int64_t f = 0; f < fans; f++) {
        row += K + 1;
        bool grand = f >= K;
        int64_t above = d - 1 - grand;  // the depth of that ancestor, the root's where there is none
        int64_t token = above < 0 ? to.root : to.tokens[above * to.stride + f % K];
        if (grand && d == 0) {  // the root's predecessor is not in a draft
          std::fill(row, row + K + 1, 0.0f);
          continue;
        }
        const _Float16* table = (grand ? s.grandparent : s.parent) + token * R;
        for (int64_t i = 0; i < R; i += 16) {
          V x = load(table + i) * load(gate + i);
          store(query + i, grand ? x : x + load(state + i));
        }
        for (int64_t c = 0; c <= K; c += 16) {
          const float* keys[16];
          for (int64_t i = 0; i < 16; i++) keys[i] = children + std::min(c + i, K) * R;
          store(scores + c, scores_of(query, keys, R) * (float)s.shrink);
        }
        memcpy(row, scores, (K + 1) * 4);
      }
    }
  };
  auto measure = [&](Arena& arena) {  // six pieces, each rounded up to 64 bytes
    arena.take<float>(D * (H + TILE + 2 * R) + R + (K + 1) * R + K + 17 + 6 * 16);
  };
  together(1, measure, body);
}

// ---------------------------------------------------------------------------------- rows of a cache

// Moves rows of every [capacity, row_bytes] block of a cache together: row from[i] to place `to + i`.
static void move_rows(char* cache, int64_t blocks, int64_t capacity, int64_t row_bytes, int64_t to,
                      const int64_t* from, int64_t count) {
  for (int64_t b = 0; b < blocks; b++) {
    char* rows = cache + b * capacity * row_bytes;
    for (int64_t i = 0; i < count; i++)  // ascending: none is overwritten before it has moved
      if (from[i] != to + i) memcpy(rows + (to + i) * row_bytes, rows + from[i] * row_bytes, row_bytes);
  }
}

// ------------------------------------------------------------------------------------------- exports

template <class T>
static void pack(const T* weight, int64_t out, int64_t in, T* packed) {
  constexpr int64_t together = std::is_same_v<T, bf16> ? 2 : 1;
  for (int64_t o = 0; o < (out + 15) / 16 * 16; o++)
    for (int64_t k = 0; k < in; k++) {
      int64_t at = o / 16 * in * 16 + k / together * 16 * together + o % 16 * together + k % together;
      packed[at] = o < out ? weight[o * in + k] : T{};
    }
}

template <class T>
static void linear(const Linear& linear, const T* x, int64_t rows, T* y, int threads) {
  int64_t in = linear.in, copied = std::is_same_v<Input<T>, T> ? 0 : rows * in;
  auto measure = [&](Arena& arena) {
    arena.take<Input<T>>(copied);
    for (int t = 0; t < threads; t++) arena.take<float>(rows * TILE);
  };
  together(threads, measure, [&](const Team& team, Arena arena) {
    Input<T>* inputs = arena.take<Input<T>>(copied);
    float* tile = nullptr;
    for (int t = 0; t <= team.thread; t++) tile = arena.take<float>(rows * TILE);
    if constexpr (std::is_same_v<Input<T>, T>) {
      inputs = (Input<T>*)x;
    } else {
      for (int64_t i = team.first(rows * in / 16) * 16; i < team.last(rows * in / 16) * 16; i += 16)
        put_input<T>(inputs + i, load(x + i));
      team.wait();
    }
    product<T>(team, linear, inputs, rows, tile, 0, linear.out, [&](int64_t first, int64_t count) {
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < count; c += 16) {
          T out[16];
          store(out, load(tile + r * TILE + c));
          memcpy(y + r * linear.out + first + c, out, std::min<int64_t>(16, count - c) * sizeof(T));
        }
    });
  });
}

extern "C" {
void graft_pack(int is_bf16, const void* weight, int64_t out, int64_t in, void* packed) {
  is_bf16 ? pack((const bf16*)weight, out, in, (bf16*)packed)
          : pack((const float*)weight, out, in, (float*)packed);
}
void graft_linear(int is_bf16, const Linear* layer, const void* x, int64_t rows, void* y, int threads) {
  is_bf16 ? linear(*layer, (const bf16*)x, rows, (bf16*)y, threads)
          : linear(*layer, (const float*)x, rows, (float*)y, threads);
}
void graft_decode(const Model* m, const Rows* rows, const Wanted* wanted, int threads) {
  m->is_bf16 ? decode<bf16>(*m, *rows, *wanted, threads) : decode<float>(*m, *rows, *wanted, threads);
}
void graft_score(const Scorer* scorer, const Scored* scored) { score(*scorer, *scored); }
void graft_move_rows(void* cache, int64_t blocks, int64_t capacity, int64_t row_bytes, int64_t to,
                     const int64_t* from, int64_t count) {
  move_rows((char*)cache, blocks, capacity, row_bytes, to, from, count);
}
void graft_draft(const Model* m, const Rows* rows, const Drafting* drafting, int threads) {
  m->is_bf16 ? draft<bf16>(*m, *rows, *drafting, threads)
             : draft<float>(*m, *rows, *drafting, threads);
}
}
