// Attention on a CPU, and column sums of its matrix, which is never stored: the counterpart of column_kernel.py.
//
// `attend` multiplies probabilities by values as it meets them, with an online softmax, one block of queries at a time.
// If column sums are wanted as well, it keeps the probabilities of a block until the totals of its rows are known;
// `attend_with_means` does so for the mean of a query's probabilities over the heads, a few queries at a time.
//
// `find_totals` computes the maximum of each row's logits and the sum of 2^(logit - maximum), unless the caller knows
// their log-sum-exp.
// `add_columns` computes the probabilities again, one block of keys per task, and adds them up over the queries;
// `write_probabilities` writes those of a few queries. A sum has one task and one order, so results do not depend on the number of
// threads.
//
// The macros BFLOAT16_PRODUCTS and MASK select the dtype of queries and keys, and the kind of the mask, so that a variant
// compiles within a second. Logits are in base two. -infinity hides a key. The lowest finite number is a hidden key of an
// additive mask: a query whose keys are all hidden in this way attends to all of them alike, as in a softmax.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <vector>

// Polynomials take a third fewer instructions with fused multiply-add, which Inductor turns off for its own kernels.
#if defined(__clang__)
#pragma clang fp contract(fast)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif

#if BFLOAT16_PRODUCTS
typedef uint16_t T;  // bits of queries and keys
typedef c10::BFloat16 Factor;
#else
typedef float T, Factor;
#endif

namespace {

enum Mask { NONE, BOOL, FLOAT, BFLOAT16 };
constexpr Mask KIND = Mask(MASK);
constexpr int64_t MASK_BYTES = KIND == BOOL ? 1 : KIND == FLOAT ? 4 : 2;  // of one entry

// The compiler computes vectors that are wider than the processor's one number at a time.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

constexpr int64_t QUERIES = TILE_QUERIES, KEYS = TILE_KEYS;  // attention_tiles.py defines the macros
constexpr float LOWEST = -3.4028234663852886e38f, LOG2_E = 1.4426950408889634f;
constexpr float LARGEST_USABLE = 4096;  // a larger log-sum-exp is too coarse in float32 to divide by

// The fields of `AttentionOperands` in attention_tiles.py; strides are in elements, 0 along dimensions of size one.
struct AttentionOperands {
  const void *query, *key, *mask;  // [B, Hq, q, D], [B, Hkv, S, D], [B, Hkv, G, q, S]
  const float *sink_logit, *log_sum_exp;    // [B, Hkv, G, q] and [B, Hq, q], or null
  void* packed;                             // [B, Hkv, blocks, D, KEYS]
  float *shift, *factor;                    // [B, Hq, q]
  int64_t batch, heads, groups, queries, keys, dim;
  int64_t query_stride[3], key_stride[3], mask_stride[4], sink_stride[4], total_stride[3];
  int64_t causal, threads;
  float scale, cap;

