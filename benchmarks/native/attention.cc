// A prototype outside the package: paged attention on the CPU as one XLA custom call, to measure what plain XLA leaves.
//
// The contract is pallas_kernels/paged_attention/api.py's, float32 queries, float32 or bfloat16 pages, no window, cap or
// sinks. A task is one row and one KV head: its `queries * group` query vectors walk the sequence's pages with an online
// softmax, 16 keys at a time. The arithmetic is little; the point is to read each page once, and nothing else.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

typedef float V __attribute__((vector_size(64)));
typedef int32_t VI __attribute__((vector_size(64)));
constexpr int kLanes = 16;
constexpr int kKeys = 16;  // keys a turn
constexpr float kMasked = -1e30f;

static inline V splat(float x) { return V{} + x; }
static inline V load(const float* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
static inline V load(const uint16_t* p) {  // bfloat16 is the upper half of a float32
  typedef uint16_t H __attribute__((vector_size(32)));
  typedef uint32_t U __attribute__((vector_size(64)));
  H h;
  std::memcpy(&h, p, sizeof h);
  U u = __builtin_convertvector(h, U) << 16;
  V v;
  std::memcpy(&v, &u, sizeof v);
  return v;
}
static inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
typedef float V8 __attribute__((vector_size(32)));
typedef float V4 __attribute__((vector_size(16)));
constexpr V kIota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Over the lanes, by halves: the compiler may not reorder a loop over them.
template <typename F>
static inline float fold(V v, F f) {
  V8 v8 = f(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  V4 v4 = f(__builtin_shufflevector(v8, v8, 0, 1, 2, 3), __builtin_shufflevector(v8, v8, 4, 5, 6, 7));
  V4 v2 = f(v4, __builtin_shufflevector(v4, v4, 2, 3, 0, 1));
  V4 v1 = f(v2, __builtin_shufflevector(v2, v2, 1, 0, 3, 2));
  return v1[0];
}
static inline float sum(V v) { return fold(v, [](auto a, auto b) { return a + b; }); }
static inline float largest(V v) { return fold(v, [](auto a, auto b) { return a > b ? a : b; }); }

// e^x for x <= 0: 2^n * 2^f with a polynomial for 2^f on [-0.5, 0.5] (relative error below 2e-7).
static inline V exp_of(V x) {
  V t = x * splat(1.44269504f);
  t = t < splat(-126.f) ? splat(-126.f) : t;
  V magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  V n = (t + magic) - magic;
  V f = t - n;
  V p = splat(1.5403530e-4f);
  p = p * f + splat(1.3333558e-3f);
  p = p * f + splat(9.6181291e-3f);
  p = p * f + splat(5.5504109e-2f);
  p = p * f + splat(2.4022651e-1f);
  p = p * f + splat(6.9314718e-1f);
  p = p * f + splat(1.0f);
  VI bits = (__builtin_convertvector(n, VI) + 127) << 23;
  V scale;
  std::memcpy(&scale, &bits, sizeof scale);
  V e = p * scale;
  return x < splat(-87.f) ? splat(0.f) : e;
}

struct Shape {
  int64_t rows, queries, heads, kv_heads, page_size, table_width, dim;
};

template <int kVectors, typename T>  // head_dim = 16 * kVectors
static void attend(const Shape& s, const float* q, const T* pages, const int32_t* table, int start, int length,
                   int row, int kv_head, float scale, float* out, std::vector<float>& scratch) {
  const int group = s.heads / s.kv_heads, count = s.queries * group, dim = s.dim;
  const int queries = std::min<int64_t>(s.queries, std::max(0, length - start));
  float* queries_of = scratch.data();                // [count, dim], scaled
  float* values = queries_of + count * dim;          // [count, dim]
  float* maxima = values + count * dim;              // [count]
  float* sums = maxima + count;                      // [count]
  for (int i = 0; i < queries; i++)
    for (int g = 0; g < group; g++) {
      const float* from = q + ((int64_t(row) * s.queries + i) * s.heads + kv_head * group + g) * dim;
      for (int v = 0; v < kVectors; v++)
        store(queries_of + (i * group + g) * dim + v * kLanes, load(from + v * kLanes) * splat(scale));
    }
  std::memset(values, 0, sizeof(float) * count * dim);
  for (int i = 0; i < count; i++) maxima[i] = kMasked, sums[i] = 0;

  const int64_t stride = 2 * dim, page_stride = s.kv_heads * s.page_size * stride;
  for (int first = 0; first < length; first += kKeys) {
    const int keys = std::min(kKeys, length - first);
    const T* at[kKeys];
    for (int j = 0; j < kKeys; j++) {
      const int position = first + std::min(j, keys - 1);
      at[j] = pages + table[position / s.page_size] * page_stride + kv_head * s.page_size * stride +
              (position % s.page_size) * stride;
    }
    // The next turn's keys: the hardware does not know the next page.
    if (first + kKeys < length) {
      const T* next = pages + table[(first + kKeys) / s.page_size] * page_stride + kv_head * s.page_size * stride +
                      ((first + kKeys) % s.page_size) * stride;
      for (int64_t line = 0; line < int64_t(kKeys * stride * sizeof(T)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(next) + line);
    }
    // Many queries share these keys: turned once, [dim, key], no dot product needs a sum over lanes.
    alignas(64) float turned[kVectors * kLanes][kKeys];
    const bool many = queries > 1;
    if (many)
      for (int j = 0; j < kKeys; j++)
        for (int v = 0; v < kVectors; v++) {
          const V key = load(at[j] + v * kLanes);
          for (int l = 0; l < kLanes; l++) turned[v * kLanes + l][j] = key[l];
        }
    for (int i = 0; i < queries; i++) {
      const int visible = std::min(keys, start + i + 1 - first);
      if (visible <= 0) continue;
      for (int g = 0; g < group; g++) {
        const int m = i * group + g;
        V scores = splat(kMasked);
        if (many) {
          const float* query = queries_of + m * dim;
          V part[4] = {};
          for (int d = 0; d < kVectors * kLanes; d += 4)
            for (int p = 0; p < 4; p++) part[p] += splat(query[d + p]) * load(turned[d + p]);
          const V dots = (part[0] + part[1]) + (part[2] + part[3]);
          scores = kIota < splat(visible) ? dots : scores;
        } else {
          V query[kVectors];
          for (int v = 0; v < kVectors; v++) query[v] = load(queries_of + m * dim + v * kLanes);
          for (int j = 0; j < visible; j++) {
            V dot = query[0] * load(at[j]);
            for (int v = 1; v < kVectors; v++) dot += query[v] * load(at[j] + v * kLanes);
            scores[j] = sum(dot);
          }
        }
        float best = maxima[m];
        best = std::max(best, largest(scores));
        const V weights = exp_of(scores - splat(best));
        const float kept = maxima[m] == best ? 1.f : std::exp(maxima[m] - best);
        maxima[m] = best;
        sums[m] = sums[m] * kept + sum(weights);
        V value[kVectors];
        for (int v = 0; v < kVectors; v++) value[v] = load(values + m * dim + v * kLanes) * splat(kept);
        for (int j = 0; j < visible; j++)
          for (int v = 0; v < kVectors; v++) value[v] += splat(weights[j]) * load(at[j] + dim + v * kLanes);
        for (int v = 0; v < kVectors; v++) store(values + m * dim + v * kLanes, value[v]);
      }
    }
  }
  for (int i = 0; i < s.queries; i++)
    for (int g = 0; g < group; g++) {
      const int m = i * group + g;
      float* to = out + ((int64_t(row) * s.queries + i) * s.heads + kv_head * group + g) * dim;
      const V share = splat(sums[m] > 0 ? 1.f / sums[m] : 0.f);
      for (int v = 0; v < kVectors; v++) store(to + v * kLanes, load(values + m * dim + v * kLanes) * share);
    }
}

struct Work {
  std::atomic<int64_t> next{0}, done{0};
};

template <int kVectors, typename T>
static void run(ffi::ThreadPool pool, const Shape& s, const float* q, const T* pages, const int32_t* tables,
                const int32_t* table_rows, const int32_t* starts, const int32_t* lengths, float scale, float* out) {
  auto work = std::make_shared<Work>();
  const int64_t tasks = s.rows * s.kv_heads;
  auto loop = [=] {
    const int group = s.heads / s.kv_heads;
    std::vector<float> scratch;
    for (int64_t task; (task = work->next.fetch_add(1)) < tasks; work->done.fetch_add(1)) {
      if (scratch.empty()) scratch.resize(s.queries * group * (2 * s.dim + 2));
      const int row = task / s.kv_heads, kv_head = task % s.kv_heads;
      attend<kVectors, T>(s, q, pages, tables + table_rows[row] * s.table_width, starts[row], lengths[row], row,
                          kv_head, scale, out, scratch);
    }
  };
  for (int64_t i = 1; i < pool.num_threads(); i++) pool.Schedule(decltype(loop)(loop));
  loop();
  while (work->done.load() < tasks) std::this_thread::yield();
}

static ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer pages,
                                 ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> table_rows,
                                 ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> lengths,
                                 ffi::Result<ffi::Buffer<ffi::F32>> out, float scale) {
  auto qd = q.dimensions(), pd = pages.dimensions();
  Shape s{qd[0], qd[1], qd[2], pd[1], pd[2], tables.dimensions()[1], qd[3]};
  auto call = [&](auto vectors, auto* typed) {
    run<decltype(vectors)::value>(pool, s, q.typed_data(), typed, tables.typed_data(), table_rows.typed_data(),
                                  starts.typed_data(), lengths.typed_data(), scale, out->typed_data());
  };
  auto by_dim = [&](auto* typed) {
    if (s.dim == 16) call(std::integral_constant<int, 1>{}, typed);
    else if (s.dim == 64) call(std::integral_constant<int, 4>{}, typed);
    else if (s.dim == 128) call(std::integral_constant<int, 8>{}, typed);
    else return ffi::Error::InvalidArgument("head_dim must be 16, 64 or 128");
    return ffi::Error::Success();
  };
  if (pages.element_type() == ffi::F32) return by_dim(static_cast<const float*>(pages.untyped_data()));
  if (pages.element_type() == ffi::BF16) return by_dim(static_cast<const uint16_t*>(pages.untyped_data()));
  return ffi::Error::InvalidArgument("pages must be float32 or bfloat16");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention, PagedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale"));
