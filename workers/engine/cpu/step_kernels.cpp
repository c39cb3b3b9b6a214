// A whole step of a Llama-like model on a CPU with AVX-512: called by native.py, without Python or
// torch in between.
//
// Bits. Every result of a row is computed by one chain of operations whose order depends on nothing
// but the row: products add over the input features in order, attention adds over positions in
// order, and a hidden position adds exactly 0. So a row has the same bits in any batch, window and
// split of the prompt, and with any number of threads.
//
// Shapes: T tokens, N features, F features of the feed-forward, A heads of a token (queries, keys,
// values), D head size, V vocabulary. A matrix [out, in] is stored in panels of 32 outputs:
// float32 [out / 32, in, 32], bfloat16 [out / 32, in / 2, 32, 2]; 8 and 4 bits: quantized_products.h.

#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "step_threads.h"

namespace {

constexpr int PANEL = 32;    // outputs of a panel
constexpr int ROWS = 12;     // rows of a float32 block: 24 of the 32 registers hold sums
constexpr int CHUNK = 128;   // positions of a KV block
constexpr int ATTENDED = 36; // query rows that share transposed keys; bfloat16: 64
constexpr long CACHED = 768 * 1024; // bytes of rows that stay in a core's cache beside the panels

using half = uint16_t; // the bits of a bfloat16

// Ask for memory that is read soon.
inline void fetch(const void *memory, long bytes) {
  for (long i = 0; i < bytes; i += 64)
    _mm_prefetch(static_cast<const char *>(memory) + i, _MM_HINT_T1);
}

// Arithmetic

inline __m512 widen(const half *from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from))), 16));
}
inline __m512 load16(const float *from) { return _mm512_loadu_ps(from); }
inline __m512 load16(const half *from) { return widen(from); }
inline void store16(float *to, __m512 values) { _mm512_storeu_ps(to, values); }
inline void store16(half *to, __m512 values) { // rounds to nearest, ties to even
  __m512i bits = _mm512_castps_si512(values);
  __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// e^x within 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline __m512 exponential(__m512 x) {
  // The second operand is the result if one is NaN: a NaN stays.
  x = _mm512_max_ps(_mm512_set1_ps(-103.0f), _mm512_min_ps(_mm512_set1_ps(88.7f), x));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                     5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// Products of rows and a panel, in a chain over the input features. `add`: to what is there.
// PAIRS: a word of 32 bits is two bfloat16, whose products are added together.

template <bool PAIRS>
inline __m512 multiply_add(__m512 value, __m512 weights, __m512 sum) {
  if constexpr (PAIRS)
    return _mm512_dpbf16_ps(sum, (__m512bh)value, (__m512bh)weights);
  else
    return _mm512_fmadd_ps(value, weights, sum);
}

template <int R, bool PAIRS, bool FETCHES>
void block_of(const float *rows, long stride, const float *panel, long panel_stride, long depth,
              float *to, long to_stride, bool add, const float *next) {
  __m512 sums[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sums[r][0] = _mm512_setzero_ps();
    sums[r][1] = _mm512_setzero_ps();
  }
  for (long k = 0; k < depth; ++k) {
    const float *line = panel + k * panel_stride;
    _mm_prefetch(reinterpret_cast<const char *>(line + 1024), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char *>(line + 1024 + 16), _MM_HINT_T0);
    if constexpr (FETCHES)
      _mm_prefetch(reinterpret_cast<const char *>(next + k * panel_stride), _MM_HINT_T1);
    __m512 first = _mm512_loadu_ps(line), second = _mm512_loadu_ps(line + 16);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      __m512 value = _mm512_set1_ps(rows[r * stride + k]);
      sums[r][0] = multiply_add<PAIRS>(value, first, sums[r][0]);
      sums[r][1] = multiply_add<PAIRS>(value, second, sums[r][1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    float *out = to + r * to_stride;
    // Added last: what is there may be large, and would round each term of the sum.
    _mm512_storeu_ps(out, add ? _mm512_add_ps(_mm512_loadu_ps(out), sums[r][0]) : sums[r][0]);
    _mm512_storeu_ps(out + 16,
                     add ? _mm512_add_ps(_mm512_loadu_ps(out + 16), sums[r][1]) : sums[r][1]);
  }
}

using Block = void (*)(const float *, long, const float *, long, long, float *, long, bool,
                       const float *);
template <bool P, bool F>
constexpr Block BLOCKS[ROWS] = {block_of<1, P, F>, block_of<2, P, F>,  block_of<3, P, F>,
                                block_of<4, P, F>, block_of<5, P, F>,  block_of<6, P, F>,
                                block_of<7, P, F>, block_of<8, P, F>,  block_of<9, P, F>,
                                block_of<10, P, F>, block_of<11, P, F>, block_of<12, P, F>};

// `next`: the panel that follows. The first two of several blocks of rows prefetch half of its
// lines each, so that memory is also read while the second one finds this panel in the cache.
template <bool PAIRS = false>
void multiply(const float *rows, long stride, int count, const float *panel, long panel_stride,
              long depth, float *to, long to_stride, bool add, const float *next) {
  const int blocks = (count + ROWS - 1) / ROWS, each = (count + blocks - 1) / blocks;
  for (int r = 0; r < count; r += each) {
    const int now = std::min(each, count - r) - 1;
    const Block block = blocks > 1 && r <= each ? BLOCKS<PAIRS, true>[now] : BLOCKS<PAIRS, false>[now];
    block(rows + r * stride, stride, panel, panel_stride, depth, to + r * to_stride, to_stride, add,
          next + (r ? 16 : 0));
  }
}

// AMX: sums in tiles 0 to 3 (2 x 16 rows, 2 x 16 outputs), rows in 4 and 5, the panel in 6 and 7.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

void set_tiles(int first, int second) {
  TileConfig config;
  const int rows[8] = {first, first, second, second, first, second, 16, 16};
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[tile] = rows[tile] ? 64 : 0;
    config.rows[tile] = uint8_t(rows[tile]);
  }
  asm volatile("" : : "r"(&config) : "memory"); // GCC believes that 8 bytes of it are read
  _tile_loadconfig(&config);
}

bool amx_allowed = false;

void multiply(const half *rows, long stride, int count, const half *panel, long depth, float *to,
              long to_stride, bool add, long ahead, const void *next) {
  if (!amx_allowed) {
    auto words = [](const void *halves) { return static_cast<const float *>(halves); };
    return multiply<true>(words(rows), stride / 2, count, words(panel), PANEL, depth / 2, to,
                          to_stride, add, words(next));
  }
  for (int r = 0; r < count; r += 32) {
    const int first = std::min(16, count - r), second = std::max(0, std::min(16, count - r - 16));
    set_tiles(first, second);
    const half *above = rows + r * stride, *below = above + 16 * stride;
    float *out = to + r * to_stride, *out_below = out + 16 * to_stride;
    _tile_zero(0);
    _tile_zero(1);
    if (second) {
      _tile_zero(2);
      _tile_zero(3);
    }
    if (add) {
      _tile_loadd(0, out, 4 * to_stride);
      _tile_loadd(1, out + 16, 4 * to_stride);
      if (second) {
        _tile_loadd(2, out_below, 4 * to_stride);
        _tile_loadd(3, out_below + 16, 4 * to_stride);
      }
    }
    for (long k = 0; k < depth; k += 32) {
      const half *weights = panel + k * PANEL;
      if (r == 0)
        fetch(weights + 2048, ahead);
      _tile_loadd(6, weights, 4 * PANEL);
      _tile_loadd(7, weights + 32, 4 * PANEL);
      _tile_loadd(4, above + k, 2 * stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (second) {
        _tile_loadd(5, below + k, 2 * stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out, 4 * to_stride);
    _tile_stored(1, out + 16, 4 * to_stride);
    if (second) {
      _tile_stored(2, out_below, 4 * to_stride);
      _tile_stored(3, out_below + 16, 4 * to_stride);
    }
  }
}

#include "quantized_products.h"

} // namespace

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
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < size; i += 16) {
      __m512 values = load16(row + i);
      squares = _mm512_fmadd_ps(values, values, squares);
    }
    __m512 factor =
        _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(size) + epsilon));
    for (long i = 0; i < size; i += 16)
      store16(to + i, _mm512_mul_ps(_mm512_mul_ps(load16(row + i), factor), load16(weight + i)));
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
                           : PANEL * matrix.inputs * long(sizeof(Act));
    return static_cast<const uint8_t *>(matrix.panels) + panel * bytes;
  }

  // A panel for panel_of. Weights of few bits that multiply bfloat16 become such, in one of the two
  // places that this thread has for them.
  static const void *panel_at(const Matrix &matrix, long panel, int place = 0) {
    const uint8_t *stored = stored_at(matrix, panel);
    if constexpr (sizeof(Act) == 2)
      if (has_few_bits(matrix)) {
        thread_local Scratch places[2];
        half *unpacked = reinterpret_cast<half *>(places[place].get(2 * PANEL * matrix.inputs));
        auto unpack = matrix.form == INT4 ? quantized::unpack<true> : quantized::unpack<false>;
        unpack(stored, matrix.inputs, unpacked);
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
      multiply(rows, inputs, count, static_cast<const Act *>(weights), PANEL, inputs, to, PANEL, false,
               static_cast<const Act *>(next));
    }
    if (!matrix.bias)
      return;
    for (long i = 0; i < count * PANEL; i += 16)
      store16(to + i, _mm512_add_ps(load16(to + i), load16(matrix.bias + panel * PANEL + i % PANEL)));
  }

  // The rows in bfloat16, if that many are to be multiplied as such; else null. They are there until
  // the next product.
  static const half *rounded(const Matrix &matrix, const float *rows, long count) {
    if (!matrix.unpacked_from || count < matrix.unpacked_from)
      return nullptr;
    static Scratch scratch;
    half *to = reinterpret_cast<half *>(scratch.get(size_t(2 * count * matrix.inputs)));
    phase((count + 15) / 16, [&](int tile) {
      const long end = std::min(count, (tile + 1) * 16L) * matrix.inputs;
      for (long i = tile * 16 * matrix.inputs; i < end; i += 16)
        store16(to + i, load16(rows + i));
    });
    return to;
  }

  // Rows times a matrix, into `to` [rows, outputs], or added to it.
  static void product(const Matrix &matrix, const Act *rows, long count, float *to, bool add) {
    if constexpr (sizeof(Act) == 4)
      if (const half *halves = rounded(matrix, rows, count))
        return Run<half>::product(matrix, halves, count, to, add);
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
             for (long j = 0; j < width; j += 16) {
               const __mmask16 kept = __mmask16(0xffff >> std::max(0L, j + 16 - width));
               float *cell = to + r * matrix.outputs + panel * PANEL + j;
               for (int i = 0; i < now; ++i, cell += matrix.outputs) {
                 __m512 sum = load16(part + i * PANEL + j);
                 if (add)
                   sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(kept, cell));
                 _mm512_mask_storeu_ps(cell, kept, sum);
               }
             }
           }
         });
  }

  // SiLU(gate) x up of rows, into `to` [rows, width]. The gates are the matrix's first half.
  template <class Out>
  static void gate_and_up(const Matrix &matrix, const Act *rows, long count, Out *to) {
    if constexpr (sizeof(Act) == 4)
      if (const half *halves = rounded(matrix, rows, count))
        return Run<half>::gate_and_up(matrix, halves, count, to);
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
          for (int j = 0; j < PANEL; j += 16) {
            __m512 gate = load16(gates + i * PANEL + j), one = _mm512_set1_ps(1.0f);
            __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
            store16(to + (first + r + i) * width + panel * PANEL + j,
                    _mm512_mul_ps(_mm512_div_ps(gate, below), load16(ups + i * PANEL + j)));
          }
      }
    });
  }

  void rotate(float *head, const float *weight, long position) {
    const long half_size = model.head_size / 2;
    if (weight)
      Run<float>::norm(head, weight, model.epsilon, model.head_size, head);
    for (long i = 0; i < half_size; i += 16) {
      __m512 cosine = load16(model.cosines + position * half_size + i);
      __m512 sine = load16(model.sines + position * half_size + i);
      __m512 low = load16(head + i), high = load16(head + half_size + i);
      store16(head + i, _mm512_fnmadd_ps(high, sine, _mm512_mul_ps(low, cosine)));
      store16(head + half_size + i, _mm512_fmadd_ps(low, sine, _mm512_mul_ps(high, cosine)));
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
          for (long i = 0; i < size; i += 16)
            store16(cache + (head * model.num_slots + step.slots[t]) * size + i,
                    load16(row + (model.num_queries + head) * size + i));
      }
    });
  }

  // [16, size] to 16 columns of [size, PANEL].
  template <class Word> static void transpose(const Word *keys, long size, float *to) {
    for (long d = 0; d < size; d += 16) {
      __m512 in[16], out[16];
      for (int i = 0; i < 16; ++i)
        in[i] = load16(keys + i * size + d);
      for (int i = 0; i < 16; i += 2) {
        out[i] = _mm512_unpacklo_ps(in[i], in[i + 1]);
        out[i + 1] = _mm512_unpackhi_ps(in[i], in[i + 1]);
      }
      for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
          __m512d a = _mm512_castps_pd(out[i + j]), b = _mm512_castps_pd(out[i + j + 2]);
          in[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
          in[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
      for (int j = 0; j < 4; ++j) { // in[4 q + j]: column 4 * lane + j of rows 4 q to 4 q + 3
        __m512 a = _mm512_shuffle_f32x4(in[j], in[4 + j], 0x88);
        __m512 b = _mm512_shuffle_f32x4(in[8 + j], in[12 + j], 0x88);
        __m512 c = _mm512_shuffle_f32x4(in[j], in[4 + j], 0xdd);
        __m512 e = _mm512_shuffle_f32x4(in[8 + j], in[12 + j], 0xdd);
        store16(to + (d + j) * PANEL, _mm512_shuffle_f32x4(a, b, 0x88));
        store16(to + (d + 8 + j) * PANEL, _mm512_shuffle_f32x4(a, b, 0xdd));
        store16(to + (d + 4 + j) * PANEL, _mm512_shuffle_f32x4(c, e, 0x88));
        store16(to + (d + 12 + j) * PANEL, _mm512_shuffle_f32x4(c, e, 0xdd));
      }
    }
  }

  // Values [depth, D] to panels [D / PANEL, depth / 2, PANEL, 2]. Those from `seen` on become 0: a
  // slot that was not written may hold a NaN.
  static void pair_up(const half *values, long size, long depth, long seen, half *to) {
    for (long first = 0; first < size; first += PANEL)
      for (long position = 0; position < depth; position += 2)
        for (long i = first; i < first + PANEL; i += 16, to += 32) {
          const half *even = values + position * size + i;
          __m512i low = _mm512_setzero_si512(), high = low;
          if (position < seen)
            low = _mm512_srli_epi32(_mm512_castps_si512(widen(even)), 16);
          if (position + 1 < seen)
            high = _mm512_castps_si512(widen(even + size));
          _mm512_storeu_si512(to, _mm512_or_si512(low, high));
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
    __m512 most = _mm512_set1_ps(hide), sums = _mm512_setzero_ps();
    for (long j = 0; j < width; j += 16)
      most = _mm512_max_ps(most, load16(scores + j));
    const __m512 scaling = _mm512_set1_ps(model.scaling), none = _mm512_set1_ps(hide);
    const __m512 top = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(most)), scaling);
    for (long j = 0; j < width; j += 16) {
      __m512 score = load16(scores + j);
      __mmask16 shown = _mm512_cmp_ps_mask(score, none, _CMP_NEQ_UQ);
      __m512 weight = exponential(_mm512_fmsub_ps(score, scaling, top));
      weight = _mm512_maskz_mov_ps(shown, weight);
      sums = _mm512_add_ps(sums, weight);
      store16(scores + j, weight);
    }
    const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sums));
    for (long j = 0; j < width; j += 16)
      store16(reinterpret_cast<Act *>(scores) + j, _mm512_mul_ps(load16(scores + j), share));
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
      for (long i = 0; i < size; i += 16)
        store16(queries + r * size + i, load16(heads + token(r) * row_size + head(r) * size + i));
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
      for (long i = position; i < position + PANEL; i += 16)
        if (in_pairs)
          transpose(reinterpret_cast<const float *>(keys + slot(i)), size / 2, part + i - position);
        else
          transpose(keys + slot(i), size, part + i - position);
      if constexpr (sizeof(Act) == 2)
        multiply(queries, size, count, reinterpret_cast<half *>(part), size, scores + position,
                 width, false, 0, part);
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
        half *pairs = reinterpret_cast<half *>(part), *weights = reinterpret_cast<half *>(scores);
        pair_up(block, size, depth, seen - position, pairs);
        for (long i = 0; i < size; i += PANEL)
          multiply(weights + position, 2 * width, count, pairs + i * depth, depth, results + i, size,
                   position > 0, 0, pairs + i * depth);
      } else {
        const float *wide = reinterpret_cast<const float *>(block);
        const long shown = std::min(depth, seen - position);
        if (sizeof(Stored) == 2) {
          for (long i = 0; i < shown * size; i += 16)
            store16(part + i, load16(block + i));
          wide = part;
        }
        for (long i = 0; i < size; i += PANEL)
          multiply(scores + position, width, count, wide + i, size, shown, results + i, size,
                   position > 0, wide + i);
      }
    }
    for (int r = 0; r < count; ++r)
      for (long i = 0; i < size; i += 16)
        store16(attended + (token(r) * model.num_queries + head(r)) * size + i,
                load16(results + r * size + i));
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
      for (long i = 0; i < features; i += 16)
        store16(hidden + t * features + i, load16(embedding + step.token_ids[t] * features + i));
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

