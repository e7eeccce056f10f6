"""The table of paged-attention cases, their inputs, and the float64 reference; every backend is held against it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from kv_format_reference import NARROW, Quantized, dequantized, quantized

from pallas_kernels.kv_dtype import KVDtype, is_quantized
from pallas_kernels.kv_format import KVPages

HostArray = np.ndarray[Any, Any]
Row = tuple[int, int, int]  # sequence, position of the first query, real queries; 0 queries: a padding row


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCase:
    """One call of `paged_attention`.

    Attributes:
      queries: tokens per row, real ones and padding.
      pages_per_seq: width of the block table; None: just enough for the longest sequence.
      shared_pages: leading pages that all sequences have in common.
      has_sinks: a random logit for each head joins its softmax.
      dtype: of queries and pages.
      kv_dtype: of pages that are narrower; None: `dtype`.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    queries: int
    rows: tuple[Row, ...]
    pages_per_seq: int | None = None
    shared_pages: int = 0
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: KVDtype = "float32"
    kv_dtype: KVDtype | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def cache_dtype(self) -> KVDtype:
        return self.kv_dtype or self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionInputs:
    """Arrays as `paged_attention` takes them, in float32, keys and values still apart."""

    q: HostArray
    k_pages: HostArray
    v_pages: HostArray
    block_tables: HostArray
    tables: HostArray
    starts: HostArray
    lengths: HostArray
    scale: float
    sinks: HostArray | None


def decode_rows(*lengths: int) -> tuple[Row, ...]:
    """One query each, the last token of a sequence of that length; a length of 0 is a padding row."""
    return tuple((sequence, max(0, length - 1), min(1, length)) for sequence, length in enumerate(lengths))


PAGE16_EDGES = decode_rows(0, 1, 15, 16, 17, 63, 64, 65, 0, 150)
BLOCKS_OF_16 = ((0, 0, 16), (0, 16, 16), (0, 32, 5), (1, 0, 1), (2, 7, 9), (0, 0, 0), (3, 100, 16), (4, 64, 1))

CASES = (
    AttentionCase(name="mha", heads=4, kv_heads=4, head_dim=64, page_size=16, queries=1, rows=PAGE16_EDGES),
    AttentionCase(name="gqa", heads=9, kv_heads=3, head_dim=64, page_size=16, queries=1, rows=PAGE16_EDGES),
    AttentionCase(name="mqa", heads=8, kv_heads=1, head_dim=128, page_size=32, queries=1, rows=decode_rows(31, 32, 33)),
    AttentionCase(name="odd_dim", heads=4, kv_heads=2, head_dim=80, page_size=8, queries=1, rows=decode_rows(7, 8, 9)),
    AttentionCase(
        name="wide_pages", heads=2, kv_heads=1, head_dim=256, page_size=128, queries=1, rows=decode_rows(127, 128, 129)
    ),
    AttentionCase(
        name="wide_table",
        heads=4,
        kv_heads=2,
        head_dim=64,
        page_size=16,
        queries=1,
        rows=decode_rows(1, 40, 1100, 0, 700),
        pages_per_seq=128,
    ),
    AttentionCase(
        name="many_rows", heads=2, kv_heads=1, head_dim=64, page_size=8, queries=1, rows=decode_rows(*range(40))
    ),
    AttentionCase(
        name="only_padding", heads=4, kv_heads=2, head_dim=64, page_size=16, queries=1, rows=((0, 0, 0),) * 3
    ),
    AttentionCase(
        name="shared_pages",
        heads=4,
        kv_heads=2,
        head_dim=64,
        page_size=16,
        queries=1,
        rows=decode_rows(33, 40, 64, 90),
        shared_pages=2,
    ),
    AttentionCase(
        name="bfloat16",
        heads=9,
        kv_heads=3,
        head_dim=64,
        page_size=16,
        queries=1,
        rows=PAGE16_EDGES,
        dtype="bfloat16",
    ),
    AttentionCase(
        name="mqa_bfloat16",
        heads=8,
        kv_heads=1,
        head_dim=128,
        page_size=32,
        queries=1,
        rows=decode_rows(31, 32, 33, 0, 300, 1),
        dtype="bfloat16",
    ),
    AttentionCase(
        name="soft_cap", heads=4, kv_heads=2, head_dim=64, page_size=16, queries=1, rows=PAGE16_EDGES, soft_cap=0.5
    ),
    AttentionCase(
        name="sinks", heads=9, kv_heads=3, head_dim=64, page_size=16, queries=1, rows=PAGE16_EDGES, has_sinks=True
    ),
    AttentionCase(
        name="prefill_cap_sinks_window",
        heads=4,
        kv_heads=2,
        head_dim=64,
        page_size=16,
        queries=16,
        rows=BLOCKS_OF_16,
        soft_cap=2.0,
        has_sinks=True,
        sliding_window=20,
    ),
    AttentionCase(
        name="prefill_bfloat16",
        heads=4,
        kv_heads=1,
        head_dim=128,
        page_size=16,
        queries=16,
        rows=BLOCKS_OF_16,
        dtype="bfloat16",
    ),
    AttentionCase(
        name="prefill_wide_groups",  # more rows of one KV head than a GPU's warpgroup takes
        heads=4,
        kv_heads=1,
        head_dim=64,
        page_size=16,
        queries=32,
        rows=((0, 0, 32), (1, 100, 32), (2, 7, 5), (0, 0, 0)),
        sliding_window=70,
        dtype="bfloat16",
    ),
    AttentionCase(
        name="prefill_wide_heads",
        heads=2,
        kv_heads=1,
        head_dim=256,
        page_size=32,
        queries=16,
        rows=((0, 0, 16), (1, 100, 13)),
        dtype="bfloat16",
    ),
    AttentionCase(name="prefill", heads=9, kv_heads=3, head_dim=64, page_size=16, queries=16, rows=BLOCKS_OF_16),
    AttentionCase(
        name="prefill_mha_small_pages",
        heads=2,
        kv_heads=2,
        head_dim=80,
        page_size=8,
        queries=32,
        rows=((0, 0, 32), (0, 32, 8), (1, 9, 32), (2, 0, 31), (3, 130, 3), (0, 0, 0)),
    ),
    AttentionCase(
        name="prefill_wide_pages", heads=4, kv_heads=1, head_dim=64, page_size=128, queries=16, rows=BLOCKS_OF_16
    ),
    *(
        AttentionCase(
            name=f"window_{window}",
            heads=4,
            kv_heads=2,
            head_dim=64,
            page_size=16,
            queries=1,
            rows=PAGE16_EDGES,
            sliding_window=window,
        )
        for window in (1, 16, 70)
    ),
    *(
        AttentionCase(
            name=f"prefill_window_{window}",
            heads=4,
            kv_heads=2,
            head_dim=64,
            page_size=16,
            queries=16,
            rows=BLOCKS_OF_16,
            sliding_window=window,
        )
        for window in (5, 40)
    ),
)

