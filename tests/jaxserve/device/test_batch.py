"""A plan becomes one packed array, and the device reads from it exactly what the host meant."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.constraints import TokenConstraints
from jaxserve.device.batch import BatchWriter, PackedLayout, ScoredBlocks, unpack_step
from jaxserve.device.buckets import StepShape
from jaxserve.device.sampling import SampleRows
from jaxserve.request import SamplingParams
from jaxserve.scheduling.plan import Chunk, Plan, Request
from models.step import StepBatch

MAX_NUM_SEQS, PAGES_PER_SEQ, BLOCK_Q, PAGE_SIZE = 4, 6, 8, 4
DUMMY = MAX_NUM_SEQS
LAST_TOKENS = np.array([100, 101, 102, 103, 104], np.int32)  # of each slot


def layout(rows: int, blocks: int) -> PackedLayout:
    shape = StepShape(decode_rows=rows, prefill_blocks=blocks)
    return PackedLayout(shape, max_num_seqs=MAX_NUM_SEQS, pages_per_seq=PAGES_PER_SEQ, block_q=BLOCK_Q)


def writer() -> BatchWriter:
    return BatchWriter(max_num_seqs=MAX_NUM_SEQS, pages_per_seq=PAGES_PER_SEQ, block_q=BLOCK_Q)


def request(*, slot: int, residence: int, pages: list[int], num_computed: int, **more: Any) -> Request:
    params = more.pop("params", SamplingParams(temperature=0.0))
    prompt_len = more.pop("prompt_len", 20)
    return Request(
        request_id=f"slot {slot}",
        token_ids=list(range(10, 10 + prompt_len)),
        prompt_len=prompt_len,
        params=params,
        seed=more.pop("seed", 0),
        max_length=more.pop("max_length", 24),
        end_token_ids=frozenset(),
        constraints=TokenConstraints.of(params, frozenset(), 50, 50),
        slot=slot,
        residence=residence,
        pages=pages,
        num_computed=num_computed,
        prefill_end=prompt_len,
    )


def make_plan(decodes: tuple[Request, ...] = (), chunks: tuple[Chunk, ...] = ()) -> Plan:
    samples = (*decodes, *(chunk.request for chunk in chunks if chunk.is_last))
    positions = tuple(request.num_computed for request in samples)
    return Plan(decodes=decodes, chunks=chunks, samples=samples, positions=positions)


def round_trip(
    plan: Plan, where: PackedLayout, by: BatchWriter | None = None
) -> tuple[StepBatch, SampleRows, ScoredBlocks]:
    packed = (by or writer()).write(plan, where)
    assert packed.shape == (where.size,)
    assert packed.dtype == np.int32
    batch, rows, scored, _ = unpack_step(where, jnp.asarray(packed), jnp.asarray(LAST_TOKENS), PAGE_SIZE)
    batch, rows = jax.tree.map(np.asarray, (batch, rows))
    return batch, rows, scored


@pytest.mark.parametrize(("rows", "blocks"), [(1, 0), (4, 0), (4, 1), (2, 3)])
def test_every_field_comes_back_bit_by_bit(rows: int, blocks: int) -> None:
    where = layout(rows, blocks)
    packed = np.random.default_rng(0).integers(-(2**31), 2**31, where.size, dtype=np.int32)
    host, device = where.views(packed), where.unpack(jnp.asarray(packed))
    assert host.keys() == device.keys() == where.fields.keys()
    for name, (shape, dtype) in where.fields.items():
        assert host[name].shape == device[name].shape == shape
        assert host[name].dtype == device[name].dtype == dtype
        assert host[name].tobytes() == np.asarray(device[name]).tobytes(), name
    assert b"".join(view.tobytes() for view in host.values()) == packed.tobytes(), "fields overlap or leave gaps"


def test_decode_rows_feed_the_last_token_at_its_place() -> None:
    a = request(slot=2, residence=0, pages=[7, 3, 9], num_computed=10)  # feeds position 9: page 9, offset 1
    b = request(slot=0, residence=1, pages=[5], num_computed=4)  # position 3: page 5, offset 3
    batch, rows, _ = round_trip(make_plan(decodes=(a, b)), layout(4, 0))
    assert batch.token_ids.tolist() == [102, 100, 104, 104]
    assert batch.positions.tolist() == [9, 3, 0, 0]
    assert batch.page_ids.tolist() == [9, 5, 0, 0]
    assert batch.offsets.tolist() == [1, 3, 0, 0]
    assert batch.decode.tables.tolist() == [2, 0, DUMMY, DUMMY]
    assert batch.decode.starts.tolist() == [9, 3, 0, 0]
    assert batch.decode.lengths.tolist() == [10, 4, 0, 0]
    assert rows.tokens[:2].tolist() == [0, 1]
    assert rows.slots.tolist() == [2, 0, DUMMY, DUMMY]
    assert rows.positions[:2].tolist() == [10, 4]


def test_chunks_are_cut_into_blocks_and_the_last_token_samples() -> None:
    a = request(slot=1, residence=0, pages=[4, 6, 8, 2, 1], num_computed=20)
    b = request(slot=3, residence=1, pages=[9], num_computed=3, prompt_len=3)
    chunks = (Chunk(request=a, start=9, count=11), Chunk(request=b, start=0, count=3))
    batch, rows, _ = round_trip(make_plan(chunks=chunks), layout(2, 4))
    tokens = batch.token_ids[2:].reshape(4, BLOCK_Q)
    assert tokens[0].tolist() == list(range(19, 27))
    assert tokens[1, :3].tolist() == [27, 28, 29]
    assert tokens[2, :3].tolist() == [10, 11, 12]
    positions = batch.positions[2:].reshape(4, BLOCK_Q)
    assert positions[0].tolist() == list(range(9, 17))
    assert positions[1].tolist() == [17, 18, 19, 0, 0, 0, 0, 0]
    assert positions[2].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    page_ids = batch.page_ids[2:].reshape(4, BLOCK_Q)
    assert page_ids[0].tolist() == [8, 8, 8, 2, 2, 2, 2, 1]
    assert page_ids[1].tolist() == [1, 1, 1, 0, 0, 0, 0, 0], "padding writes to the dummy page"
    assert page_ids[2].tolist() == [9, 9, 9, 0, 0, 0, 0, 0]
    assert page_ids[3].tolist() == [0] * BLOCK_Q
    assert batch.prefill.tables.tolist() == [1, 1, 3, DUMMY]
    assert batch.prefill.starts.tolist() == [9, 17, 0, 0]
    assert batch.prefill.lengths.tolist() == [17, 20, 3, 0]
    assert batch.decode.lengths.tolist() == [0, 0]
    # Tokens are 2 decode rows, then blocks of 8: a's last is the third of block 1, b's the third of block 2.
    assert rows.tokens[:2].tolist() == [2 + 8 + 2, 2 + 16 + 2]
    assert rows.slots.tolist() == [1, 3, DUMMY, DUMMY]


def test_a_chunk_that_does_not_end_its_prompt_samples_nothing() -> None:
    a = request(slot=1, residence=0, pages=[4, 6, 8, 2, 1], num_computed=8)
    _, rows, _ = round_trip(make_plan(chunks=(Chunk(request=a, start=0, count=8),)), layout(2, 1))
    assert (rows.slots == DUMMY).all()


def test_sampling_parameters_travel_with_their_request() -> None:
    plain = request(slot=0, residence=0, pages=[1], num_computed=2)
    rich = request(
        slot=3,
        residence=1,
        pages=[2],
        num_computed=3,
        seed=2**64 - 2**32 + 5,
        params=SamplingParams(
            temperature=0.7,
            top_k=2**31 - 1,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.3,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias={4: 1.0},
            logprobs=0,
        ),
    )
    _, rows, _ = round_trip(make_plan(decodes=(plain, rich)), layout(4, 0))
    assert rows.seeds.tolist() == [[0, 0], [2**32 - 1, 5], [0, 0], [0, 0]]
    assert rows.is_constrained.tolist() == [False, True, False, False]
    assert rows.is_penalized.tolist() == [False, True, False, False]
    assert rows.wants_logprobs.tolist() == [False, True, False, False]
    assert rows.top_k[:2].tolist() == [0, 2**31 - 1]
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        expected = [getattr(plain.params, name), getattr(rich.params, name)]
        np.testing.assert_array_equal(getattr(rows, name)[:2], np.array(expected, np.float32), err_msg=name)


def test_prompt_tokens_are_scored_by_the_token_before_them_and_only_if_asked() -> None:
    scored = request(slot=0, residence=0, pages=[1, 2, 3], num_computed=10, prompt_len=10)
    scored.params = SamplingParams(prompt_logprobs=0)
    quiet = request(slot=1, residence=1, pages=[4], num_computed=3, prompt_len=3)
    chunks = (Chunk(request=scored, start=0, count=10), Chunk(request=quiet, start=0, count=3))
    _, _, blocks = round_trip(make_plan(chunks=chunks), layout(2, 4))
    assert blocks.is_scored.tolist() == [True, True, False, False]
    assert blocks.targets[0].tolist() == list(range(11, 19))
    assert blocks.targets[1, 0] == 19  # the prompt's last token; what follows it is sampled, not scored


def test_a_resumed_requests_output_is_not_scored() -> None:
    resumed = request(slot=0, residence=0, pages=[1, 2, 3], num_computed=12, prompt_len=8)
    resumed.params = SamplingParams(prompt_logprobs=0)
    resumed.token_ids += [40, 41, 42, 43]
    resumed.prefill_end = 12
    _, _, blocks = round_trip(make_plan(chunks=(Chunk(request=resumed, start=0, count=12),)), layout(2, 2))
    assert blocks.is_scored.tolist() == [True, False]
    assert blocks.targets[0].tolist() == [*range(11, 18), 0]


def test_the_block_table_follows_a_slot_from_request_to_request() -> None:
    by, where = writer(), layout(4, 0)
    first = request(slot=1, residence=0, pages=[3, 4, 5], num_computed=9, max_length=24)
    batch, _, _ = round_trip(make_plan(decodes=(first,)), where, by)
    assert batch.block_tables[1, :3].tolist() == [3, 4, 5]
    first.pages.append(6)
    first.num_computed = 13
    batch, _, _ = round_trip(make_plan(decodes=(first,)), where, by)
    assert batch.block_tables[1, :4].tolist() == [3, 4, 5, 6]
    assert batch.page_ids[0] == 6
    second = request(slot=1, residence=1, pages=[9], num_computed=2, max_length=17)
    batch, _, _ = round_trip(make_plan(decodes=(second,)), where, by)
    assert batch.block_tables[1, 0] == 9
    assert batch.rope_lengths.tolist() == [16, 0, 0, 0]
    assert not batch.block_tables[DUMMY].any()
    assert not batch.block_tables[0].any()


def test_the_same_request_back_in_its_slot_has_its_new_pages() -> None:
    by, where = writer(), layout(4, 0)
    resumed = request(slot=0, residence=0, pages=[3, 4], num_computed=6)
    round_trip(make_plan(decodes=(resumed,)), where, by)
    resumed.residence, resumed.pages, resumed.stale_from = 5, [8, 7], 0
    batch, _, _ = round_trip(make_plan(decodes=(resumed,)), where, by)
    assert batch.block_tables[0, :2].tolist() == [8, 7]


def test_a_packed_array_is_never_written_again() -> None:
    by, where = writer(), layout(4, 0)
    plan = make_plan(decodes=(request(slot=0, residence=0, pages=[3, 4], num_computed=6),))
    first = by.write(plan, where)
    copy = first.copy()
    second = by.write(make_plan(decodes=(request(slot=0, residence=1, pages=[9], num_computed=2),)), where)
    np.testing.assert_array_equal(first, copy)
    assert not np.shares_memory(first, second)
