"""Fields that say what an answer must look like: OpenAI's `response_format` and the extensions of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import (
    NOT_NULL,
    NULL,
    Rule,
    Rules,
    at_most_one,
    both,
    either,
    exactly_one,
    has,
    if_any,
    left_out,
    never,
    only_with,
    where,
)
from services.common.validation.json_text import parsed_json
from services.gateway.protocol.fields.base import JsonObject, RequestModel, unsupported

_FOREIGN_FORMATS = ("grammar", "python", "structural_tag")
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

ConstraintKind = Literal["json_schema", "regex", "lark", "choices"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Constraint that one field asks for.

    Args:
        kind: which kind of language.
        value: the schema as an object, the expression or grammar as text, or the list of texts.
        param: the field, as an error names it.
        of_text: it describes the text of a message only (`response_format`), not a whole output.
    """

    kind: ConstraintKind
    value: Any
    param: str
    of_text: bool = False


def _schema_text(value: Any) -> Any:
    """A schema may be sent as text."""
    if isinstance(value, str):
        try:
            return parsed_json(value, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from error
    return value


SchemaOrText = Annotated[
    JsonObject,
    BeforeValidator(_schema_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "contentMediaType": "application/json"}]}),
]
Regex = Annotated[str, Field(min_length=1)]
Grammar = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class JsonSchemaFormat(RequestModel):
    """OpenAI's form of a JSON schema."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    """What the caller calls it; not shown to the model."""
    description: str | None = None
    """Accepted and ignored: describe the answer in the prompt."""
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None
    """The schema is enforced by masks whether this is true, false or left out."""


def _format_type(value: Any) -> Any:
    if value in _FOREIGN_FORMATS:
        raise unsupported(
            f"response_format {value!r} is not supported: send 'text', 'json_object' or 'json_schema', or "
            'structured_outputs {"grammar": ...}'
        )
    return value


class ResponseFormat(RequestModel):
    """The form of the answer's text."""

    type: Annotated[Literal["text", "json_object", "json_schema"], BeforeValidator(_format_type)]
    json_schema: JsonSchemaFormat | None = None
    """Format of type "json_schema"."""
    value: JsonObject | None = None
    """JSON schema of the object for type "json_object", as huggingface_hub sends it."""

    json_rules: ClassVar[Rules] = (
        either(
            if_any(type={"enum": ["text", "json_object"]}, json_schema=NULL),
            has(type="json_schema", json_schema=has(schema=NOT_NULL)),
        ),
        only_with("value", has(type="json_object")),
    )

    @model_validator(mode="after")
    def _goes_together(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise contradiction(
                "response_format 'json_schema' needs json_schema.schema: send one, or 'json_object' for any object",
                "json_schema" if self.json_schema is None else "json_schema.schema",
            )
        if self.type != "json_schema" and self.json_schema is not None:
            raise contradiction(f"json_schema does not go with response_format {self.type!r}", "json_schema")
        if self.type != "json_object" and self.value is not None:
            raise contradiction(f"value does not go with response_format {self.type!r}", "value")
        return self


class StructuredOutputs(RequestModel):
    """vLLM's `structured_outputs`: exactly one of its fields."""

    json_: SchemaOrText | None = Field(None, alias="json")
    """A JSON schema."""
    json_object: Literal[True] | None = None
    """Any JSON object."""
    regex: Regex | None = None
    """A regular expression (syntax of Rust's regex crate) that matches the whole text."""
    choice: Choices | None = None
    """One of these texts."""
    grammar: Grammar | None = None
    """A grammar in llguidance's variant of Lark; its start rule is `start`."""

    refused: ClassVar[Mapping[str, str]] = {
        "structural_tag": "use grammar, which can say the same",
        "whitespace_pattern": "leave it out",
        "disable_fallback": "leave it out, there is no second backend",
        "disable_any_whitespace": "leave it out",
        "disable_additional_properties": "say additionalProperties false in the schema",
    }
    json_rules: ClassVar[Rules] = (exactly_one("json", "json_object", "regex", "choice", "grammar"),)

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name for name in ("json", "json_object", "regex", "choice", "grammar") if self._value(name)]
        if len(given) != 1:
            raise contradiction(
                "structured_outputs needs exactly one of json, json_object, regex, choice and grammar, not "
                f"{len(given)}",
                given[-1] if given else "json",
            )
        return self

    def _value(self, name: str) -> bool:
        return getattr(self, "json_" if name == "json" else name) is not None

    def wanted(self, param: str) -> Wanted:
        """Constraint that the field asks for."""
        if self.json_ is not None:
            return Wanted("json_schema", self.json_, f"{param}.json")
        if self.regex is not None:
            return Wanted("regex", self.regex, f"{param}.regex")
        if self.choice is not None:
            return Wanted("choices", self.choice, f"{param}.choice")
        if self.grammar is not None:
            return Wanted("lark", self.grammar, f"{param}.grammar")
        return Wanted("json_schema", _ANY_OBJECT, f"{param}.json_object")