# Unequal rows and the edges of pages, heads of no whole register, keys that are never looked at, and all the rest.
_QUANTIZED = ("gqa", "odd_dim", "mqa_bfloat16", "window_16", "prefill_cap_sinks_window", "prefill_wide_groups")
# Pages of 128 tokens, as a TPU wants them: it copies scales in whole registers of 128 lanes.
_PAGE128_EDGES = decode_rows(0, 1, 127, 128, 129, 0, 600)
_PAGES_OF_128 = (
    AttentionCase(
        name="page_128",
        heads=4,
        kv_heads=2,
        head_dim=128,
        page_size=128,
        queries=1,
        rows=_PAGE128_EDGES,
        dtype="bfloat16",
    ),
    AttentionCase(
        name="page_128_small_heads", heads=9, kv_heads=3, head_dim=64, page_size=128, queries=1, rows=_PAGE128_EDGES
    ),
    AttentionCase(
        name="page_128_prefill",
        heads=4,
        kv_heads=2,
        head_dim=128,
        page_size=128,
        queries=16,
        rows=((0, 0, 16), (0, 112, 16), (0, 128, 5), (1, 0, 1), (0, 0, 0), (2, 300, 16)),
        soft_cap=2.0,
        has_sinks=True,
        sliding_window=20,
    ),
)
QUANTIZED_CASES = tuple(
    replace(case, name=f"{case.name}_{dtype}", kv_dtype=dtype)
    for dtype in NARROW
    for case in (*CASES, *_PAGES_OF_128)
    if case.name in _QUANTIZED or case in _PAGES_OF_128
)


