"""Turns a picture into the JSON that the page draws, bounded whatever the pool's size; runs on any thread.

What users wrote is not in it. Ids are cut: whole ones would let any reader end or fetch what belongs to others.
"""

import base64
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.engine import EngineStats
from jaxserve.scheduling.picture import Picture, PicturedRequest
from jaxserve.scheduling.step_history import StepRecord, TurnKind
from server.observability.recent import RecentTimes, quantile

MAX_CELLS = 4096
MAX_RANGES = 4096  # over all requests together
SHOWN_ID_CHARS = 17  # of `chatcmpl-` and 32 hexadecimal digits: enough to know one's own by

# What a cell of the grid shows; the running request `i` of the list is FIRST_OWNER + i.
FREE, CACHED, SHARED, FIRST_OWNER = 0, 1, 2, 3


def picture_payload(picture: Picture) -> dict[str, Any]:
    per_cell = -(-picture.num_pages // MAX_CELLS)
    room = MAX_RANGES
    running = []
    # The newest first: where room runs out, the oldest go without.
    for request in sorted(picture.running, key=lambda request: -request.number):
        ranges = _ranges(sorted({(page - 1) // per_cell for page in request.pages}))
        room -= len(ranges)
        running.append((request, ranges if room >= 0 else None))
    running.reverse()
    return {
        "page_size": picture.page_size,
        "max_num_seqs": picture.max_num_seqs,
        "pages": {
            "total": picture.num_pages,
            "per_cell": per_cell,
            "cells": base64.b64encode(_cells(picture, [request for request, _ in running], per_cell)).decode(),
        },
        "running": [{**_request(request), "cells": ranges} for request, ranges in running],
        "waiting": [_request(request) for request in picture.waiting],
        "steps": _steps(picture.steps),
        "tree": [list(line) for line in picture.tree],
    }


def latency_payload(times: RecentTimes) -> dict[str, float | int | None]:
    """Seconds, of the last half minute."""
    values = sorted(times.values())
    if not values:
        return {"count": 0, "p50": None, "p95": None}
    return {"count": len(values), "p50": quantile(values, 0.5), "p95": quantile(values, 0.95)}


def stats_payload(stats: EngineStats) -> Mapping[str, Any]:
    return dataclasses.asdict(stats)


def _request(request: PicturedRequest) -> dict[str, Any]:
    return {
        "number": request.number,
        "name": shown_id(request.request_id),
        "slot": request.slot,
        "prompt": request.prompt_tokens,
        "tokens": request.tokens,
        "computed": request.computed,
        "limit": request.max_length,
        "cached": request.cached_tokens,
        "preemptions": request.preemptions,
        "prefilling": request.is_prefilling,
        "pages": len(request.pages),
    }


def shown_id(request_id: str) -> str:
    """Never more than half of it: ids that clients chose may be short."""
    return request_id[: min(SHOWN_ID_CHARS, len(request_id) // 2)]


def _cells(picture: Picture, running: Sequence[PicturedRequest], per_cell: int) -> bytes:
    """uint16, little-endian, one a cell: of the pages that share a cell, the one in most use is shown."""
    codes = np.zeros(picture.num_pages + 1, np.uint16)
    codes[list(picture.kept_pages)] = CACHED
    holders = np.zeros(picture.num_pages + 1, np.int32)
    for index, request in enumerate(running):
        pages = list(request.pages)
        codes[pages] = FIRST_OWNER + index
        holders[pages] += 1  # a request holds no page twice
    codes[holders > 1] = SHARED
    padded = np.zeros(-(-picture.num_pages // per_cell) * per_cell, np.uint16)
    padded[: picture.num_pages] = codes[1:]
    return padded.reshape(-1, per_cell).max(axis=1).astype("<u2").tobytes()


def _ranges(ordered: Iterable[int]) -> list[int]:
    """`[3, 4, 5, 9]` → `[3, 3, 9, 1]`: where each run begins, and how long it is."""
    ranges: list[int] = []
    for value in ordered:
        if ranges and ranges[-2] + ranges[-1] == value:
            ranges[-1] += 1
        else:
            ranges += [value, 1]
    return ranges


def _steps(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Spans of one request in one slot doing one thing: `[slot, number, kind, first step, steps, tokens]`."""
    return {
        "first": records[0].step if records else 0,
        "count": len(records),
        "spans": list(_spans(records)),
    }


def _spans(records: Sequence[StepRecord]) -> Iterator[list[int]]:
    open_spans: dict[int, list[int]] = {}  # decodes, by slot
    for record in records:
        for turn in record.turns:
            span = open_spans.get(turn.slot)
            is_decode = turn.kind is TurnKind.DECODE
            if span is not None and is_decode and span[1] == turn.number and span[3] + span[4] == record.step:
                span[4] += 1
                span[5] += turn.tokens
                continue
            if span is not None:
                yield open_spans.pop(turn.slot)
            fresh = [turn.slot, turn.number, int(turn.kind), record.step, 1, turn.tokens]
            if is_decode:
                open_spans[turn.slot] = fresh
            else:
                yield fresh
    yield from open_spans.values()
