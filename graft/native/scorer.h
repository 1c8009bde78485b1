// Scores of all edges of a draft by the bilinear scorer (scorer/terms.py).
#pragma once
#include <cmath>

#include "products.h"

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
