// A whole step of a Llama-like model on a CPU: called by native.py, without Python or torch in
// between. Written for any width of vectors (vectors.h).
//
// Bits. Every result of a row is computed by one chain of operations whose order depends on nothing
// but the row: products add over the input features in order, attention adds over positions in
// order, and a hidden position adds exactly 0. So a row has the same bits in any batch, window and
// split of the prompt, and with any number of threads.
//
// Shapes: T tokens, N features, F features of the feed-forward, A heads of a token (queries, keys,
// values), D head size, V vocabulary. A matrix [out, in] is stored in panels of PANEL outputs:
// float32 [out / PANEL, in, PANEL]; bfloat16 so, or in pairs [out / PANEL, in / 2, PANEL, 2], as
// bfloat16_products.h multiplies them; 8 and 4 bits: quantized_products.h.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "step_threads.h"
#include "vectors.h"

namespace {

constexpr int CHUNK = 128;   // positions of a KV block
constexpr int ATTENDED = 36; // query rows that share transposed keys; bfloat16: 64
constexpr long CACHED = 768 * 1024; // bytes of rows that stay in a core's cache beside the panels

// Ask for memory that is read soon.
inline void fetch(const void *memory, long bytes) {
  for (long i = 0; i < bytes; i += 64)
    __builtin_prefetch(static_cast<const char *>(memory) + i, 0, 2);
}

// Two bfloat16. Rows have such words too, and their two products are added (bfloat16_products.h).
enum pair : uint32_t {};
inline vec load(const pair *from) { return load(reinterpret_cast<const float *>(from)); }

// A value of a row times the weights of a panel, added to sums.
template <class Weight> inline vec add_product(vec value, vec weights, vec sum) {
  return multiply_add(value, weights, sum);
}

// Products of rows and a panel, in a chain over the input features. `add`: to what is there. Weights
// are float32, bfloat16 that become float32 in registers, or pairs.
template <int R, class Weight, bool FETCHES>
void block_of(const float *rows, long stride, const Weight *panel, long panel_stride, long depth,
              float *to, long to_stride, bool add, const Weight *next) {
  vec sums[R][PARTS];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < PARTS; ++i)
      sums[r][i] = vec{};
  for (long k = 0; k < depth; ++k) {
    const Weight *line = panel + k * panel_stride;
    for (unsigned i = 0; i < PANEL; i += 64 / sizeof(Weight))
      __builtin_prefetch(line + 4096 / sizeof(Weight) + i, 0, 3);
    if constexpr (FETCHES)
      __builtin_prefetch(next + k * (PANEL / 2), 0, 2);
    vec weights[PARTS];
    for (int i = 0; i < PARTS; ++i)
      weights[i] = load(line + i * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const vec value = all(rows[r * stride + k]);
      for (int i = 0; i < PARTS; ++i)
        sums[r][i] = add_product<Weight>(value, weights[i], sums[r][i]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < PARTS; ++i) {
      float *out = to + r * to_stride + i * LANES;
      // Added last: what is there may be large, and would round each term of the sum.
      store(out, add ? load(out) + sums[r][i] : sums[r][i]);
    }
}

using BlockSizes = std::make_integer_sequence<int, ROWS>; // one less than the rows of a block

// `next`: the panel that follows. The first two of several blocks of rows prefetch half of it each,
// so that memory is also read while the second one finds this panel in the cache.
template <class Weight>
void multiply(const float *rows, long stride, int count, const Weight *panel, long panel_stride,
              long depth, float *to, long to_stride, bool add, const Weight *next) {
  constexpr auto table = []<bool FETCHES, int... R>(std::integer_sequence<int, R...>) {
    return std::array{block_of<R + 1, Weight, FETCHES>...};
  };
  constexpr auto plain = table.template operator()<false>(BlockSizes{});
  constexpr auto fetching = table.template operator()<true>(BlockSizes{});
  const int blocks = (count + ROWS - 1) / ROWS, each = (count + blocks - 1) / blocks;
  for (int r = 0; r < count; r += each) {
    const int now = std::min(each, count - r) - 1;
    const auto block = blocks > 1 && r <= each ? fetching[now] : plain[now];
    block(rows + r * stride, stride, panel, panel_stride, depth, to + r * to_stride, to_stride, add,
          next + (r ? depth * (PANEL / 2) : 0));
  }
}

} // namespace

#include "quantized_products.h"

#include "bfloat16_products.h"

extern "C" { // What native.py fills. `long` is 64 bits.

enum Form { FLOAT32, BFLOAT16, INT8, INT4 };

struct Matrix {
  const void *panels;
  const float *bias; // or null; padded to whole panels
  long inputs, outputs;
  Form form;
  // With 8 and 4 bits: from this number of rows on, rows are rounded to bfloat16 and multiplied as
  // such, by weights that are unpacked once for many of them. Such rows have other bits. 0: never.
  long unpacked_from;
};

struct Layer {
  const float *input_norm, *middle_norm, *query_norm, *key_norm; // the last two may be null
  Matrix project, output, gate_and_up, down;
  void *slots; // [2 x keys, slots, D]: keys, then values
};

struct Model {
  const void *embedding; // [V, N]
  const float *last_norm;
  Matrix head;
  const float *cosines, *sines; // [positions, D / 2]
  const Layer *layers;
  long num_layers, features, inner, num_queries, num_keys, head_size, num_slots;
  float epsilon, scaling;
};

struct Piece { // a slice of the step
  long first_token, num_tokens, start;
  const int *blocks;
  const uint8_t *hidden; // [tokens, hidden_width] for slots from hidden_start on; null for a chain
  long hidden_start, hidden_width;
};

struct Step {
  const int *token_ids, *positions;
  const long *slots; // of each token in the cache
  const int *logit_rows;
  const Piece *pieces;
  long num_tokens, num_logits, num_pieces;
  float *logits; // [logit rows, V]
};
}

namespace {

// Act: the rows of a product. Stored: the embedding and KV.
template <class Act, class Stored = Act> struct Run {
  const Model &model;
  const Step &step;
  float *hidden, *heads; // [T, N] and [T, A x D]
  Act *normed, *attended, *inner;

  static void norm(const float *row, const float *weight, float epsilon, long size, Act *to) {
    vec squares{};
    for (long i = 0; i < size; i += LANES)
      squares = multiply_add(load(row + i), load(row + i), squares);
    const float factor = 1.0f / std::sqrt(sum_of(squares) / float(size) + epsilon);
    for (long i = 0; i < size; i += LANES)
      store(to + i, load(row + i) * factor * load(weight + i));
  }

  void norm_rows(const float *weight) {
    const long each = step.num_tokens <= 8 ? step.num_tokens : 8;
    phase((step.num_tokens + each - 1) / each, [&](int tile) {
      for (long t = tile * each; t < std::min(step.num_tokens, (tile + 1) * each); ++t)
        norm(hidden + t * model.features, weight, model.epsilon, model.features,
             normed + t * model.features);
    });
  }

  // Rows of a tile: as many as stay in the cache. `work(first, count, panel)` computes a tile.
  template <class Work> static void over(long rows, long inputs, long panels, Work &&work) {
    long each = CACHED / (inputs * long(sizeof(Act))) / 96 * 96;
    each = std::min(std::max(each, 96L), rows);
    phase((rows + each - 1) / each * panels, [&](int tile) {
      long first = tile / panels * each;
      work(first, int(std::min(each, rows - first)), tile % panels);
    });
  }

  // Sums of groups of each row, if the matrix needs them. They are there until the next product.
  static const float *sums_of(const Matrix &matrix, const Act *rows, long count) {
    if constexpr (sizeof(Act) == 4)
      if (matrix.form == INT4) {
        static Scratch scratch;
        const long groups = matrix.inputs / quantized::GROUP;
        float *sums = reinterpret_cast<float *>(scratch.get(size_t(4 * count * groups)));
        quantized::sum_groups(rows, count, matrix.inputs, sums);
        return sums;
      }
    return nullptr;
  }

  static const float *sums_at(const float *sums, const Matrix &matrix, long row) {
    return sums ? sums + row * (matrix.inputs / quantized::GROUP) : nullptr;
  }

  static bool has_few_bits(const Matrix &matrix) {
    return matrix.form == INT8 || matrix.form == INT4;
  }

  // A panel as it is stored.
  static const uint8_t *stored_at(const Matrix &matrix, long panel) {
    const long bytes = has_few_bits(matrix)
                           ? quantized::panel_bytes(matrix.form == INT4, matrix.inputs)
                           : PANEL * matrix.inputs * (matrix.form == FLOAT32 ? 4 : 2);
    return static_cast<const uint8_t *>(matrix.panels) + panel * bytes;
  }

  // A panel for panel_of. Weights of few bits that multiply bfloat16 become such, in one of the two
  // places that this thread has for them.
  static const void *panel_at(const Matrix &matrix, long panel, int place = 0) {
    const uint8_t *stored = stored_at(matrix, panel);
    if constexpr (sizeof(Act) == 2)
      if (has_few_bits(matrix)) {
        thread_local Scratch places[2];
        Act *unpacked = reinterpret_cast<Act *>(places[place].get(2 * PANEL * matrix.inputs));
        unpack(stored, matrix.form == INT4, matrix.inputs, unpacked);
        return unpacked;
      }
    return stored;
  }

  // A panel's part of the product: [count, PANEL]. `weights`: the panel; `next`: the one that this
  // thread needs next. `sums`: those of the first of `rows`, if any.
  static void panel_of(const Matrix &matrix, long panel, const void *weights, const void *next,
                       const Act *rows, const float *sums, int count, float *to) {
    const long inputs = matrix.inputs;
    if constexpr (sizeof(Act) == 2) {
      multiply(rows, inputs, count, static_cast<const half *>(weights), inputs, to, PANEL, false, 2048,
               next);
      if (matrix.form == INT8)
        quantized::scale(stored_at(matrix, panel), count, to);
    } else if (has_few_bits(matrix)) {
      auto multiplied = matrix.form == INT4 ? quantized::multiply<true> : quantized::multiply<false>;
      multiplied(rows, count, inputs, static_cast<const uint8_t *>(weights), sums, to);
    } else {
      auto multiplied = [&](auto *panel) {
        multiply(rows, inputs, count, panel, PANEL, inputs, to, PANEL, false,
                 static_cast<decltype(panel)>(next));
      };
      if (matrix.form == FLOAT32)
        multiplied(static_cast<const float *>(weights));
      else
        multiplied(static_cast<const half *>(weights));
    }
    if (!matrix.bias)
      return;
    for (long i = 0; i < count * PANEL; i += LANES)
      store(to + i, load(to + i) + load(matrix.bias + panel * PANEL + i % PANEL));
  }

  // The rows in bfloat16, if that many are to be multiplied as such; else null. They are there until
  // the next product.
  static const Narrow *rounded(const Matrix &matrix, const float *rows, long count) {
    if (!matrix.unpacked_from || count < matrix.unpacked_from)
      return nullptr;
    static Scratch scratch;
    Narrow *to = reinterpret_cast<Narrow *>(scratch.get(sizeof(Narrow) * size_t(count * matrix.inputs)));
    phase((count + 15) / 16, [&](int tile) {
      const long end = std::min(count, (tile + 1) * 16L) * matrix.inputs;
      for (long i = tile * 16 * matrix.inputs; i < end; i += LANES)
        store(to + i, load(rows + i));
    });
    return to;
  }

  // Rows times a matrix, into `to` [rows, outputs], or added to it.
  static void product(const Matrix &matrix, const Act *rows, long count, float *to, bool add) {
    if constexpr (sizeof(Act) > sizeof(Narrow))
      if (const Narrow *narrow = rounded(matrix, rows, count))
        return Run<Narrow>::product(matrix, narrow, count, to, add);
    const float *sums = sums_of(matrix, rows, count);
    over(count, matrix.inputs, (matrix.outputs + PANEL - 1) / PANEL,
         [&](long first, int some, long panel) {
           alignas(64) float part[96 * PANEL];
           const long width = std::min(long(PANEL), matrix.outputs - panel * PANEL);
           const void *weights = panel_at(matrix, panel), *next = stored_at(matrix, panel + 1);
           for (long r = first; r < first + some; r += 96) {
             const int now = int(std::min(96L, first + some - r));
             panel_of(matrix, panel, weights, next, rows + r * matrix.inputs,
                      sums_at(sums, matrix, r), now, part);
             for (int i = 0; i < now; ++i) {
               const float *sum = part + i * PANEL;
               float *cell = to + (r + i) * matrix.outputs + panel * PANEL;
               long j = 0;
               for (; j + LANES <= width; j += LANES)
                 store(cell + j, add ? load(sum + j) + load(cell + j) : load(sum + j));
               for (; j < width; ++j)
                 cell[j] = add ? sum[j] + cell[j] : sum[j];
             }
           }
         });
  }

  // SiLU(gate) x up of rows, into `to` [rows, width]. The gates are the matrix's first half.
  template <class Out>
  static void gate_and_up(const Matrix &matrix, const Act *rows, long count, Out *to) {
    if constexpr (sizeof(Act) > sizeof(Narrow))
      if (const Narrow *narrow = rounded(matrix, rows, count))
        return Run<Narrow>::gate_and_up(matrix, narrow, count, to);
    const long width = matrix.outputs / 2, panels = width / PANEL;
    const float *sums = sums_of(matrix, rows, count);
    over(count, matrix.inputs, panels, [&](long first, int some, long panel) {
      alignas(64) float gates[96 * PANEL], ups[96 * PANEL];
      const void *gate_weights = panel_at(matrix, panel), *next = stored_at(matrix, panel + 1);
      const void *up_weights = panel_at(matrix, panel + panels, 1);
      for (int r = 0; r < some; r += 96) {
        const int now = std::min(96, some - r);
        const Act *from = rows + (first + r) * matrix.inputs;
        const float *here = sums_at(sums, matrix, first + r);
        panel_of(matrix, panel, gate_weights, up_weights, from, here, now, gates);
        panel_of(matrix, panel + panels, up_weights, next, from, here, now, ups);
        for (int i = 0; i < now; ++i)
          for (int j = i * PANEL; j < (i + 1) * PANEL; j += LANES)
            store(to + (first + r + i) * width + panel * PANEL + j % PANEL,
                  load(gates + j) / (1.0f + exponential(-load(gates + j))) * load(ups + j));
      }
    });
  }

  void rotate(float *head, const float *weight, long position) {
    const long half_size = model.head_size / 2;
    if (weight)
      Run<float>::norm(head, weight, model.epsilon, model.head_size, head);
    for (long i = 0; i < half_size; i += LANES) {
      const vec cosine = load(model.cosines + position * half_size + i);
      const vec sine = load(model.sines + position * half_size + i);
      const vec low = load(head + i), high = load(head + half_size + i);
      store(head + i, multiply_add(-high, sine, low * cosine));
      store(head + half_size + i, multiply_add(low, sine, high * cosine));
    }
  }

  // Norm and rotate queries and keys; store keys and values.
  void rotate_and_store(const Layer &layer) {
    const long rotated = model.num_queries + model.num_keys, size = model.head_size;
    const long each = step.num_tokens <= 16 ? step.num_tokens : 16;
    Stored *cache = static_cast<Stored *>(layer.slots);
    phase((step.num_tokens + each - 1) / each, [&](int tile) {
      for (long t = tile * each; t < std::min(step.num_tokens, (tile + 1) * each); ++t) {
        float *row = heads + t * (rotated + model.num_keys) * size;
        for (long head = 0; head < rotated; ++head)
          rotate(row + head * size, head < model.num_queries ? layer.query_norm : layer.key_norm,
                 step.positions[t]);
        for (long head = 0; head < 2 * model.num_keys; ++head)
          for (long i = 0; i < size; i += LANES)
            store(cache + (head * model.num_slots + step.slots[t]) * size + i,
                  load(row + (model.num_queries + head) * size + i));
      }
    });
  }

  // [LANES, size] to LANES columns of [size, PANEL].
  template <class Word> static void transpose(const Word *keys, long size, float *to) {
    for (long d = 0; d < size; d += LANES) {
      vec rows[LANES], turned[LANES];
      for (int i = 0; i < LANES; ++i)
        rows[i] = load(keys + i * size + d);
#pragma GCC unroll 4
      for (int step = 1; step < LANES; step *= 2) { // a perfect shuffle of all values
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; ++i)
          interleave(rows[i], rows[i + LANES / 2], &turned[2 * i], &turned[2 * i + 1]);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
          rows[i] = turned[i];
      }
      for (int i = 0; i < LANES; ++i)
        store(to + (d + i) * PANEL, rows[i]);
    }
  }

