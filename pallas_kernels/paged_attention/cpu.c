/* Paged attention on the CPU as one XLA custom call; the contract is api.py's, the layout of pages kv_format.py's.

   A row's keys are cut at fixed places, every PIECE of them. A task is one row, one KV head and one piece: it copies a
   BLOCK of keys and values at a time into scratch, as float32 whatever they were, and merges them into a running
   softmax (FlashAttention, Dao et al. 2022). Whoever ends the last task of a row's KV head merges its pieces and writes
   the answer. Where a row is cut depends on nothing but the row, so its bits depend on no neighbour and no thread.

   The queries of a task, each query of the row with each head of the KV head's group, are called its columns. A few of
   them (decoding) are taken one by one, head_dim along the lanes of a register; many (a prompt's block) lie along the
   lanes themselves, which needs no sum over lanes at all. */
#include <math.h>
#include <string.h>

#include "../custom_call.h"
#include "cpu_vectors.h"

/* ---- One call, its tasks, and who computes them. ---- */

#define BLOCK 64         /* keys that are scored at a time */
#define FEW (LANES / 2)  /* columns up to which head_dim lies along the lanes */
#define PIECE_OF_FEW 256 /* keys of a task; a multiple of BLOCK */
#define PIECE_OF_MANY 4096
#define STRIP (2 * LANES) /* columns that are computed together, where they are many */
#define LOWEST -1e30f     /* a maximum before any score: finite, so that its difference to -infinity is no NaN */

struct call {
  const float *q, *sinks; /* no sinks: NULL */
  const char *pages;
  const uint16_t *scales; /* formats without scales: NULL */
  const int32_t *block_tables, *tables, *starts, *lengths;
  float *out;
  int64_t rows, queries, heads, kv_heads, dim, page_size, table_width;
  int32_t window; /* none: INT32_MAX */
  enum format format;
  float scale, soft_cap; /* no cap: 0 */
};

/* One row and KV head. */
struct share {
  int32_t row, kv_head, columns, padded; /* padded: to whole registers where columns lie along the lanes */
  int32_t first_piece, num_pieces;
  atomic_int unfinished;
};

/* Keys first .. end - 1 of a share, and its own softmax over them: values [columns][dim] for few columns,
   [dim][padded] for many, then the maximum and the sum of each column. */
struct piece {
  int32_t share, first, end;
  float *values, *maxima, *sums;
};

struct work {
  struct crew crew; /* whose tasks are the pieces */
  struct call call;
  int64_t padded_dim, scratch_floats;
  struct share *shares;
  struct piece *pieces;
  float *scratch; /* scratch_floats for each worker */
};

INLINE int is_few(int columns) { return columns <= FEW; }

/* Keys and values first .. first + keys - 1 of a share into k, v [keys][padded_dim]; meanwhile the next block's, up to
   `end`, are called from memory: no hardware knows which page comes next. */
INLINE void copy_block(const struct work *work, enum format format, const struct share *share, int32_t first, int keys,
                       int32_t end, float *k, float *v) {
  const struct call *c = &work->call;
  const int32_t *table = c->block_tables + c->tables[share->row] * c->table_width, page_size = c->page_size;
  const int64_t dim = c->dim, padded = work->padded_dim, whole = dim / LANES * LANES, bytes = code_bytes(format);
  const int64_t line_bytes = (format == INT4 ? 1 : 2) * dim * bytes;
  for (int j = 0; j < keys;) {
    const int32_t at = first + j, offset = at % page_size, next = at + keys < end ? at + keys : at;
    const int64_t page = (int64_t)table[at / page_size] * c->kv_heads + share->kv_head;
    const int64_t next_page = (int64_t)table[next / page_size] * c->kv_heads + share->kv_head;
    const char *line = c->pages + (page * page_size + offset) * line_bytes;
    const char *next_line = c->pages + (next_page * page_size + next % page_size) * line_bytes;
    const uint16_t *scales = c->scales + page * 2 * page_size + offset;
    for (const int stop = least_of(keys, j + page_size - offset); j < stop; j++) {
      for (int64_t byte = 0; byte < line_bytes; byte += 64) __builtin_prefetch(next_line + byte);
      for (int is_value = 0; is_value < 2; is_value++) {
        float *to = (is_value ? v : k) + j * padded, scale = 1;
        if (format >= INT8) {
          const uint32_t bits = (uint32_t)scales[is_value * page_size] << 16;
          memcpy(&scale, &bits, sizeof scale);
        }
        for (int64_t d = 0; d < whole; d += LANES) store(to + d, numbers(format, line, is_value, dim, d) * scale);
        if (whole < padded) memset(to + whole, 0, (padded - whole) * sizeof(float));
        if (whole < dim) { /* what is beyond the line is not ours to read */
          char rest[4 * LANES] = {0};
          memcpy(rest, line + ((is_value && format != INT4 ? dim : 0) + whole) * bytes, (dim - whole) * bytes);
          const vec x = numbers(format, rest, format == INT4 && is_value, 0, 0) * scale;
          memcpy(to + whole, &x, (dim - whole) * sizeof(float));
        }
      }
      line += line_bytes;
      next_line += line_bytes;
      if (format >= INT8) scales++;
    }
  }
}