  int64_t blocks() const { return (keys + KEYS - 1) / KEYS; }
  int64_t offset() const { return keys - queries; }  // of the first query among the keys
};

struct OutputOperands {  // the fields of `OutputOperands` in attention_tiles.py
  const void* value;      // [B, Hkv, S, D]
  void *packed, *output;  // [B, Hkv, blocks, KEYS, D] and [B, Hq, q, D]
  float* log_sum_exp;     // [B, Hq, q]
  const float* weights;   // [B, q], of the queries in the sums, or null
  float *sums, *squares;  // [B, Hq, parts, blocks * KEYS], or null; zero at first
  int64_t value_stride[3], output_stride[3];
  int64_t parts;  // of each head's blocks of queries, a task each
};

template <typename X> X load(const void* from) {
  X x;
  std::memcpy(&x, from, sizeof(X));
  return x;
}

inline vec load_as_float(const float* from) { return load<vec>(from); }

inline vec load_as_float(const uint16_t* from) { return (vec)(__builtin_convertvector(load<halves>(from), ivec) << 16); }

inline void store(float* to, vec x) { std::memcpy(to, &x, sizeof(vec)); }

// Rounds to the nearest number of the dtype, ties to even; NaN stays NaN.
inline void store_rounded(float* to, vec x) { store(to, x); }

inline void store_rounded(uint16_t* to, vec x) {
  const ivec bits = (ivec)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const halves made = __builtin_convertvector(x == x ? rounded : ivec{} + 0x7fc0, halves);
  std::memcpy(to, &made, sizeof(halves));
}

inline vec all(float x) { return vec{} + x; }

// Both return y if one of the two is not a number.
inline vec larger(vec x, vec y) { return x > y ? x : y; }

inline vec smaller(vec x, vec y) { return x < y ? x : y; }

// 2^x with a relative error below 1e-7, 0 below 2^-126, and x if it is not a number.
inline vec power_of_two(vec x) {
  vec bounded = larger(x, all(-126));
  vec rounded = bounded + 12582912.f;  // 1.5 * 2^23: its last bits are the integer
  vec rest = bounded - (rounded - 12582912.f);
  vec made = 0.0013276472f * rest + 0.00967554174f;
  made = made * rest + 0.0555071328f;
  made = made * rest + 0.240221197f;
  made = made * rest + 0.693146967f;
  made = made * rest + 1.00000007f;
  made = (vec)((ivec)made + ((ivec)rounded << 23));
  return x >= -126.f ? made : x < -126.f ? vec{} : x;
}

// Combines the lanes in pairs, whose steps do not wait for each other.
template <typename Combine> float reduced(vec x, Combine combine) {
  float lanes[LANES];
  store(lanes, x);
  for (int64_t width = LANES / 2; width; width /= 2)
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] = combine(lanes[lane], lanes[lane + width]);
  return lanes[0];
}

inline float sum_of(vec x) {
  return reduced(x, [](float a, float b) { return a + b; });
}

inline float highest_of(vec x) {
  return reduced(x, [](float a, float b) { return a > b ? a : b; });
}

// The mask of a query, from a block's first key on.
inline const char* mask_of(
    const AttentionOperands& p, int64_t row, int64_t head, int64_t group, int64_t query, int64_t first) {
  const int64_t* by = p.mask_stride;
  return (const char*)p.mask + (row * by[0] + head * by[1] + group * by[2] + query * by[3] + first) * MASK_BYTES;
}

// One query's logits of one block of keys.
struct Row {
  const AttentionOperands& operands;
  const char* mask;  // of this query, from the block's first key on; null if it changes nothing
  int64_t visible_count;  // the first keys of the block: those that exist and are not after the query

  Row(const AttentionOperands& p, const char* mask, int64_t query, int64_t first) : operands(p), mask(mask) {
    visible_count = std::min(KEYS, p.keys - first);
    if (p.causal) visible_count = std::min(visible_count, query + p.offset() + 1 - first);
  }

  vec masked(vec x, int64_t at) const {
    if (KIND == BOOL) return __builtin_convertvector(load<bytes>(mask + at), ivec) != 0 ? x : all(-INFINITY);
    const vec added = KIND == FLOAT ? load_as_float((const float*)mask + at) : load_as_float((const uint16_t*)mask + at);
    return added == -INFINITY ? added : larger(all(LOWEST), x + added * LOG2_E);
  }

  vec masked_tail(vec x, int64_t at) const {  // what lies behind the mask's row must not be read
    char copy[LANES * MASK_BYTES] = {};
    std::memcpy(copy, mask + MASK_BYTES * at, MASK_BYTES * (visible_count - at));
    Row whole = *this;
    whole.mask = copy;
    return whole.masked(x, 0);
  }

  // Calls `use(logits, index of the first)` for all visible keys; -infinity fills the last vector.
  template <typename Use> void each(const float* products, Use use) const {
    const float scale = operands.scale * LOG2_E, cap = operands.cap;
    if (visible_count == KEYS && !mask && cap == 0) {  // most tiles; the compiler unrolls this loop
      for (int64_t at = 0; at < KEYS; at += LANES) use(load<vec>(products + at) * scale, at);
      return;
    }
    for (int64_t at = 0; at < visible_count; at += LANES) {
      vec x = load<vec>(products + at) * scale;
      if (cap > 0) x = (2.f / (1.f + power_of_two(smaller(all(126), x * (-2.f / cap)))) - 1.f) * (cap * LOG2_E);  // tanh
      const bool whole = at + LANES <= visible_count;
      if (KIND != NONE && mask) x = whole ? masked(x, at) : masked_tail(x, at);
      if (!whole) {
        ivec lane;
        for (int i = 0; i < LANES; ++i) lane[i] = i;
        x = lane < (int32_t)(visible_count - at) ? x : all(-INFINITY);
      }
      use(x, at);
    }
  }
};

