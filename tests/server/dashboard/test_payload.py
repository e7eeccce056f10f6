"""What the page is sent: the grid's cells, the lanes' spans, ids that give nothing away; all of it bounded."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from jaxserve.scheduling.picture import Picture, PicturedRequest
from jaxserve.scheduling.step_history import StepRecord, Turn, TurnKind
from jaxserve.scheduling.tree_outline import TreeLine
from server.dashboard.payload import (
    CACHED,
    FIRST_OWNER,
    FREE,
    MAX_CELLS,
    SHARED,
    latency_payload,
    picture_payload,
    shown_id,
)
from server.observability.recent import WINDOW_S, RecentTimes


def pictured(number: int, pages: tuple[int, ...], request_id: str = "chatcmpl-0123456789abcdef-0") -> PicturedRequest:
    return PicturedRequest(
        number=number,
        request_id=request_id,
        slot=number,
        prompt_tokens=10,
        tokens=12,
        computed=11,
        max_length=40,
        cached_tokens=0,
        preemptions=0,
        is_prefilling=False,
        pages=pages,
    )


def picture(
    num_pages: int,
    running: tuple[PicturedRequest, ...] = (),
    *,
    kept: tuple[int, ...] = (),
    steps: tuple[StepRecord, ...] = (),
    tree: tuple[TreeLine, ...] = (),
) -> Picture:
    return Picture(
        page_size=16,
        num_pages=num_pages,
        max_num_seqs=8,
        kept_pages=kept,
        running=running,
        waiting=(),
        steps=steps,
        tree=tree,
    )


def cells(payload: dict[str, Any]) -> list[int]:
    return np.frombuffer(base64.b64decode(payload["pages"]["cells"]), "<u2").tolist()


def test_each_page_is_free_cached_shared_or_one_requests() -> None:
    payload = picture_payload(picture(8, (pictured(0, (1, 2, 3)), pictured(1, (1, 5))), kept=(1, 2, 7)))
    assert payload["pages"]["per_cell"] == 1
    assert cells(payload) == [
        SHARED,
        FIRST_OWNER,
        FIRST_OWNER,
        FREE,
        FIRST_OWNER + 1,
        FREE,
        CACHED,
        FREE,
    ]
    # Where a request's pages lie, shared ones included: from cell 0 three, and cells 0 and 4.
    assert [request["cells"] for request in payload["running"]] == [[0, 3], [0, 1, 4, 1]]


def test_a_large_pool_is_drawn_with_several_pages_a_cell() -> None:
    num_pages = 100_000
    payload = picture_payload(picture(num_pages, (pictured(0, (25, 26, 100_000)),), kept=(1, 26)))
    per_cell = payload["pages"]["per_cell"]
    drawn = cells(payload)
    assert len(drawn) == -(-num_pages // per_cell) <= MAX_CELLS
    assert drawn[0] == FIRST_OWNER  # pages 1 to 25: a request's counts more than a cached one
    assert drawn[1] == FIRST_OWNER
    assert drawn[-1] == FIRST_OWNER
    assert sum(drawn) == 3 * FIRST_OWNER


def test_the_worst_case_stays_small_and_every_page_is_still_drawn() -> None:
    """256 requests that share every other page of a full pool, a full history and a full tree."""
    rng = np.random.default_rng(0)
    shared = tuple(range(1, 2560, 2))
    running = tuple(
        pictured(number, (*shared, *range(2561 + 6 * number, 2561 + 6 * (number + 1)))) for number in range(256)
    )
    kinds = list(TurnKind)
    steps = tuple(
        StepRecord(step, tuple(Turn(slot, int(rng.integers(256)), kinds[(step + slot) % 3], 32) for slot in range(32)))
        for step in range(120)
    )
    payload = picture_payload(
        picture(MAX_CELLS, running, steps=steps, tree=tuple(TreeLine(9, 9999, 99, 9999, True, True) for _ in range(40)))
    )
    assert len(json.dumps(payload)) < 400_000
    assert cells(payload).count(SHARED) == len(shared)
    assert sum(code >= FIRST_OWNER for code in cells(payload)) == 6 * 256
    assert payload["running"][-1]["cells"] is not None  # the newest is found in the picture, whoever goes without
    assert payload["running"][0]["cells"] is None


def test_consecutive_decodes_are_one_span_and_chunks_are_not() -> None:
    records = (
        StepRecord(4, (Turn(0, 7, TurnKind.PREFILL, 32),)),
        StepRecord(5, (Turn(0, 7, TurnKind.PREFILL, 8),)),
        StepRecord(6, (Turn(0, 7, TurnKind.DECODE, 1), Turn(1, 8, TurnKind.PREFILL, 5))),
        StepRecord(7, (Turn(0, 7, TurnKind.DECODE, 1), Turn(1, 8, TurnKind.DECODE, 1))),
        StepRecord(8, (Turn(1, 8, TurnKind.DECODE, 1),)),
        StepRecord(9, (Turn(0, 7, TurnKind.PREEMPTED, 0), Turn(1, 9, TurnKind.DECODE, 1))),
    )
    steps = picture_payload(picture(8, steps=records))["steps"]
    assert (steps["first"], steps["count"]) == (4, 6)
    assert sorted(steps["spans"]) == sorted(
        [
            [0, 7, TurnKind.PREFILL, 4, 1, 32],
            [0, 7, TurnKind.PREFILL, 5, 1, 8],
            [0, 7, TurnKind.DECODE, 6, 2, 2],
            [0, 7, TurnKind.PREEMPTED, 9, 1, 0],
            [1, 8, TurnKind.PREFILL, 6, 1, 5],
            [1, 8, TurnKind.DECODE, 7, 2, 2],
            [1, 9, TurnKind.DECODE, 9, 1, 1],
        ]
    )


@pytest.mark.parametrize(
    ("request_id", "shown"),
    [
        (f"chatcmpl-{'0123456789abcdef' * 2}-0", "chatcmpl-01234567"),
        ("job-1-0", "job"),
        ("x", ""),
    ],
)
def test_an_id_is_never_shown_whole(request_id: str, shown: str) -> None:
    assert shown_id(request_id) == shown
    (request,) = picture_payload(picture(8, (pictured(0, (1,), request_id=request_id),)))["running"]
    assert request["name"] == shown


def test_latencies_are_those_of_the_last_half_minute() -> None:
    now = 0.0
    times = RecentTimes(lambda: now)
    assert latency_payload(times) == {"count": 0, "p50": None, "p95": None}
    times.add(9.0)
    now = WINDOW_S + 1
    for value in range(1, 101):
        times.add(float(value))
    assert latency_payload(times) == {"count": 100, "p50": 50.0, "p95": 95.0}