_FIELDS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_FORMED = has(type={"enum": ["json_object", "json_schema"]})
OPEN: Rule = left_out(*_FIELDS)
"""No field constrains a whole output."""
UNCONSTRAINED: Rule = both(OPEN, never(has(response_format=_FORMED)))
"""No field constrains the answer."""
SCHEMA_AT_MOST: Rule = both(
    left_out("guided_regex", "guided_choice", "guided_grammar"),
    if_any(structured_outputs=left_out("regex", "choice", "grammar")),
)
"""No field constrains the answer by anything but a schema."""


class ConstraintFields(RequestModel):
    """At most one constraint a request. It holds from the first token, or from the end of the reasoning."""

    response_format: ResponseFormat | None = None
    """{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"name", "schema"}}."""
    structured_outputs: StructuredOutputs | None = None
    """{"json" | "json_object" | "regex" | "choice" | "grammar": ...}."""
    guided_json: SchemaOrText | None = None
    """Older name of structured_outputs.json."""
    guided_regex: Regex | None = None
    """Older name of structured_outputs.regex."""
    guided_choice: Choices | None = None
    """Older name of structured_outputs.choice."""
    guided_grammar: Grammar | None = None
    """Older name of structured_outputs.grammar."""

    json_rules: ClassVar[Rules] = (
        at_most_one(*_FIELDS),
        where(has(response_format=_FORMED), OPEN),
    )

    @property
    def wanted(self) -> Wanted | None:
        """The constraint, if there is one."""
        found = self._all_wanted()
        return found[0] if found else None

    def _all_wanted(self) -> list[Wanted]:
        found: list[Wanted] = []
        form = self.response_format
        if form is not None and form.type == "json_object":
            param = "response_format" if form.value is None else "response_format.value"
            found.append(Wanted("json_schema", _ANY_OBJECT if form.value is None else form.value, param, of_text=True))
        if form is not None and form.json_schema is not None:
            schema = form.json_schema.schema_
            found.append(Wanted("json_schema", schema, "response_format.json_schema.schema", of_text=True))
        if self.structured_outputs is not None:
            found.append(self.structured_outputs.wanted("structured_outputs"))
        if self.guided_json is not None:
            found.append(Wanted("json_schema", self.guided_json, "guided_json"))
        if self.guided_regex is not None:
            found.append(Wanted("regex", self.guided_regex, "guided_regex"))
        if self.guided_choice is not None:
            found.append(Wanted("choices", self.guided_choice, "guided_choice"))
        if self.guided_grammar is not None:
            found.append(Wanted("lark", self.guided_grammar, "guided_grammar"))
        return found

    @model_validator(mode="after")
    def _one_constraint(self) -> ConstraintFields:
        found = self._all_wanted()
        if len(found) > 1:
            fields = [wanted.param.partition(".")[0] for wanted in found]
            raise contradiction(f"{' and '.join(fields)} both constrain the answer: send one of them", fields[1])
        return self