inline void product(int64_t dim, int64_t stride, const T* queries, const T* keys, float* products) {
  const auto *left = (const Factor*)queries, *right = (const Factor*)keys;
  at::native::cpublas::brgemm(QUERIES, KEYS, dim, stride, KEYS, KEYS, false, left, right, products, sizeof(T) == 2);
}

// Adds probabilities [QUERIES, KEYS] times values [KEYS, D] to an output [QUERIES, D].
inline void add_product(int64_t dim, const T* probs, const T* values, float* output) {
  const auto *left = (const Factor*)probs, *right = (const Factor*)values;
  at::native::cpublas::brgemm(QUERIES, dim, KEYS, KEYS, dim, dim, true, left, right, output, sizeof(T) == 2);
}

// Calls `work(worker, task)` for all tasks in parallel; each thread makes a worker of its own from `arguments`. An
// exception must not leave a parallel section, which would end the process: after the first one, for want of memory or of
// the library's, the rest of the work is left out, and it is thrown at the end.
template <typename Worker, typename Work, typename... Arguments>
void for_each_task(int64_t threads, int64_t tasks, Work work, const Arguments&... arguments) {
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  const auto attempt = [&](auto step) {
    if (failed) return;
    try {
      step();
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  };
#pragma omp parallel num_threads(threads)
  {
    std::optional<Worker> worker;
    attempt([&] { worker.emplace(arguments...); });
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) attempt([&] { work(*worker, task); });
  }
  if (failed) std::rethrow_exception(error);
}

// Tiles of products of a block of queries and a block of keys.
class Tiles {
 public:
  explicit Tiles(const AttentionOperands& p) : operands(p), rest(QUERIES * p.dim), products(QUERIES * KEYS) {}
  ~Tiles() { at::native::cpublas::brgemm_release(sizeof(T) == 2); }

  const float* row(int64_t index) const { return products.data() + index * KEYS; }

  void multiply(int64_t row, int64_t head, int64_t group, int64_t query, int64_t block) {
    const AttentionOperands& p = operands;
    const int64_t q_head = head * p.groups + group, dim = p.dim, count = std::min(QUERIES, p.queries - query);
    const T* from = (const T*)p.query + row * p.query_stride[0] + q_head * p.query_stride[1] + query * p.query_stride[2];
    int64_t stride = p.query_stride[2];
    if (count < QUERIES || stride < dim) {  // the library compiles a kernel for each size of a product: there is one size
      for (int64_t i = 0; i < count; ++i) std::memcpy(&rest[i * dim], from + i * stride, dim * sizeof(T));
      from = rest.data(), stride = dim;
    }
    const T* keys = (const T*)p.packed + ((row * p.heads + head) * p.blocks() + block) * dim * KEYS;
    product(dim, stride, from, keys, products.data());
  }

 private:
  const AttentionOperands& operands;
  std::vector<T> rest;
  std::vector<float> products;
};

// Multiplies once before the parallel sections, so that a library without these products throws before any work.
void check(const AttentionOperands& p) {
  const int64_t stride = std::max(p.dim, p.query_stride[2]);
  std::vector<T> queries(QUERIES * stride), keys(KEYS * p.dim);
  std::vector<T> probs(QUERIES * KEYS);
  std::vector<float> products(QUERIES * KEYS), output(QUERIES * p.dim);
  for (const int64_t each : {p.dim, stride}) product(p.dim, each, queries.data(), keys.data(), products.data());
  add_product(p.dim, probs.data(), keys.data(), output.data());
  at::native::cpublas::brgemm_release(sizeof(T) == 2);
}