/* Few columns: scores [columns][BLOCK], a register of keys at a time. */
static void merge_few(const struct work *work, const struct share *share, const struct piece *piece, int32_t first,
                      int keys, const float *q, const float *k, const float *v, float *scores) {
  const struct call *c = &work->call;
  const int64_t dim = work->padded_dim;
  const int group = c->heads / c->kv_heads;
  for (int m = 0; m < share->columns; m++) {
    const int32_t position = c->starts[share->row] + m / group, last = least_of(position, first + keys - 1);
    vec best = splat(piece->maxima[m]);
    for (int j = 0; j < keys; j += LANES) {
      vec part[LANES] = {0};
      int64_t d = 0;
      do {
        const vec query = load(q + m * dim + d);
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) part[l] += query * load(k + (j + l) * dim + d);
      } while ((d += LANES) < dim);
      vec score = lane_sums(part);
      if (c->soft_cap > 0) score = capped(score, c->soft_cap);
      const ivec at = first + j + (ivec){COUNT};
      score = choose((at <= last) & (at > position - c->window), score, splat(-INFINITY));
      store(scores + m * BLOCK + j, score);
      best = larger(score, best);
    }
    float maximum = best[0];
    for (int l = 1; l < LANES; l++) maximum = best[l] > maximum ? best[l] : maximum;
    const float kept = exponential_of(piece->maxima[m] - maximum);
    vec sum = {0};
    for (int j = 0; j < keys; j += LANES) {
      const vec weight = exponential(load(scores + m * BLOCK + j) - maximum);
      store(scores + m * BLOCK + j, weight);
      sum += weight;
    }
    float total = 0;
    for (int l = 0; l < LANES; l++) total += sum[l];
    piece->maxima[m] = maximum;
    piece->sums[m] = piece->sums[m] * kept + total;
    float *values = piece->values + m * dim;
    for (int64_t d = 0; d < dim; d += LANES) store(values + d, load(values + d) * kept);
  }
  multiply(share->columns, dim, scores, BLOCK, 1, v, dim, keys, piece->values, dim, 1);
}

/* Many columns: scores [BLOCK][STRIP], each column a lane. */
static void merge_many(const struct work *work, const struct share *share, const struct piece *piece, int32_t first,
                       int keys, const float *q, const int32_t *positions, const float *k, const float *v,
                       float *scores) {
  const struct call *c = &work->call;
  const int64_t dim = work->padded_dim, padded = share->padded;
  for (int64_t x = 0; x < padded; x += STRIP) {
    const int columns = least_of(STRIP, padded - x);
    const int32_t lowest = positions[x], highest = positions[x + columns - 1];
    const int seen = least_of(keys, (int64_t)highest + 1 - first); /* keys beyond are in everyone's future */
    if (seen <= 0 || first + seen - 1 <= lowest - c->window) continue;
    multiply(rounded_up(seen, ROWS), columns, k, dim, 1, q + x, padded, dim, scores, STRIP, 0);
    for (int64_t y = x; y < x + columns; y += LANES) {
      const ivec position = *(const ivec *)(positions + y), before = position - c->window;
      const vec old = load(piece->maxima + y);
      vec best = old, sum = {0};
      for (int j = 0; j < seen; j++) {
        vec score = load(scores + j * STRIP + y - x);
        if (c->soft_cap > 0) score = capped(score, c->soft_cap);
        score = choose((position >= first + j) & (before < first + j), score, splat(-INFINITY));
        store(scores + j * STRIP + y - x, score);
        best = larger(score, best);
      }
      for (int j = 0; j < seen; j++) {
        const vec weight = exponential(load(scores + j * STRIP + y - x) - best);
        store(scores + j * STRIP + y - x, weight);
        sum += weight;
      }
      const vec kept = exponential(old - best);
      store(piece->maxima + y, best);
      store(piece->sums + y, load(piece->sums + y) * kept + sum);
      for (int64_t d = 0; d < dim; d++)
        store(piece->values + d * padded + y, load(piece->values + d * padded + y) * kept);
    }
    multiply(dim, columns, v, 1, dim, scores, STRIP, seen, piece->values + x, padded, 1);
  }
}