  // Values [depth, D] to panels [D / PANEL, depth / 2, PANEL, 2]. Those from `seen` on become 0: a
  // slot that was not written may hold a NaN.
  static void pair_up(const half *values, long size, long depth, long seen, Act *to) {
    for (long first = 0; first < size; first += PANEL)
      for (long position = 0; position < depth; position += 2)
        for (long i = first; i < first + PANEL; i += LANES, to += 2 * LANES) {
          const half *even = values + position * size + i;
          const words low = position < seen ? (words)wide(even) : words{};
          const words high = position + 1 < seen ? (words)wide(even + size) << 16 : words{};
          store(reinterpret_cast<float *>(to), (vec)(low | high));
        }
  }

  // Scores [width] of a row to weights, from the same address on. `seen`: slots up to the row's own.
  void weigh(float *scores, long seen, long width, const Piece &piece, long token) const {
    const float hide = -INFINITY;
    for (long j = seen; j < width; ++j)
      scores[j] = hide;
    if (piece.hidden) {
      const uint8_t *hidden_slots = piece.hidden + token * piece.hidden_width;
      for (long j = piece.hidden_start; j < seen; ++j)
        if (hidden_slots[j - piece.hidden_start])
          scores[j] = hide;
    }
    vec most = all(hide), sums{};
    for (long j = 0; j < width; j += LANES)
      most = most > load(scores + j) ? most : load(scores + j);
    const float top = reduce(most, [](float a, float b) { return a > b ? a : b; }) * model.scaling;
    for (long j = 0; j < width; j += LANES) {
      const vec score = load(scores + j);
      const vec weight = exponential(multiply_add(score, all(model.scaling), all(-top)));
      store(scores + j, score != hide ? weight : vec{});
      sums += load(scores + j);
    }
    const float share = 1.0f / sum_of(sums);
    for (long j = 0; j < width; j += LANES)
      store(reinterpret_cast<Act *>(scores) + j, load(scores + j) * share);
  }

