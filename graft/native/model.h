// A decoder's weights and the rows of a pass, as Python hands them over (structs.py), and one block.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "products.h"

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