/* The shares' pieces together, and the sinks: into the output. */
static void finish(const struct work *work, const struct share *share) {
  const struct call *c = &work->call;
  const int64_t dim = work->padded_dim, group = c->heads / c->kv_heads;
  const struct piece *pieces = work->pieces + share->first_piece;
  const int64_t by_column = is_few(share->columns) ? dim : 1, by_dim = is_few(share->columns) ? 1 : share->padded;
  for (int m = 0; m < share->columns; m++) {
    const int64_t head = share->kv_head * group + m % group;
    float *out = c->out + ((share->row * c->queries + m / group) * c->heads + head) * c->dim;
    float best = c->sinks ? c->sinks[head] : LOWEST;
    for (int p = 0; p < share->num_pieces; p++) best = pieces[p].maxima[m] > best ? pieces[p].maxima[m] : best;
    float total = c->sinks ? exponential_of(c->sinks[head] - best) : 0;
    for (int p = 0; p < share->num_pieces; p++) total += pieces[p].sums[m] * exponential_of(pieces[p].maxima[m] - best);
    for (int p = 0; p < share->num_pieces; p++) {
      const float *values = pieces[p].values + m * by_column;
      const float weight = exponential_of(pieces[p].maxima[m] - best) / total;
      for (int64_t d = 0; d < c->dim; d++) out[d] = (p ? out[d] : 0) + values[d * by_dim] * weight;
    }
  }
}

static void run_piece(struct crew *crew, int64_t task, int worker) {
  struct work *work = (struct work *)crew;
  const struct call *c = &work->call;
  const struct piece *piece = work->pieces + task;
  float *scratch = work->scratch + worker * work->scratch_floats;
  struct share *share = work->shares + piece->share;
  const int64_t dim = work->padded_dim, padded = share->padded, group = c->heads / c->kv_heads;
  const int few = is_few(share->columns);
  float *k = scratch, *v = k + BLOCK * dim, *scores = v + BLOCK * dim, *q = scores + BLOCK * STRIP;
  int32_t *positions = (int32_t *)(q + padded * dim);
  memset(q, 0, padded * dim * sizeof(float));
  for (int m = 0; m < padded; m++) {
    const int column = least_of(m, share->columns - 1);
    const int64_t query = column / group, head = share->kv_head * group + column % group;
    const float *from = c->q + ((share->row * c->queries + query) * c->heads + head) * c->dim;
    positions[m] = c->starts[share->row] + query;
    for (int64_t d = 0; d < c->dim; d++) q[few ? m * dim + d : d * padded + m] = from[d] * c->scale;
    piece->maxima[m] = LOWEST;
    piece->sums[m] = 0;
  }
  memset(piece->values, 0, padded * dim * sizeof(float));
  for (int32_t first = piece->first; first < piece->end; first += BLOCK) {
    const int keys = least_of(BLOCK, piece->end - first);
#define COPY(format) \
  case format:       \
    copy_block(work, format, share, first, keys, piece->end, k, v); \
    break;
    switch (c->format) {
      COPY(FLOAT32) COPY(BFLOAT16) COPY(FLOAT16) COPY(INT8) COPY(FP8_E4M3) COPY(FP8_E5M2) COPY(INT4)
    }
    if (few) merge_few(work, share, piece, first, keys, q, k, v, scores);
    else merge_many(work, share, piece, first, keys, q, positions, k, v, scores);
  }
  if (atomic_fetch_sub(&share->unfinished, 1) == 1) finish(work, share);
}

/* A row's real queries; 0 for padding. */
static int64_t real_queries(const struct call *c, int64_t row) {
  return most_of(0, least_of(c->queries, (int64_t)c->lengths[row] - c->starts[row]));
}

/* Cuts a call into pieces, with memory for up to `workers` threads, in one allocation that `free` gives back.
   Returns NULL where there is no memory. */