  // Query rows `first` to `first` + `count` of a piece and key head: token by token, `share` each.
  void attend_rows(const Layer &layer, const Piece &piece, long key_head, long first, int count) {
    thread_local Scratch scratch;
    const long size = model.head_size, share = model.num_queries / model.num_keys;
    const long row_size = (model.num_queries + 2 * model.num_keys) * size;
    const long seen = piece.start + (first + count - 1) / share + 1;
    const long width = (seen + PANEL - 1) / PANEL * PANEL;
    float *results = reinterpret_cast<float *>(
        scratch.get(sizeof(float) * (2 * count * size + CHUNK * size + count * width)));
    float *part = results + count * size, *scores = part + CHUNK * size;
    Act *queries = reinterpret_cast<Act *>(scores + count * width);
    auto token = [&](int r) { return piece.first_token + (first + r) / share; };
    auto head = [&](int r) { return key_head * share + (first + r) % share; };
    for (int r = 0; r < count; ++r)
      for (long i = 0; i < size; i += LANES)
        store(queries + r * size + i, load(heads + token(r) * row_size + head(r) * size + i));
    const Stored *slots = static_cast<const Stored *>(layer.slots);
    const Stored *keys = slots + key_head * model.num_slots * size;
    const Stored *values = slots + (model.num_keys + key_head) * model.num_slots * size;
    auto slot = [&](long position) {
      return (piece.blocks[position / CHUNK] * CHUNK + position % CHUNK) * size;
    };
    const long bytes = PANEL * size * sizeof(Stored);
    fetch(keys + slot(0), bytes);
    for (long position = 0; position < width; position += PANEL) {
      if (position + PANEL < width)
        fetch(keys + slot(position + PANEL), bytes);
      fetch(values + slot(position), bytes);
      const bool in_pairs = sizeof(Act) == 2; // of features: a word of the panel
      for (long i = position; i < position + PANEL; i += LANES)
        if (in_pairs)
          transpose(reinterpret_cast<const float *>(keys + slot(i)), size / 2, part + i - position);
        else
          transpose(keys + slot(i), size, part + i - position);
      if constexpr (sizeof(Act) == 2)
        multiply(queries, size, count, reinterpret_cast<Act *>(part), size, scores + position, width,
                 false, 0, part);
      else
        multiply(queries, size, count, part, PANEL, size, scores + position, width, false, part);
    }
    for (int r = 0; r < count; ++r)
      weigh(scores + r * width, piece.start + (first + r) / share + 1, width, piece,
            (first + r) / share);
    for (long position = 0; position < width; position += CHUNK) {
      const Stored *block = values + slot(position);
      const long depth = std::min(long(CHUNK), width - position);
      if constexpr (sizeof(Act) == 2) {
        Act *pairs = reinterpret_cast<Act *>(part), *weights = reinterpret_cast<Act *>(scores);
        pair_up(block, size, depth, seen - position, pairs);
        for (long i = 0; i < size; i += PANEL)
          multiply(weights + position, 2 * width, count, pairs + i * depth, depth, results + i, size,
                   position > 0, 0, pairs + i * depth);
      } else {
        const long shown = std::min(depth, seen - position);
        for (long i = 0; i < size; i += PANEL)
          multiply(scores + position, width, count, block + i, size, shown, results + i, size,
                   position > 0, block + i);
      }
    }
    for (int r = 0; r < count; ++r)
      for (long i = 0; i < size; i += LANES)
        store(attended + (token(r) * model.num_queries + head(r)) * size + i,
                load(results + r * size + i));
  }

