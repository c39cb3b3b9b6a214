// Products of float32 rows and a panel whose weights have 8 or 4 bits.
//
// Weights become float32 in registers, and one pass over them serves up to ROWS rows. Each group of
// 32 input features is summed by itself, in order; groups are added in order. So a row has the same
// bits beside any other rows.
//
// A panel of 8 bits: a scale of each output (float32), then weights [inputs, PANEL].
// A panel of 4 bits, for each group: 8 weights of an output in each 32 bits, the first in the lowest
// bits, [4, PANEL]; then PANEL scales and PANEL minima (bfloat16). A weight is step x scale + minimum.
//
// Included by step_kernels.cpp only.

#pragma once

namespace {
namespace quantized {

constexpr long GROUP = 32, WORDS = GROUP / 8 * PANEL; // words of a group's weights of 4 bits
constexpr long SCALE_BYTES = 4 * PANEL, INT4_GROUP_BYTES = 4 * WORDS + 2 * 2 * PANEL;
constexpr long AHEAD = 4096; // bytes that are fetched before they are needed

inline long panel_bytes(bool is_int4, long inputs) {
  return is_int4 ? inputs / GROUP * INT4_GROUP_BYTES : SCALE_BYTES + inputs * PANEL;
}

// The scales of a group of 4 bits. The minima follow.
inline const half *scales_of(const uint8_t *group) {
  return reinterpret_cast<const half *>(group + 4 * WORDS);
}

// Sums of each group of each row [count, inputs / 32]: a minimum is multiplied by them.
inline void sum_groups(const float *rows, long count, long inputs, float *to) {
  for (long i = 0; i < count * inputs; i += GROUP) {
    vec sums = load(rows + i);
    for (int j = LANES; j < GROUP; j += LANES)
      sums += load(rows + i + j);
    *to++ = sum_of(sums);
  }
}

// Multiply a product [count, PANEL] by weights of 8 bits that lacks their scales by them.
inline void scale(const uint8_t *panel, int count, float *product) {
  for (long i = 0; i < count * PANEL; i += LANES)
    store(product + i, load(product + i) * load(reinterpret_cast<const float *>(panel) + i % PANEL));
}

// The product [R, PANEL]. `sums`: of groups, for 4 bits.
template <int R, bool INT4>
void block_of(const float *rows, long inputs, const uint8_t *panel, const float *sums, float *to) {
  const long groups = inputs / GROUP, bytes = INT4 ? INT4_GROUP_BYTES : GROUP * PANEL;
  const uint8_t *at = INT4 ? panel : panel + SCALE_BYTES;
  vec totals[R][PARTS] = {};
  for (long g = 0; g < groups; ++g, at += bytes) {
    vec part[R][PARTS];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < PARTS; ++i)
        part[r][i] = vec{};
    for (long i = 0; i < bytes; i += 64)
      __builtin_prefetch(at + AHEAD + i, 0, 3);
    for (int eight = 0; eight < 4; ++eight) {
      const float *row = rows + g * GROUP + eight * 8;
      words fours[PARTS];
      if constexpr (INT4)
        for (int i = 0; i < PARTS; ++i)
          fours[i] = load_words(at + 4 * (eight * PANEL + i * LANES));
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) {
        vec weights[PARTS];
        for (int i = 0; i < PARTS; ++i)
          if constexpr (INT4) {
            weights[i] = low_four_bits((vec_int)fours[i]);
            fours[i] >>= 4;
          } else {
            weights[i] = from_int8(at + (eight * 8 + k) * PANEL + i * LANES);
          }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const vec value = all(row[r * inputs + k]);
          for (int i = 0; i < PARTS; ++i)
            part[r][i] = multiply_add(value, weights[i], part[r][i]);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < PARTS; ++i)
        if constexpr (INT4) {
          const half *scales = scales_of(at) + i * LANES;
          const vec scaled = multiply_add(part[r][i], load(scales), totals[r][i]);
          totals[r][i] = multiply_add(all(sums[r * groups + g]), load(scales + PANEL), scaled);
        } else {
          totals[r][i] += part[r][i];
        }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < PARTS; ++i)
      store(to + r * PANEL + i * LANES, totals[r][i]);
  if constexpr (!INT4)
    scale(panel, R, to);
}

template <bool INT4>
void multiply(const float *rows, int count, long inputs, const uint8_t *panel, const float *sums,
              float *to) {
  constexpr auto blocks = [&]<int... R>(std::integer_sequence<int, R...>) {
    return std::array{block_of<R + 1, INT4>...};
  }(BlockSizes{});
  for (int r = 0; r < count; r += ROWS)
    blocks[std::min(ROWS, count - r) - 1](rows + r * inputs, inputs, panel,
                                          INT4 ? sums + r * (inputs / GROUP) : nullptr,
                                          to + r * PANEL);
}

} // namespace quantized
} // namespace