// Lays out blocks of keys or values [B, Hkv, S, D] as right operands of products: keys as [D, KEYS], values as [KEYS, D].
// Half precision comes in pairs along the first of the two.
template <bool VALUES> void pack(const AttentionOperands& p, const void* rows, const int64_t* stride, void* packed) {
  constexpr int64_t pair = sizeof(T) == 2 ? 2 : 1;
#pragma omp parallel for num_threads(p.threads)
  for (int64_t task = 0; task < p.batch * p.heads * p.blocks(); ++task) {
    const int64_t block = task % p.blocks(), head = task / p.blocks() % p.heads, row = task / p.blocks() / p.heads;
    T* to = (T*)packed + task * p.dim * KEYS;
    const T* from = (const T*)rows + row * stride[0] + head * stride[1] + block * KEYS * stride[2];
    const int64_t count = std::min(KEYS, p.keys - block * KEYS);
    std::memset(to, 0, p.dim * KEYS * sizeof(T));
    for (int64_t j = 0; j < count; ++j)
      for (int64_t d = 0; d < p.dim; ++d) {
        const int64_t at = VALUES ? (j / pair * p.dim + d) * pair + j % pair : (d / pair * KEYS + j) * pair + d % pair;
        std::memcpy(to + at, from + j * stride[2] + d, sizeof(T));
      }
  }
}

void prepare_keys(const AttentionOperands& p) { check(p), pack<false>(p, p.key, p.key_stride, p.packed); }

enum Tile { HIDDEN, VISIBLE, MIXED };

// Whether a mask hides all keys of a tile, or none.
Tile classify(const AttentionOperands& p, int64_t row, int64_t head, int64_t group, int64_t query, int64_t first) {
  if (KIND == NONE) return VISIBLE;
  static const float zeros[KEYS] = {};
  const int64_t count = p.mask_stride[3] ? std::min(QUERIES, p.queries - query) : 1, here = std::min(KEYS, p.keys - first);
  bool hidden = KIND == BOOL, visible = true;
  for (int64_t i = 0; i < count && (hidden || visible); ++i) {
    const char* mask = mask_of(p, row, head, group, query + i, first);
    hidden = hidden && !std::memcmp(mask, zeros, here);
    visible = visible && (KIND == BOOL ? !std::memchr(mask, 0, here) : !std::memcmp(mask, zeros, here * MASK_BYTES));
  }
  return hidden ? HIDDEN : visible ? VISIBLE : MIXED;
}

// Reads the totals of some queries off their log-sum-exp; false if one is missing or too coarse.
bool take_known_totals(const AttentionOperands& p, int64_t row, int64_t q_head, int64_t query, int64_t count) {
  if (!p.log_sum_exp) return false;
  const float* from = p.log_sum_exp + row * p.total_stride[0] + q_head * p.total_stride[1];
  const int64_t at = (row * p.heads * p.groups + q_head) * p.queries + query;
  for (int64_t i = 0; i < count; ++i) {
    const float total = from[(query + i) * p.total_stride[2]];
    if (!(std::fabs(total) < LARGEST_USABLE)) return false;
    p.shift[at + i] = total * LOG2_E;
    p.factor[at + i] = 1;
  }
  return true;
}

// Adds the sinks of some queries to the sums of their 2^(logit - top).
void add_sinks(
    const AttentionOperands& p, int64_t row, int64_t head, int64_t group, int64_t query, int64_t count, float* top,
    float* sum) {
  if (!p.sink_logit) return;
  const int64_t* by = p.sink_stride;
  for (int64_t i = 0; i < count; ++i) {
    const float sink = LOG2_E * p.sink_logit[row * by[0] + head * by[1] + group * by[2] + (query + i) * by[3]];
    const float now = std::max(top[i], sink);
    if (now > -INFINITY) sum[i] = sum[i] * std::exp2(top[i] - now) + std::exp2(sink - now);
    top[i] = now;
  }
}

