// Whole passes of a target and of a drafter over a few rows, each one call and one parallel region.
//
// Every number of a row is summed in the same order whatever rows stand beside it, however many
// they are and however threads divide the work: attention goes over a row's keys in text order, be
// they context or ancestors in a tree. So a row's result depends on its own text alone, bit by bit,
// in bf16 as in fp32 (tests/test_native.py). Do not compile with -ffast-math.
//
// T is the type of weights, cache and outputs: float or bf16. Sums, norms, softmax and the residual
// stream are fp32 either way.
#include "model.h"
#include "scorer.h"

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

// ----------------------------------------------------------------------------------- rows of a cache

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