  void attend(const Layer &layer) {
    const long share = model.num_queries / model.num_keys;
    constexpr long most = sizeof(Act) == 2 ? 64 : ATTENDED;
    long tiles = 0;
    for (long p = 0; p < step.num_pieces; ++p)
      tiles += (step.pieces[p].num_tokens * share + most - 1) / most * model.num_keys;
    phase(tiles, [&](int tile) {
      for (long p = 0, left = tile;; ++p) {
        const long rows = step.pieces[p].num_tokens * share;
        const long here = (rows + most - 1) / most * model.num_keys;
        if (left < here) {
          // The last rows see the most positions, so they come first.
          const long block = (rows + most - 1) / most - 1 - left / model.num_keys;
          const long first = block * most;
          return attend_rows(layer, step.pieces[p], left % model.num_keys, first,
                             int(std::min(most, rows - first)));
        }
        left -= here;
      }
    });
  }

  void run() {
    const long features = model.features;
    const Stored *embedding = static_cast<const Stored *>(model.embedding);
    for (long t = 0; t < step.num_tokens; ++t)
      for (long i = 0; i < features; i += LANES)
        store(hidden + t * features + i, load(embedding + step.token_ids[t] * features + i));
    for (long index = 0; index < model.num_layers; ++index) {
      const Layer &layer = model.layers[index];
      norm_rows(layer.input_norm);
      product(layer.project, normed, step.num_tokens, heads, false);
      rotate_and_store(layer);
      attend(layer);
      product(layer.output, attended, step.num_tokens, hidden, true);
      norm_rows(layer.middle_norm);
      gate_and_up(layer.gate_and_up, normed, step.num_tokens, inner);
      product(layer.down, inner, step.num_tokens, hidden, true);
    }
    for (long r = 0; r < step.num_logits; ++r)
      norm(hidden + step.logit_rows[r] * features, model.last_norm, model.epsilon, features,
           normed + r * features);
    if (step.num_logits)
      product(model.head, normed, step.num_logits, step.logits, false);
  }
};

template <class Act, class Stored> void run_step(const Model &model, const Step &step) {
  static Scratch scratch;
  const long tokens = step.num_tokens, size = model.head_size;
  auto bytes = [&](long columns, long each) { return (tokens * columns * each + 63) & ~63L; };
  const long heads = (model.num_queries + 2 * model.num_keys) * size;
  const long sizes[] = {bytes(model.features, 4), bytes(heads, 4),
                        bytes(model.features, sizeof(Act)),
                        bytes(model.num_queries * size, sizeof(Act)),
                        bytes(model.inner, sizeof(Act))};
  char *memory = scratch.get(size_t(sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4]));
  char *part[5];
  for (int i = 0; i < 5; memory += sizes[i++])
    part[i] = memory;
  auto floats = [&](int i) { return reinterpret_cast<float *>(part[i]); };
  auto acts = [&](int i) { return reinterpret_cast<Act *>(part[i]); };
  Run<Act, Stored>{model, step, floats(0), floats(1), acts(2), acts(3), acts(4)}.run();
}

} // namespace

