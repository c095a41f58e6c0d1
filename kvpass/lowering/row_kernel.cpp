// Products of a few rows with the rows of a matrix, with sums in float32: the inner loops of row_kernel.py.
//
// A tile is R rows of activations times C rows of the matrix: R * C sums, at most LANES, in registers.  Each number of the matrix is
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

constexpr int64_t CACHE_LINE = 64, AHEAD = 4;

// A vector has LANES numbers in float32.  `load` converts numbers of other dtypes, and `lane_sums` returns the sums of
// the lanes of each of LANES vectors.
#ifdef __AVX512F__
constexpr int64_t LANES = 16;
typedef __m512 Floats;

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const at::BFloat16* from) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
inline Floats load(const at::Half* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
inline Floats load(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
inline Floats load(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
inline Floats multiply_add(Floats sum, Floats left, Floats right) { return _mm512_fmadd_ps(left, right, sum); }

// Adds lanes at a distance of W in two vectors, and interleaves the results.
template <int W> inline Floats paired(Floats a, Floats b) {
  alignas(64) int32_t low[LANES], high[LANES];
  for (int lane = 0; lane < LANES; ++lane) {
    low[lane] = (lane & ~W) + (lane & W ? LANES : 0);
    high[lane] = low[lane] + W;
  }
  const __m512i first = _mm512_load_si512(low), second = _mm512_load_si512(high);
  return _mm512_add_ps(_mm512_permutex2var_ps(a, first, b), _mm512_permutex2var_ps(a, second, b));
}

inline Floats lane_sums(Floats (&x)[LANES]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = paired<8>(x[i], x[i + 8]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x[i] = paired<4>(x[i], x[i + 4]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) x[i] = paired<2>(x[i], x[i + 2]);
  return paired<1>(x[0], x[1]);
}
#else
constexpr int64_t LANES = 8;
typedef __m256 Floats;

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline Floats load(const at::BFloat16* from) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
inline Floats load(const at::Half* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
inline Floats load(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
inline Floats load(const uint8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
inline Floats multiply_add(Floats sum, Floats left, Floats right) { return _mm256_fmadd_ps(left, right, sum); }

inline Floats lane_sums(Floats (&x)[LANES]) {
  const Floats low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const Floats high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
#endif

// Rows in float32, and a matrix in a dtype whose numbers are converted as they are loaded.
template <typename T> struct Products {
  typedef float Left;
  typedef T Right;
  typedef Floats Vector;
  static constexpr int64_t STEP = LANES;
  static Vector load_left(const Left* from) { return load(from); }
  static Vector load_right(const Right* from) { return load(from); }
  static Floats add(Floats sum, Vector left, Vector right) { return multiply_add(sum, left, right); }
};

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
struct DotProducts : Products<at::BFloat16> {
  typedef at::BFloat16 Left;
  static Vector load_left(const Left* from) { return load(from); }
};
#endif

// Multiplies rows [R, size] with C rows of a matrix, to [R, C].
template <typename Kind, int R, int C>
inline void multiply_tile(
    const typename Kind::Left* rows, const typename Kind::Right* matrix, int64_t stride, int64_t size, float* output,
    int64_t output_stride) {
  static_assert(R * C <= LANES);
  constexpr int64_t LINE = CACHE_LINE / sizeof(*matrix), STEP = Kind::STEP;
  Floats sums[LANES] = {};
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
          Floats& sum = sums[row * C + column];
          sum = Kind::add(sum, left, right[column]);
        }
      }
    }
  }
  alignas(64) float result[LANES];
  const Floats whole = lane_sums(sums);
  std::memcpy(result, &whole, sizeof(whole));
  for (int row = 0; row < R; ++row) std::memcpy(output + row * output_stride, result + row * C, C * sizeof(float));
}

// Multiplies rows [R, size] with `count` rows of a matrix, to [R, count]; more than LANES rows in two parts.
template <typename Kind, int R>
inline void multiply(
    const void* rows, const void* matrix, int64_t stride, int64_t size, int64_t count, float* output,
    int64_t output_stride) {
  const auto* left = (const typename Kind::Left*)rows;
  const auto* right = (const typename Kind::Right*)matrix;
  if constexpr (R > LANES) {
    multiply<Kind, LANES>(left, right, stride, size, count, output, output_stride);
    multiply<Kind, R - LANES>(
        left + LANES * size, right, stride, size, count, output + LANES * output_stride, output_stride);
  } else {
    constexpr int C = 4 * R <= LANES ? 4 : 2 * R <= LANES ? 2 : 1;
    int64_t column = 0;
    for (; column + C <= count; column += C)
      multiply_tile<Kind, R, C>(left, right + column * stride, stride, size, output + column, output_stride);
    for (; column < count; ++column)
      multiply_tile<Kind, R, 1>(left, right + column * stride, stride, size, output + column, output_stride);
  }
}

}  // namespace kvpass

#endif
