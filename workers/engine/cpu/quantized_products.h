// Products of float32 rows and a panel of 32 outputs whose weights have 8 or 4 bits.
//
// Weights become float32 in registers, and one pass over them serves up to ROWS rows. Each group of
// 32 input features is summed by itself, in order; groups are added in order. So a row has the same
// bits beside any other rows.
//
// A panel of 8 bits: 32 scales (float32), then weights [inputs, 32].
// A panel of 4 bits, for each group: 8 weights of an output in each 32 bits, the first in the lowest
// bits, [4, 32]; then 32 scales and 32 minima (bfloat16). A weight is step x scale + minimum.
//
// Included by step_kernels.cpp only, after what it takes from there (PANEL, ROWS, half, widen).

#pragma once

namespace quantized {

constexpr long GROUP = 32, INT4_GROUP_BYTES = 512 + 64 + 64, SCALE_BYTES = 128;
constexpr long AHEAD = 4096; // bytes that are fetched before they are needed

inline long panel_bytes(bool is_int4, long inputs) {
  return is_int4 ? inputs / GROUP * INT4_GROUP_BYTES : SCALE_BYTES + inputs * PANEL;
}

inline __m512 from_int8(const uint8_t *from) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
}

// Sums of each group of each row [count, inputs / 32]: a minimum is multiplied by them.
inline void sum_groups(const float *rows, long count, long inputs, float *to) {
  for (long i = 0; i < count * inputs; i += GROUP)
    *to++ = _mm512_reduce_add_ps(
        _mm512_add_ps(_mm512_loadu_ps(rows + i), _mm512_loadu_ps(rows + i + 16)));
}

// The product [R, PANEL]. `sums`: of groups, for 4 bits.
template <int R, bool INT4>
void block_of(const float *rows, long inputs, const uint8_t *panel, const float *sums, float *to) {
  const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const long groups = inputs / GROUP, bytes = INT4 ? INT4_GROUP_BYTES : GROUP * 32;
  const uint8_t *at = INT4 ? panel : panel + SCALE_BYTES;
  alignas(64) float totals[R][32] = {};
  for (long g = 0; g < groups; ++g) {
    __m512 part[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      part[r][0] = part[r][1] = _mm512_setzero_ps();
    for (long i = 0; i < bytes; i += 64)
      _mm_prefetch(reinterpret_cast<const char *>(at + AHEAD + i), _MM_HINT_T0);
    for (int eight = 0; eight < 4; ++eight) {
      const float *row = rows + g * GROUP + eight * 8;
      __m512i first, second;
      if constexpr (INT4) {
        first = _mm512_loadu_si512(at + eight * 128);
        second = _mm512_loadu_si512(at + eight * 128 + 64);
      }
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) {
        __m512 low, high;
        if constexpr (INT4) { // an index of the permutation is the lowest 4 bits
          low = _mm512_permutexvar_ps(first, steps);
          high = _mm512_permutexvar_ps(second, steps);
          first = _mm512_srli_epi32(first, 4);
          second = _mm512_srli_epi32(second, 4);
        } else {
          low = from_int8(at + (eight * 8 + k) * 32);
          high = from_int8(at + (eight * 8 + k) * 32 + 16);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          __m512 value = _mm512_set1_ps(row[r * inputs + k]);
          part[r][0] = _mm512_fmadd_ps(value, low, part[r][0]);
          part[r][1] = _mm512_fmadd_ps(value, high, part[r][1]);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 2; ++i) {
        __m512 total = _mm512_load_ps(totals[r] + 16 * i);
        if constexpr (INT4) {
          const half *scales = reinterpret_cast<const half *>(at + 512) + 16 * i;
          total = _mm512_fmadd_ps(part[r][i], widen(scales), total);
          __m512 sum = _mm512_set1_ps(sums[r * groups + g]);
          total = _mm512_fmadd_ps(sum, widen(scales + PANEL), total);
        } else {
          total = _mm512_add_ps(part[r][i], total);
        }
        _mm512_store_ps(totals[r] + 16 * i, total);
      }
    at += bytes;
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < PANEL; i += 16) {
      __m512 total = _mm512_load_ps(totals[r] + i);
      if constexpr (!INT4)
        total = _mm512_mul_ps(total, _mm512_loadu_ps(reinterpret_cast<const float *>(panel) + i));
      _mm512_storeu_ps(to + r * PANEL + i, total);
    }
}

// A panel in bfloat16, as step_kernels.cpp multiplies them: [inputs / 2, PANEL, 2]. Weights of 8 bits
// stay without their scales, so they are exact; those of 4 bits are rounded.
template <bool INT4> void unpack(const uint8_t *panel, long inputs, half *to) {
  const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const uint8_t *at = INT4 ? panel : panel + SCALE_BYTES;
  auto store_pairs = [&](__m512 even, __m512 odd) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    to += 32;
  };
  if constexpr (!INT4) {
    for (long k = 0; k < inputs; k += 2, at += 2 * PANEL)
      for (int i = 0; i < PANEL; i += 16)
        store_pairs(from_int8(at + i), from_int8(at + PANEL + i));
    return;
  }
  for (long g = 0; g < inputs / GROUP; ++g, at += INT4_GROUP_BYTES) {
    __m512 scales[2], minima[2];
    for (int i = 0; i < 2; ++i) {
      scales[i] = widen(reinterpret_cast<const half *>(at + 512) + 16 * i);
      minima[i] = widen(reinterpret_cast<const half *>(at + 512) + PANEL + 16 * i);
    }
    for (int eight = 0; eight < 4; ++eight) {
      __m512i words[2] = {_mm512_loadu_si512(at + eight * 128),
                          _mm512_loadu_si512(at + eight * 128 + 64)};
      for (int pair = 0; pair < 4; ++pair)
        for (int i = 0; i < 2; ++i) {
          const __m512i odd = _mm512_srli_epi32(words[i], 4);
          store_pairs(_mm512_fmadd_ps(_mm512_permutexvar_ps(words[i], steps), scales[i], minima[i]),
                      _mm512_fmadd_ps(_mm512_permutexvar_ps(odd, steps), scales[i], minima[i]));
          words[i] = _mm512_srli_epi32(words[i], 8);
        }
    }
  }
}

// A product [count, PANEL] of weights of 8 bits that lacks their scales.
inline void scale(const uint8_t *panel, int count, float *product) {
  for (long i = 0; i < count * PANEL; i += 16) {
    const __m512 scales = _mm512_loadu_ps(reinterpret_cast<const float *>(panel) + i % PANEL);
    _mm512_storeu_ps(product + i, _mm512_mul_ps(_mm512_loadu_ps(product + i), scales));
  }
}

template <bool INT4>
void multiply(const float *rows, int count, long inputs, const uint8_t *panel, const float *sums,
              float *to) {
  using Block = void (*)(const float *, long, const uint8_t *, const float *, float *);
  constexpr Block blocks[ROWS] = {block_of<1, INT4>,  block_of<2, INT4>,  block_of<3, INT4>,
                                  block_of<4, INT4>,  block_of<5, INT4>,  block_of<6, INT4>,
                                  block_of<7, INT4>,  block_of<8, INT4>,  block_of<9, INT4>,
                                  block_of<10, INT4>, block_of<11, INT4>, block_of<12, INT4>};
  for (int r = 0; r < count; r += ROWS)
    blocks[std::min(ROWS, count - r) - 1](rows + r * inputs, inputs, panel,
                                          INT4 ? sums + r * (inputs / GROUP) : nullptr,
                                          to + r * PANEL);
}

} // namespace quantized