// For each query, `shift` and `factor`, so that a probability is factor * 2^(logit - shift).
void find_totals(const AttentionOperands& p) {
  const int64_t blocks = (p.queries + QUERIES - 1) / QUERIES, q_heads = p.heads * p.groups;
  const auto work = [&](Tiles& tiles, int64_t task) {
    const int64_t query = (blocks - 1 - task / q_heads / p.batch) * QUERIES;  // the longest first
    const int64_t q_head = task % q_heads, row = task / q_heads % p.batch;
    const int64_t head = q_head / p.groups, group = q_head % p.groups, count = std::min(QUERIES, p.queries - query);
    if (take_known_totals(p, row, q_head, query, count)) return;
    float top[QUERIES], sum[QUERIES] = {};
    std::fill(top, top + QUERIES, -INFINITY);
    const int64_t end = p.causal ? std::min(p.keys, query + count + p.offset()) : p.keys;
    for (int64_t first = 0; first < end; first += KEYS) {
      const Tile tile = classify(p, row, head, group, query, first);
      if (tile == HIDDEN) continue;
      tiles.multiply(row, head, group, query, first / KEYS);
      for (int64_t i = 0; i < count; ++i) {
        const char* mask = tile == MIXED ? mask_of(p, row, head, group, query + i, first) : nullptr;
        const Row keys(p, mask, query + i, first);
        vec highest = all(-INFINITY), added{};
        keys.each(tiles.row(i), [&](vec x, int64_t) { highest = larger(highest, x); });
        const float now = std::max(top[i], highest_of(highest));
        if (now == -INFINITY) continue;
        keys.each(tiles.row(i), [&](vec x, int64_t) { added += power_of_two(x - now); });
        sum[i] = sum[i] * std::exp2(top[i] - now) + sum_of(added);
        top[i] = now;
      }
    }
    const int64_t at = (row * q_heads + q_head) * p.queries + query;
    add_sinks(p, row, head, group, query, count, top, sum);
    for (int64_t i = 0; i < count; ++i) {
      p.shift[at + i] = sum[i] > 0 ? top[i] : 0;
      p.factor[at + i] = sum[i] > 0 ? 1 / sum[i] : 0;
    }
  };
  for_each_task<Tiles>(p.threads, p.batch * q_heads * blocks, work, p);
}

// The tiles of probabilities of a block of queries, each relative to the highest logit up to that tile.
struct KeptTiles {
  struct Entry {
    int64_t first;       // key
    float top[QUERIES];  // the highest logits

    // What a query's kept probabilities are multiplied by; 0 also for rows that are not numbers.
    float scale_of(int64_t i, const float* final_top, const float* factor) const {
      return factor[i] == 0 ? 0 : factor[i] * std::exp2(top[i] - final_top[i]);
    }
  };
  std::vector<Entry> tiles;
  std::vector<T> probs;  // [tiles, QUERIES, KEYS]

  T* probs_of(int64_t tile) { return probs.data() + tile * QUERIES * KEYS; }

  // Adds the tiles to rows of `stride` numbers, from the first key on.
  void add_rows(int64_t count, const float* top, const float* factor, float* rows, int64_t stride) {
    for (size_t n = 0; n < tiles.size(); ++n) {
      for (int64_t i = 0; i < count; ++i) {
        const float by = tiles[n].scale_of(i, top, factor);
        if (by == 0) continue;
        const T* from = probs_of(n) + i * KEYS;
        float* to = rows + i * stride + tiles[n].first;
        for (int64_t at = 0; at < KEYS; at += LANES)
          store(to + at, load<vec>(to + at) + load_as_float(from + at) * by);
      }
    }
  }

  // Adds the tiles to the sums over queries, whose probabilities are factor * 2^(logit - top).
  void add_columns(int64_t count, const float* top, const float* factor, const float* weights, float* sums, float* squares) {
    for (size_t n = 0; n < tiles.size(); ++n) {
      const Entry& tile = tiles[n];
      float by[QUERIES];
      for (int64_t i = 0; i < count; ++i) by[i] = weights[i] == 0 ? 0 : tile.scale_of(i, top, factor);
      for (int64_t at = 0; at < KEYS; at += LANES) {
        const T* from = probs_of(n) + at;
        vec sum{}, square{};
        for (int64_t i = 0; i < count; ++i) {
          if (by[i] == 0) continue;
          const vec prob = load_as_float(from + i * KEYS) * by[i], weighted = prob * weights[i];
          sum += weighted;
          square += weighted * prob;
        }
        float* to = sums + tile.first + at;
        store(to, load<vec>(to) + sum);
        if (!squares) continue;
        to = squares + tile.first + at;
        store(to, load<vec>(to) + square);
      }
    }
  }
};

// Computes attention of a block of queries and the log-sum-exp of its rows, and adds up columns or heads.
class BlockAttention {
 public:
  BlockAttention(const AttentionOperands& p, const OutputOperands& v, bool keeps)
      : p(p), v(v), tiles(p), keeps(keeps), output(QUERIES * p.dim + LANES) {
    kept.tiles.reserve(p.blocks());
    kept.probs.resize((keeps ? p.blocks() : 1) * QUERIES * KEYS);
  }