extern "C" {

// The number of outputs of a panel.
int paceline_panel() { return PANEL; }

void paceline_advise(void *memory, long size) {
  const uintptr_t page = 4096, first = (reinterpret_cast<uintptr_t>(memory) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + uintptr_t(size)) & ~(page - 1);
  if (end > first)
    advise(reinterpret_cast<void *>(first), end - first);
}

// Whether bfloat16 is multiplied by AMX, for which the operating system is asked, or AVX512-BF16.
// Threads that start later inherit the leave. 0: rows of a BFLOAT16 matrix are float32.
int paceline_multiplies_halves(int has_amx, int has_pairs) {
  amx_allowed = has_amx && allow_amx();
  multiplies_halves = sizeof(Narrow) == 2 && (amx_allowed || has_pairs);
  return multiplies_halves;
}

// [rows, outputs] of rows [rows, inputs].
void paceline_product(const Matrix *matrix, const void *rows, long count, float *to, int threads) {
  Threads woken(threads);
  if (matrix->form == BFLOAT16 && multiplies_halves)
    Run<Narrow>::product(*matrix, static_cast<const Narrow *>(rows), count, to, false);
  else
    Run<float>::product(*matrix, static_cast<const float *>(rows), count, to, false);
}

void paceline_step(const Model *model, const Step *step, int threads) {
  Threads woken(threads);
  if (model->head.form == FLOAT32)
    run_step<float, float>(*model, *step);
  else if (model->head.form == BFLOAT16 && multiplies_halves)
    run_step<Narrow, half>(*model, *step);
  else
    run_step<float, half>(*model, *step);
}
}
