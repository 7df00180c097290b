"""Python types as JSON Schemas, and JSON as values of them."""

from __future__ import annotations

import dataclasses
import enum
import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import jsonschema
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_client import Keywords
from lockstep_client.schemas import parameters_of, schema_of


class Size(enum.Enum):
    SMALL = "small"
    BIG = "big"


@dataclasses.dataclass
class Place:
    name: Annotated[str, Keywords(maxLength=30, minLength=1)]
    size: Size = Size.SMALL
    tags: list[str] = dataclasses.field(default_factory=list, metadata={"maxItems": 3})


@dataclasses.dataclass
class Node:
    place: Place
    after: Node | None = None


class Point(TypedDict):
    x: float
    y: NotRequired[float]


class Model(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)


@dataclasses.dataclass
class Everything:
    text: str
    whole: int
    real: float
    truth: bool
    nothing: None
    one: Literal["a", 1]
    either: int | str
    many: Sequence[int]
    unique: frozenset[int]
    pair: tuple[int, str]
    row: tuple[float, ...]
    by_name: Mapping[str, int]
    moment: datetime
    day: date
    hour: time
    key: uuid.UUID
    free: Any
    point: Point


EVERYTHING = st.builds(
    Everything,
    real=st.floats(allow_nan=False, allow_infinity=False),
    row=st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple),
    many=st.lists(st.integers()),
    unique=st.frozensets(st.integers()),
    by_name=st.dictionaries(st.text(), st.integers()),
    moment=st.datetimes(),
    free=st.none() | st.text(),
    point=st.fixed_dictionaries({"x": st.floats(allow_nan=False, allow_infinity=False)}),
)


def as_json(value: Any) -> Any:
    """Return the JSON value that stands for `value`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | frozenset | set):
        return [as_json(each) for each in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, uuid.UUID) else value


@settings(max_examples=30)
@given(EVERYTHING)
def test_a_value_survives_the_way_through_json(value: Everything) -> None:
    schema = schema_of(Everything)
    text = json.dumps(as_json(value))
    jsonschema.Draft202012Validator(json.loads(schema.text)).validate(json.loads(text))
    assert schema.parse(text) == value


def test_a_dataclass_is_an_object_of_its_fields() -> None:
    assert json.loads(schema_of(Place).text) == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30, "minLength": 1},
            "size": {"enum": ["small", "big"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    assert schema_of(Place).parse('{"name": "Oslo", "size": "big"}') == Place("Oslo", Size.BIG)


def test_a_type_may_be_recursive_and_a_typed_dict_is_a_dict() -> None:
    schema = schema_of(Node)
    text = '{"place": {"name": "a"}, "after": {"place": {"name": "b"}, "after": null}}'
    jsonschema.Draft202012Validator(json.loads(schema.text)).validate(json.loads(text))
    assert schema.parse(text) == Node(Place("a"), Node(Place("b")))
    assert json.loads(schema_of(Point).text)["required"] == ["x"]
    assert schema_of(Point).parse('{"x": 1}') == {"x": 1.0}


class Tree(pydantic.BaseModel):
    model: Model
    children: list[Tree]


@dataclasses.dataclass
class Holder:
    models: list[Model]
    tree: Tree | None


def test_models_of_pydantic_may_be_within_other_types() -> None:
    made = schema_of(list[Model])
    assert json.loads(made.text)["items"]["properties"]["name"]["maxLength"] == 5
    assert made.parse('[{"name": "a"}]') == [Model(name="a")]
    with pytest.raises(ValueError, match="at most 5"):
        made.parse('[{"name": "too long"}]')
    leaf = {"model": {"name": "b"}, "children": []}
    value = {"models": [{"name": "a"}], "tree": {"model": {"name": "c"}, "children": [leaf]}}
    schema = schema_of(Holder)
    jsonschema.Draft202012Validator(json.loads(schema.text)).validate(value)
    inner = Tree(model=Model(name="b"), children=[])
    assert schema.parse(json.dumps(value)) == Holder([Model(name="a")], Tree(model=Model(name="c"), children=[inner]))
    assert not jsonschema.Draft202012Validator(json.loads(schema.text)).is_valid({"models": [{}], "tree": None})


def test_two_types_with_one_name_are_refused() -> None:
    other = pydantic.create_model("Model", size=(int, ...))
    holder = pydantic.create_model("Outer", part=(other, ...))
    with pytest.raises(TypeError, match="another type of the schema is named Model"):
        schema_of(tuple[Tree, holder])  # type: ignore[valid-type]


def test_pydantic_describes_and_checks_its_own_models() -> None:
    assert json.loads(schema_of(Model).text) == Model.model_json_schema()
    assert schema_of(Model).parse('{"name": "Oslo"}') == Model(name="Oslo")
    assert schema_of(pydantic.TypeAdapter(list[Model])).parse('[{"name": "a"}]') == [Model(name="a")]
    with pytest.raises(ValueError, match="at most 5"):
        schema_of(Model).parse('{"name": "Stockholm"}')


def test_a_mapping_and_a_text_are_schemas_themselves() -> None:
    assert json.loads(schema_of({"type": "integer"}).text) == {"type": "integer"}
    assert schema_of('{"type": "integer"}').parse("3") == 3
    with pytest.raises(ValueError, match="schema: is no JSON"):
        schema_of("{")
    word = Annotated[str, Keywords(maxLength=2)]  # keywords go anywhere
    schema = schema_of(list[word | None])
    assert json.loads(schema.text)["items"]["anyOf"][0] == {"type": "string", "maxLength": 2}
    assert schema.parse('["ab", null]') == ["ab", None]
    mapping = schema_of(Annotated[list[int], {"maxItems": 1}])
    assert (json.loads(mapping.text)["maxItems"], mapping.parse("[1]")) == (1, [1])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (list, "list does not say what is in it"),
        (object, "object has no JSON Schema"),
        (dict[int, str], "the keys of a JSON object are str, not int"),
        (dataclasses.make_dataclass("Bad", [("when", complex)]), "Bad.when: complex has no JSON Schema"),
        (list[complex], r"list\[\]: complex has no JSON Schema"),
    ],
)
def test_a_type_without_a_schema_is_named(source: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        schema_of(source)


@pytest.mark.parametrize(
    ("source", "text", "message"),
    [
        (Place, "{}", "answer: has no name"),
        (Place, '{"name": 3}', "answer.name: 3 is no str"),
        (Place, '{"name": "a", "mayor": "b"}', "answer: Place has no mayor"),
        (Place, "[]", r"answer: \[\] is no Place"),
        (int | None, '"x"', '"x" is no int'),
        (tuple[int, int], "[1]", "answer: has 1 items, not 2"),
        (Literal[1], "true", "true is no"),
        (int, "true", "true is no int"),
    ],
)
def test_a_wrong_value_is_named(source: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema_of(source).parse(text)


def test_a_function_is_an_object_of_its_parameters() -> None:
    def weather(city: Annotated[str, {"maxLength": 9}], days: int = 1, *, at: Place | None = None) -> str:
        raise AssertionError

    described = parameters_of(weather)
    assert described["required"] == ["city"]
    assert described["properties"]["city"] == {"type": "string", "maxLength": 9}
    assert described["properties"]["at"] == {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}
    assert "Place" in described["$defs"]

    def untyped(city) -> None:  # type: ignore[no-untyped-def]
        raise AssertionError

    def starred(*cities: str) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match=r"untyped\(city\): has no type"):
        parameters_of(untyped)
    with pytest.raises(TypeError, match=r"starred\(cities\): a tool's parameters have names"):
        parameters_of(starred)