// Ask the operating system for leave to use AMX. Threads that start later inherit it. Without it,
// bfloat16 products are computed by AVX512-BF16. 1: granted.
int paceline_allow_amx() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  amx_allowed = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
  return amx_allowed;
}

// Ask for huge pages, before the memory is written: fewer misses of the address cache.
void paceline_advise(void *memory, long size) {
  const uintptr_t page = 4096, first = (reinterpret_cast<uintptr_t>(memory) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + uintptr_t(size)) & ~(page - 1);
  if (end > first)
    madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
}

// [rows, outputs] of rows [rows, inputs]: bfloat16 for such a matrix, else float32.
void paceline_product(const Matrix *matrix, const void *rows, long count, float *to, int threads) {
  Threads woken(threads);
  if (matrix->form == BFLOAT16)
    Run<half>::product(*matrix, static_cast<const half *>(rows), count, to, false);
  else
    Run<float>::product(*matrix, static_cast<const float *>(rows), count, to, false);
}

void paceline_step(const Model *model, const Step *step, int threads) {
  Threads woken(threads);
  if (model->head.form == FLOAT32)
    run_step<float, float>(*model, *step);
  else if (model->head.form == BFLOAT16)
    run_step<half, half>(*model, *step);
  else
    run_step<float, half>(*model, *step);
}
}
