"""The schemas of every table in a run folder, as data. A change here is a new SCHEMA_VERSION."""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 2

READABLE = (1, 2)
"""Schema versions that readers accept: this and the previous one."""

_WHO = [("unit", pa.string()), ("attempt", pa.string()), ("trunk", pa.string()), ("cell", pa.string())]

PHASE_SPANS = pa.list_(pa.struct([("phase", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))


def _schema(columns: list) -> pa.Schema:
    return pa.schema(columns, metadata={"schema_version": str(SCHEMA_VERSION)})


MESSAGES = _schema([
    *_WHO,  # cell: null for the trunk's own messages
    ("message_idx", pa.int32()),
    ("author", pa.string()),
    ("content", pa.string()),
    ("prompt_tokens", pa.list_(pa.int32())),  # fed before the reply; null when nothing was generated
    ("tokens", pa.list_(pa.int32())),  # generated, the stop token included
    ("phases", PHASE_SPANS),  # runs over `tokens`
    ("layout", pa.string()),  # JSON: what the view knew of the fed tokens
    ("logprobs", pa.list_(pa.float32())),
    ("entropy", pa.list_(pa.float32())),
    ("sampling_logprobs", pa.list_(pa.float32())),
    ("finish_reason", pa.string()),
    ("interventions", pa.string()),  # JSON: the metadata's `steering` and `patch`
    ("metadata", pa.string()),  # JSON: the rest of the metadata
])  # fmt: skip

RECORDS = _schema([
    *_WHO,
    ("participant", pa.string()),
    ("message_idx", pa.int32()),
    ("layer", pa.int32()),
    ("token_span", pa.struct([("prompt", pa.int32()), ("rows", pa.int32())])),
    ("phases", PHASE_SPANS),  # over the rows
    ("tokens", pa.list_(pa.int32())),  # of the rows; for pooled records: of the pooled rows
    ("positions", pa.list_(pa.int32())),
    ("selection", pa.string()),
    ("fingerprint", pa.string()),
    ("source", pa.string()),
    ("pool", pa.string()),
    ("num_pooled", pa.int32()),
    ("removed", pa.int32()),  # selected rows above the capture's max_norm; null before version 2
    ("file", pa.string()),  # relative to the run folder
    ("key", pa.string()),  # tensor in the file
    ("row_start", pa.int64()),
    ("row_end", pa.int64()),
    ("dtype", pa.string()),
])  # fmt: skip

LAYOUT = {"compression": "zstd", "write_page_checksum": True}
"""How tables are written: a page that was changed is found by whoever reads it, not only by `verify`."""

RECORDS_LAYOUT = {
    **LAYOUT,
    "compression": "lz4",
    "use_dictionary": [f.name for f in RECORDS if pa.types.is_string(f.type)]
    + ["message_idx", "layer", "num_pooled", "removed", "tokens.list.element", "positions.list.element"],
    "column_encoding": {"row_start": "DELTA_BINARY_PACKED", "row_end": "DELTA_BINARY_PACKED"},
}  # fmt: skip
"""How it is written: aggregates read a row of it for every stored vector, so reading fast is worth a few bytes a row."""

RECORD_PARTITIONS = pa.schema([("model", pa.string()), ("site", pa.string())])

OUTCOMES = _schema([
    *_WHO,
    ("numbers", pa.map_(pa.string(), pa.float64())),
    ("texts", pa.map_(pa.string(), pa.string())),
])  # fmt: skip

FAILURES = _schema([*_WHO, ("error", pa.string()), ("traceback", pa.string()), ("attempts", pa.int32())])
"""cell is null where the trunk itself failed."""

ROUTING = _schema([
    *_WHO,
    ("model", pa.string()),
    ("participant", pa.string()),
    ("message_idx", pa.int32()),  # null: all of the cell's messages together
    ("phase", pa.string()),
    ("layer", pa.int32()),
    ("tokens", pa.int64()),
    ("top_k", pa.int32()),
    ("counts", pa.list_(pa.int64())),  # picks per expert; they sum to tokens * top_k
    ("mass", pa.list_(pa.float16())),  # mean score per expert; null where scores were not kept
])  # fmt: skip

PLAN = _schema([
    ("cell", pa.string()), ("item", pa.string()), ("trunk", pa.string()), ("trunk_seed", pa.int64()),
    ("branch_seed", pa.int64()), ("unit", pa.string()), ("cast", pa.string()), ("owned", pa.bool_()),
])  # fmt: skip
"""Followed by one column per axis, named by its path: float64, bool or string."""

ROWS = 65_536
"""Per row group."""

CONFIG_SHA256, ITEMS_SHA256 = "config_sha256", "items_sha256"
"""What a part's footer says of its configuration and its items. Parts of earlier versions say nothing."""
