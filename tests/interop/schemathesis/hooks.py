"""Teaches schemathesis the media type of imports and exports: one JSON object per line."""

import json

import schemathesis


@schemathesis.serializer("application/x-ndjson")
def serialize_lines(ctx, value):
    # The schema describes one line.
    return value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n"


@schemathesis.deserializer("application/x-ndjson")
def deserialize_lines(ctx, response):
    lines = [json.loads(line) for line in response.content.splitlines() if line.strip()]
    # The schema describes one line. The last line is the end of the export.
    return lines[0] if lines else None
