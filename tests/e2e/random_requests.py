"""Random requests to a server with a drafter."""

from __future__ import annotations

import json
import random

from protos.engine.v1 import engine_pb2 as pb

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 12, "maxLength": 30}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)


COUNT = 8


def request(number: int, drafts: int) -> pb.GenerateRequest:
    guided = number % 2 == 0
    made = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=random.Random(number).choices(range(97, 123), k=30)),
        sampling=pb.SamplingParams(max_tokens=90, seed=number, temperature=0.7 * (number % 3), ignore_eos=not guided),
        speculation=pb.Speculation(num_draft_tokens=drafts),
    )
    if guided:
        made.grammar.CopyFrom(pb.Grammar(json_schema=SCHEMA))
    return made