def make_inputs(case: AttentionCase, seed: int = 0) -> AttentionInputs:
    """Random inputs in which every key and value that no query may see is NaN, the dummy page's included.

    Pages are shuffled, and table entries past a sequence's last page point to whatever page comes.
    """
    rng = np.random.default_rng(seed)
    rows = np.array(case.rows, np.int32)
    tables, starts, counts = rows.T
    lengths = np.where(counts > 0, starts + counts, 0).astype(np.int32)
    ends = [int(lengths[tables == table].max(initial=0)) for table in range(tables.max() + 1)]
    width = case.pages_per_seq or max(1, -(-max(ends) // case.page_size))

    pages_needed = [-(-end // case.page_size) for end in ends]
    num_pages = 1 + case.shared_pages + sum(pages_needed) + 3
    shuffled = iter(1 + rng.permutation(num_pages - 1))
    prefix = [next(shuffled) for _ in range(case.shared_pages)]
    block_tables = rng.integers(0, num_pages, (len(ends), width)).astype(np.int32)
    shape = (num_pages, case.kv_heads, case.page_size, case.head_dim)
    k_pages, v_pages = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for table, end in enumerate(ends):
        needed = pages_needed[table]
        own = [next(shuffled) for _ in range(max(0, needed - len(prefix)))]
        block_tables[table, :needed] = (prefix + own)[:needed]
        first = 0
        if case.sliding_window is not None:
            first = max(0, int(starts[(tables == table) & (counts > 0)].min(initial=end)) - case.sliding_window + 1)
        positions = np.arange(first, end)
        page_ids, offsets = block_tables[table, positions // case.page_size], positions % case.page_size
        kv_shape = (len(positions), case.kv_heads, case.head_dim)
        for pages in (k_pages, v_pages):
            is_new = np.isnan(pages[page_ids, :, offsets])  # what sequences share is written once
            values = rng.standard_normal(kv_shape).astype(np.float32)
            pages[page_ids, :, offsets] = np.where(is_new, values, pages[page_ids, :, offsets])
    return AttentionInputs(
        q=rng.standard_normal((len(rows), case.queries, case.heads, case.head_dim)).astype(np.float32),
        k_pages=k_pages,
        v_pages=v_pages,
        block_tables=block_tables,
        tables=tables,
        starts=starts,
        lengths=lengths,
        scale=case.head_dim**-0.5,
        sinks=rng.standard_normal(case.heads).astype(np.float32) if case.has_sinks else None,
    )


def visible(case: AttentionCase, inputs: AttentionInputs) -> Iterator[tuple[int, int, int, HostArray, HostArray]]:
    """Row, query and head of every real query, and the float64 keys and values [seen, head_dim] that it sees."""
    group = case.heads // case.kv_heads
    for row, (table, start, length) in enumerate(zip(inputs.tables, inputs.starts, inputs.lengths, strict=True)):
        for i, position in enumerate(range(start, length)):
            first = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
            seen = np.arange(first, position + 1)
            pages, offsets = inputs.block_tables[table, seen // case.page_size], seen % case.page_size
            for head in range(case.heads):
                place = pages, head // group, offsets
                yield row, i, head, *(pool[place].astype(np.float64) for pool in (inputs.k_pages, inputs.v_pages))


def reference(case: AttentionCase, inputs: AttentionInputs) -> HostArray:
    """float64[rows, queries, heads, head_dim], token by token; NaN where a query is padding of a real row."""
    out = np.full(inputs.q.shape, np.nan)
    out[inputs.lengths == 0] = 0.0
    for row, i, head, keys, values in visible(case, inputs):
        scores = keys @ inputs.q[row, i, head].astype(np.float64) * inputs.scale
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        logits = scores if inputs.sinks is None else np.append(scores, inputs.sinks[head])
        weights = np.exp(scores - logits.max())
        out[row, i, head] = weights @ values / np.exp(logits - logits.max()).sum()
    return out


def kv_pages(inputs: AttentionInputs, dtype: KVDtype) -> KVPages:
    """The inputs' keys and values as a format keeps them; where a narrow one keeps NaN, garbage with a broken scale."""
    if not is_quantized(dtype):
        data = jnp.concatenate([jnp.asarray(pages, dtype) for pages in (inputs.k_pages, inputs.v_pages)], axis=-1)
        return KVPages(data=data, scales=None, dtype=dtype)
    rng = np.random.default_rng(1)
    k, v = (_poisoned(quantized(pages, dtype), pages, rng) for pages in (inputs.k_pages, inputs.v_pages))
    packed = (k.codes & 15) | (v.codes << 4) if dtype == "int4" else np.concatenate([k.codes, v.codes], axis=-1)
    return KVPages(data=jnp.asarray(packed), scales=jnp.asarray(np.stack([k.scales, v.scales], axis=2)), dtype=dtype)


def _poisoned(stored: Quantized, pages: HostArray, rng: np.random.Generator) -> Quantized:
    """Any bits at all where the pages are NaN, and a scale that spoils what it touches: NaN, NaN, infinity."""
    broken = np.isnan(pages).any(-1)
    garbage = rng.integers(-128, 128, stored.codes.shape, np.int8)
    scales = rng.choice(np.array([0x7FC0, 0xFFC1, 0x7F80], np.uint16), stored.scales.shape).view(np.int16)
    return Quantized(
        codes=np.where(broken[..., None], garbage, stored.codes), scales=np.where(broken, scales, stored.scales)
    )


def rounded(case: AttentionCase, inputs: AttentionInputs) -> AttentionInputs:
    """The inputs as queries and pages of the case's formats hold them, for a reference that sees what a kernel sees.

    A kernel is given the inputs themselves: a narrow format does not round what it has rounded to the same again.
    """
    plain = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.float32
    pages = {name: getattr(inputs, name) for name in ("k_pages", "v_pages")}
    if is_quantized(case.cache_dtype):
        pages = {
            name: np.where(np.isnan(page), np.nan, dequantized(quantized(page, case.cache_dtype), case.cache_dtype))
            for name, page in pages.items()
        }
    else:
        pages = {name: page.astype(plain).astype(np.float32) for name, page in pages.items()}
    return replace(inputs, q=inputs.q.astype(plain).astype(np.float32), **pages)


def assert_close(out: HostArray, expected: HostArray, tolerance: float) -> None:
    """Queries that are padding of a real row may return anything; all others must agree, and be no NaN."""
    real = ~np.isnan(expected)
    np.testing.assert_allclose(out[real], expected[real], atol=tolerance, rtol=tolerance)


TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