  // Adds the probabilities to the column sums of a part, if there are sums.
  void run(int64_t row, int64_t q_head, int64_t query, int64_t part) {
    const int64_t count = attend(row, q_head, query);
    if (!v.weights) return;
    const int64_t to = ((row * p.heads * p.groups + q_head) * v.parts + part) * p.blocks() * KEYS;
    const float* weights = v.weights + row * p.queries + query;
    kept.add_columns(count, top, factor, weights, v.sums + to, v.squares ? v.squares + to : nullptr);
  }

  // Writes the mean of the probabilities over all heads to rows of `stride` numbers.
  void run_all_heads(int64_t row, int64_t query, float* rows, int64_t stride) {
    const int64_t q_heads = p.heads * p.groups;
    std::fill(rows, rows + std::min(QUERIES, p.queries - query) * stride, 0.f);
    for (int64_t q_head = 0; q_head < q_heads; ++q_head) {
      const int64_t count = attend(row, q_head, query);
      for (int64_t i = 0; i < count; ++i) factor[i] /= q_heads;
      kept.add_rows(count, top, factor, rows, stride);
    }
  }

 private:
  // Returns the number of queries of the block, with their `top` and `factor`.
  int64_t attend(int64_t row, int64_t q_head, int64_t query) {
    const int64_t head = q_head / p.groups, group = q_head % p.groups, dim = p.dim;
    const int64_t count = std::min(QUERIES, p.queries - query);
    std::fill(top, top + QUERIES, -INFINITY);
    std::fill(sums, sums + QUERIES, vec{});
    std::fill(output.begin(), output.end(), 0.f);
    kept.tiles.clear();
    const int64_t end = p.causal ? std::min(p.keys, query + count + p.offset()) : p.keys;
    for (int64_t first = 0; first < end; first += KEYS) {
      const Tile tile = classify(p, row, head, group, query, first);
      if (tile == HIDDEN) continue;
      tiles.multiply(row, head, group, query, first / KEYS);
      const T* probs = exponentiate(count, first, [&](int64_t i) {
        return Row(p, tile == MIXED ? mask_of(p, row, head, group, query + i, first) : nullptr, query + i, first);
      });
      const T* values = (const T*)v.packed + ((row * p.heads + head) * p.blocks() + first / KEYS) * dim * KEYS;
      add_product(dim, probs, values, output.data());
    }
    finish(row, q_head, query, count);
    return count;
  }

  // Divides by the totals of the rows, and writes the output.
  void finish(int64_t row, int64_t q_head, int64_t query, int64_t count) {
    const int64_t head = q_head / p.groups, group = q_head % p.groups, dim = p.dim;
    const int64_t at = row * p.heads * p.groups + q_head;
    float sum[QUERIES], before[QUERIES];
    for (int64_t i = 0; i < count; ++i) sum[i] = sum_of(sums[i]), before[i] = top[i];
    add_sinks(p, row, head, group, query, count, top, sum);
    for (int64_t i = 0; i < count; ++i) {
      T* to = (T*)v.output + row * v.output_stride[0] + q_head * v.output_stride[1] + (query + i) * v.output_stride[2];
      const float by = sum[i] == 0 ? 0 : (p.sink_logit ? std::exp2(before[i] - top[i]) : 1) / sum[i];
      for (int64_t d = 0; d < dim; d += LANES) {
        T made[LANES];
        store_rounded(made, load<vec>(&output[i * dim + d]) * by);
        std::copy(made, made + std::min(LANES, dim - d), to + d);
      }
      v.log_sum_exp[at * p.queries + query + i] = (top[i] + std::log2(sum[i])) / LOG2_E;
      factor[i] = sum[i] > 0 ? 1 / sum[i] : 0;
    }
  }

