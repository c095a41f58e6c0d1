// Products of a few rows with the rows of a matrix, with sums in float32: the inner loops of row_kernel.py.
//
// A tile is R rows of activations times C rows of the matrix: R * C sums, in registers.  Each number of the matrix is
// loaded once and used R times.  A processor does not prefetch across pages, so each cache line that is read prefetches
// the one AHEAD rows of the matrix further on.
//
// One order of additions serves every R and C, so a row's product does not depend on the rows beside it.

// The wrapper in C++ and AOTInductor put all kernels of a graph, each with this text, into one file.
#ifndef KVPASS_ROW_KERNEL
#define KVPASS_ROW_KERNEL

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace kvpass {

constexpr int64_t LANES = 16, CACHE_LINE = 64, AHEAD = 4;

// Rows in float32, and a matrix in a dtype whose numbers are converted as they are loaded.
template <typename T> struct Products {
  typedef float Left;
  typedef T Right;
  typedef __m512 Vector;
  static constexpr int64_t STEP = LANES;
  static Vector load_left(const float* from) { return _mm512_loadu_ps(from); }
  static Vector load_right(const Right* from);
  static __m512 add(__m512 sum, Vector left, Vector right) { return _mm512_fmadd_ps(left, right, sum); }
};

template <> inline __m512 Products<float>::load_right(const float* from) { return _mm512_loadu_ps(from); }

template <> inline __m512 Products<at::BFloat16>::load_right(const at::BFloat16* from) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

template <> inline __m512 Products<at::Half>::load_right(const at::Half* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

template <> inline __m512 Products<int8_t>::load_right(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

template <> inline __m512 Products<uint8_t>::load_right(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

#ifdef __AVX512BF16__
// Rows and a matrix in bfloat16, multiplied in pairs.
struct DotProducts {
  typedef uint16_t Left, Right;
  typedef __m512bh Vector;
  static constexpr int64_t STEP = 32;
  static Vector load_left(const Left* from) { return (Vector)_mm512_loadu_si512(from); }
  static Vector load_right(const Right* from) { return (Vector)_mm512_loadu_si512(from); }
  static __m512 add(__m512 sum, Vector left, Vector right) { return _mm512_dpbf16_ps(sum, left, right); }
};
#else  // a compiler that does not know the instructions
struct DotProducts {
  typedef at::BFloat16 Left, Right;
  typedef __m512 Vector;
  static constexpr int64_t STEP = LANES;
  static Vector load_left(const Left* from) { return Products<Right>::load_right(from); }
  static Vector load_right(const Right* from) { return Products<Right>::load_right(from); }
  static __m512 add(__m512 sum, Vector left, Vector right) { return _mm512_fmadd_ps(left, right, sum); }
};
#endif

// Adds lanes at a distance of W in two vectors, and interleaves the results.
template <int W> inline __m512 paired(__m512 a, __m512 b) {
  alignas(64) int32_t low[LANES], high[LANES];
  for (int lane = 0; lane < LANES; ++lane) {
    low[lane] = (lane & ~W) + (lane & W ? LANES : 0);
    high[lane] = low[lane] + W;
  }
  const __m512i first = _mm512_load_si512(low), second = _mm512_load_si512(high);
  return _mm512_add_ps(_mm512_permutex2var_ps(a, first, b), _mm512_permutex2var_ps(a, second, b));
}

// Returns the sums of the lanes of each of 16 vectors.
inline __m512 lane_sums(__m512 (&x)[LANES]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = paired<8>(x[i], x[i + 8]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x[i] = paired<4>(x[i], x[i + 4]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) x[i] = paired<2>(x[i], x[i + 2]);
  return paired<1>(x[0], x[1]);
}

// Multiplies rows [R, size] with C rows of a matrix, to [R, C].
template <typename Kind, int R, int C>
inline void multiply_tile(
    const typename Kind::Left* rows, const typename Kind::Right* matrix, int64_t stride, int64_t size, float* output,
    int64_t output_stride) {
  static_assert(R * C <= LANES);
  constexpr int64_t LINE = CACHE_LINE / sizeof(*matrix), STEP = Kind::STEP;
  __m512 sums[LANES] = {};
  for (int64_t line = 0; line < size; line += LINE) {
    for (int column = 0; column < C; ++column)
      _mm_prefetch((const char*)(matrix + (column + AHEAD) * stride + line), _MM_HINT_T0);
#pragma GCC unroll 4
    for (int64_t at = line; at < line + LINE; at += STEP) {
      typename Kind::Vector right[C];
#pragma GCC unroll 16
      for (int column = 0; column < C; ++column) right[column] = Kind::load_right(matrix + column * stride + at);
#pragma GCC unroll 16
      for (int row = 0; row < R; ++row) {
        const auto left = Kind::load_left(rows + row * size + at);
#pragma GCC unroll 16
        for (int column = 0; column < C; ++column) {
          __m512& sum = sums[row * C + column];
          sum = Kind::add(sum, left, right[column]);
        }
      }
    }
  }
  alignas(64) float result[LANES];
  _mm512_store_ps(result, lane_sums(sums));
  for (int row = 0; row < R; ++row) std::memcpy(output + row * output_stride, result + row * C, C * sizeof(float));
}

// Multiplies rows [R, size] with `count` rows of a matrix, to [R, count].
template <typename Kind, int R>
inline void multiply(
    const void* rows, const void* matrix, int64_t stride, int64_t size, int64_t count, float* output,
    int64_t output_stride) {
  constexpr int C = R <= 4 ? 4 : R <= 8 ? 2 : 1;
  const auto* left = (const typename Kind::Left*)rows;
  const auto* right = (const typename Kind::Right*)matrix;
  int64_t column = 0;
  for (; column + C <= count; column += C)
    multiply_tile<Kind, R, C>(left, right + column * stride, stride, size, output + column, output_stride);
  for (; column < count; ++column)
    multiply_tile<Kind, R, 1>(left, right + column * stride, stride, size, output + column, output_stride);
}

}  // namespace kvpass

#endif