static struct work *plan(const struct call *c, int workers) {
  const int64_t dim = rounded_up(c->dim, 16), group = c->heads / c->kv_heads;
  struct work *work = NULL;
  for (int pass = 0; pass < 2; pass++) { /* first to count, then to fill */
    int64_t shares = 0, pieces = 0, floats = 0, most_padded = 0;
    for (int64_t row = 0; row < c->rows; row++) {
      const int64_t queries = real_queries(c, row), columns = queries * group;
      if (work)
        memset(c->out + (row * c->queries + queries) * c->heads * c->dim, 0,
               (c->queries - queries) * c->heads * c->dim * sizeof(float));
      if (!queries) continue;
      const int64_t padded = is_few(columns) ? columns : rounded_up(columns, LANES);
      const int32_t unit = is_few(columns) ? PIECE_OF_FEW : PIECE_OF_MANY, end = c->lengths[row];
      const int32_t begin = most_of(0, (int64_t)c->starts[row] - c->window + 1);
      most_padded = most_of(most_padded, padded);
      for (int64_t head = 0; head < c->kv_heads; head++, shares++) {
        const int32_t first_piece = pieces;
        for (int32_t first = begin, stop; first < end; first = stop, pieces++) {
          stop = least_of(end, ((int64_t)first / unit + 1) * unit);
          const int64_t at = floats;
          floats += rounded_up(padded * (dim + 2), 16);
          if (!work) continue;
          float *values = work->scratch + workers * work->scratch_floats + at;
          work->pieces[pieces] = (struct piece){.share = shares, .first = first, .end = stop, .values = values,
                                                .maxima = values + padded * dim, .sums = values + padded * (dim + 1)};
        }
        if (work) {
          struct share *share = work->shares + shares;
          *share = (struct share){.row = row, .kv_head = head, .columns = columns, .padded = padded,
                                  .first_piece = first_piece, .num_pieces = pieces - first_piece};
          atomic_init(&share->unfinished, share->num_pieces);
        }
      }
    }
    if (work) break;
    /* Keys, values, scores, queries and their positions of one block. */
    const int64_t scratch = rounded_up(2 * BLOCK * dim + BLOCK * STRIP + most_padded * (dim + 1), 16);
    const int64_t head_bytes =
        rounded_up(sizeof *work + shares * sizeof(struct share) + pieces * sizeof(struct piece), 64);
    work = aligned_alloc(64, rounded_up(head_bytes + (workers * scratch + floats) * sizeof(float), 64));
    if (!work) return NULL;
    *work = (struct work){.call = *c, .padded_dim = dim, .scratch_floats = scratch};
    crew_init(&work->crew, run_piece, pieces);
    work->pieces = (struct piece *)(work + 1);
    work->shares = (struct share *)(work->pieces + pieces);
    work->scratch = (float *)((char *)work + head_bytes);
  }
  return work;
}

/* ---- As an XLA custom call. ---- */

/* Arguments and attributes as cpu.py passes them. */
XLA_FFI_Error *paged_attention(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (frame->args.size != 8 || frame->rets.size != 1)
    return failure(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "paged_attention takes 8 arrays and returns one");
  const XLA_FFI_Buffer *args[8];
  for (int i = 0; i < 8; i++) args[i] = frame->args.args[i];
  const XLA_FFI_Buffer *q = args[0], *pages = args[1], *scales = args[2], *block_tables = args[3], *sinks = args[7];
  const struct call call = {
      .q = q->data,
      .pages = pages->data,
      .scales = scales->data,
      .block_tables = block_tables->data,
      .tables = args[4]->data,
      .starts = args[5]->data,
      .lengths = args[6]->data,
      .sinks = sinks->dims[0] ? sinks->data : NULL,
      .out = ((XLA_FFI_Buffer *)frame->rets.rets[0])->data,
      .rows = q->dims[0],
      .queries = q->dims[1],
      .heads = q->dims[2],
      .dim = q->dims[3],
      .kv_heads = pages->dims[1],
      .page_size = pages->dims[2],
      .table_width = block_tables->dims[1],
      .window = *(const int32_t *)attribute(frame, "window"),
      .format = *(const int32_t *)attribute(frame, "format"),
      .scale = *(const float *)attribute(frame, "scale"),
      .soft_cap = *(const float *)attribute(frame, "soft_cap"),
  };
  const int64_t threads = threads_of(frame);
  struct work *work = plan(&call, threads);
  if (!work) return failure(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "no memory for paged_attention's scratch");
  run(frame, &work->crew, least_of(threads, work->crew.num_tasks) - 1);
  return NULL;
}

#include "cpu_check.h"