  // Returns the probabilities of a tile, relative to the highest logits so far, which it raises.
  template <typename KeysOf> const T* exponentiate(int64_t count, int64_t first, KeysOf keys_of) {
    T* probs = kept.probs_of(keeps ? kept.tiles.size() : 0);
    float highest[QUERIES];
    for (int64_t i = 0; i < count; ++i) {
      vec lanes = all(-INFINITY);
      keys_of(i).each(tiles.row(i), [&](vec x, int64_t) { lanes = larger(lanes, x); });
      highest[i] = highest_of(lanes);
    }
    for (int64_t i = 0; i < count; ++i) {
      if (highest[i] > top[i]) {
        const float by = std::exp2(top[i] - highest[i]);
        for (int64_t d = 0; d < p.dim; ++d) output[i * p.dim + d] *= by;
        sums[i] *= by;
        top[i] = highest[i];
      }
      const Row keys = keys_of(i);
      T* to = probs + i * KEYS;
      if (keys.visible_count < KEYS) std::fill(to, to + KEYS, T(0));
      const float shift = top[i] == -INFINITY ? 0 : top[i];  // where all keys are hidden, or not a number
      vec added{};
      keys.each(tiles.row(i), [&](vec x, int64_t at) {
        const vec prob = power_of_two(x - shift);
        added += prob;
        store_rounded(to + at, prob);
      });
      sums[i] += added;
    }
    if (keeps) {
      kept.tiles.emplace_back().first = first;
      std::copy(top, top + QUERIES, kept.tiles.back().top);
    }
    return probs;
  }

  const AttentionOperands& p;
  const OutputOperands& v;
  Tiles tiles;
  bool keeps;  // the tiles of a block
  KeptTiles kept;
  std::vector<float> output;
  float top[QUERIES], factor[QUERIES];  // of each query: the highest logit, and one over the sum of 2^(logit - top)
  vec sums[QUERIES];  // of each query, by lanes
};

void add_values(const AttentionOperands& p, const OutputOperands& v) {
  const int64_t blocks = (p.queries + QUERIES - 1) / QUERIES, q_heads = p.heads * p.groups;
  const auto work = [&](BlockAttention& attention, int64_t task) {
    const int64_t part = task / q_heads / p.batch;  // the longest first
    for (int64_t block = blocks - 1 - part; block >= 0; block -= v.parts)
      attention.run(task / q_heads % p.batch, task % q_heads, block * QUERIES, part);
  };
  for_each_task<BlockAttention>(p.threads, p.batch * q_heads * v.parts, work, p, v, v.weights != nullptr);
}

// Computes attention of `count` queries of one row, and writes means over its heads to [count, stride]. Queries start at
// a multiple of QUERIES; a row ends after the block of the last key they see.
void add_values_and_heads(
    const AttentionOperands& p, const OutputOperands& v, int64_t row, int64_t start, int64_t count, int64_t stride,
    float* means) {
  const auto work = [&](BlockAttention& attention, int64_t task) {
    attention.run_all_heads(row, start + task * QUERIES, means + task * QUERIES * stride, stride);
  };
  for_each_task<BlockAttention>(p.threads, (count + QUERIES - 1) / QUERIES, work, p, v, true);
}

// Sums probabilities over queries of weights [B, q] to [B, Hkv, G, S], and their squares unless that is null.
void add_columns(const AttentionOperands& p, const float* weights, float* sums_out, float* squares_out) {
  const int64_t tasks = p.batch * p.heads * p.groups * p.blocks();
  const auto work = [&](Tiles& tiles, int64_t task) {
    const int64_t block = task / (tasks / p.blocks()), first = block * KEYS;  // the first keys have most queries
    const int64_t group = task % p.groups, head = task / p.groups % p.heads, row = task / p.groups / p.heads % p.batch;
    const int64_t totals = ((row * p.heads + head) * p.groups + group) * p.queries;
    float sums[KEYS] = {}, squares[KEYS] = {};
    for (int64_t query = p.causal ? std::max<int64_t>(0, first - p.offset()) : 0; query < p.queries; query += QUERIES) {
      const Tile tile = classify(p, row, head, group, query, first);
      if (tile == HIDDEN) continue;
      tiles.multiply(row, head, group, query, block);
      const int64_t count = std::min(QUERIES, p.queries - query);
      for (int64_t i = 0; i < count; ++i) {
        const float weight = weights[row * p.queries + query + i], factor = p.factor[totals + query + i];
        if (weight == 0 || factor == 0) continue;
        const float shift = p.shift[totals + query + i];
        const char* mask = tile == MIXED ? mask_of(p, row, head, group, query + i, first) : nullptr;
        Row(p, mask, query + i, first).each(tiles.row(i), [&](vec x, int64_t at) {
          const vec prob = power_of_two(x - shift) * factor, weighted = prob * weight;
          store(sums + at, load<vec>(sums + at) + weighted);
          if (squares_out) store(squares + at, load<vec>(squares + at) + weighted * prob);
        });
      }
    }
    const int64_t at = ((row * p.heads + head) * p.groups + group) * p.keys + first, count = std::min(KEYS, p.keys - first);
    std::copy(sums, sums + count, sums_out + at);
    if (squares_out) std::copy(squares, squares + count, squares_out + at);
  };
  for_each_task<Tiles>(p.threads, tasks, work, p);
}

