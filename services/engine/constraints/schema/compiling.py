"""Compiles a request's schema to a grammar."""

from __future__ import annotations

from typing import Any

from services.common.json_schema.origin import Origin, origin_of
from services.engine.constraints.refusal import Refused
from services.engine.constraints.schema.document import Document, parsed
from services.engine.constraints.schema.lowering import lark
from services.engine.constraints.schema.probe import Probe
from services.engine.constraints.schema.shapes import Demands

__all__ = ["grammar_of", "parsed"]


def grammar_of(schema: Any, probe: Probe) -> str:
    """Lark grammar of the values that are valid under a schema.

    Args:
        schema: as ``parsed`` returns it.

    Raises:
        Refused: it cannot be enforced; the message has the place in the schema and the keyword.
    """
    if schema is False:
        raise Refused("no output can fulfil it: false allows nothing")
    if not isinstance(schema, dict | bool):
        raise Refused("the schema must be an object")
    schema, origin = origin_of(schema) if isinstance(schema, dict) else (schema, None)
    try:
        return _lark(schema, origin or Origin(""), probe)
    except RecursionError:
        raise Refused("the schema is nested too deeply") from None
    except Refused as error:
        if origin is None:
            raise
        raise Refused(origin.refusal(str(error)), origin.field) from None


def _lark(schema: Any, origin: Origin, probe: Probe) -> str:
    document = Document(schema, f"#{origin.path}")
    demands: Demands = (document.root,)
    if origin.types:
        demands += (document.derived(document.root, "types", lambda: {"type": list(origin.types)}),)
    return lark(document, demands, probe)