// Writes the probabilities of `count` queries of one row to [Hkv, G, count, end]; `end` is at least what they see.
void write_probabilities(const AttentionOperands& p, int64_t row, int64_t start, int64_t count, int64_t end, float* out) {
  const int64_t blocks = (end + KEYS - 1) / KEYS;
  const auto work = [&](Tiles& tiles, int64_t task) {
    const int64_t q_head = task / blocks, head = q_head / p.groups, group = q_head % p.groups;
    const int64_t first = task % blocks * KEYS, here = std::min(KEYS, end - first);
    const int64_t totals = (row * p.heads * p.groups + q_head) * p.queries;
    for (int64_t query = start; query < start + count; query += QUERIES) {
      const Tile tile = classify(p, row, head, group, query, first);
      if (tile != HIDDEN) tiles.multiply(row, head, group, query, first / KEYS);
      for (int64_t i = query; i < std::min(query + QUERIES, start + count); ++i) {
        float* to = out + (q_head * count + i - start) * end + first;
        std::fill(to, to + here, 0.f);
        const float shift = p.shift[totals + i], factor = p.factor[totals + i];
        if (tile == HIDDEN || factor == 0) continue;
        const char* mask = tile == MIXED ? mask_of(p, row, head, group, i, first) : nullptr;
        Row(p, mask, i, first).each(tiles.row(i - query), [&](vec x, int64_t at) {
          const vec prob = power_of_two(x - shift) * factor;
          std::memcpy(to + at, &prob, std::min(LANES, here - at) * sizeof(float));
        });
      }
    }
  };
  for_each_task<Tiles>(p.threads, p.heads * p.groups * blocks, work, p);
}

// Runs a function, and returns 0, or 1 and a message of at most `size` bytes: no C++ exception may leave the library.
template <typename Function> int guarded(char* message, int64_t size, Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, size, "%s", error.what());
  } catch (...) {
    std::snprintf(message, size, "an exception of unknown type");
  }
  return 1;
}

}  // namespace

// Fills `packed`, `shift` and `factor`, which the other functions read.
extern "C" int prepare(const AttentionOperands* operands, char* message, int64_t size) {
  return guarded(message, size, [&] { prepare_keys(*operands), find_totals(*operands); });
}

extern "C" int column_sums(
    const AttentionOperands* operands, char* message, int64_t size, const float* weights, float* sums, float* squares) {
  return guarded(message, size, [&] { add_columns(*operands, weights, sums, squares); });
}

extern "C" int row_probabilities(
    const AttentionOperands* operands, char* message, int64_t size, int64_t row, int64_t start, int64_t count, int64_t end,
    float* out) {
  return guarded(message, size, [&] { write_probabilities(*operands, row, start, count, end, out); });
}

// Lays out keys and values for the following functions.
extern "C" int pack_values(const AttentionOperands* operands, char* message, int64_t size, const OutputOperands* output) {
  return guarded(message, size, [&] {
    prepare_keys(*operands), pack<true>(*operands, output->value, output->value_stride, output->packed);
  });
}

// Fills `output` and `log_sum_exp`, and adds to `sums` and `squares`.
extern "C" int attend(const AttentionOperands* operands, char* message, int64_t size, const OutputOperands* output) {
  return guarded(message, size, [&] { add_values(*operands, *output); });
}

// Fills `output` and `log_sum_exp` of some queries, and `means`.
extern "C" int attend_with_means(
    const AttentionOperands* operands, char* message, int64_t size, const OutputOperands* output, int64_t row,
    int64_t start, int64_t count, int64_t stride, float* means) {
  return guarded(message, size, [&] { add_values_and_heads(*operands, *output, row, start, count, stride, means); });
}
