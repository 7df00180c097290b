"""Cases for the keywords of any value, numbers, strings and objects. Data only; see case.py."""

from __future__ import annotations

from typing import Any

from tools.enforced.case import Case, Raw, case

INT: dict[str, Any] = {"type": "integer"}
STR: dict[str, Any] = {"type": "string"}
NUM: dict[str, Any] = {"type": "number"}
OBJ: dict[str, Any] = {"type": "object"}
A: dict[str, Any] = {"type": "object", "properties": {"a": INT}}
AB: dict[str, Any] = {"type": "object", "properties": {"a": INT, "b": INT}}

ANY_VALUE: tuple[Case, ...] = (
    case("type", "", STR, ["a", ""], [1, None, {}, [], True]),
    case("type", "each of the seven", {"type": "integer"}, [0, -12, 300], [0.5, "1", None, True, Raw("01"), Raw("+1")]),
    case("type", "number", NUM, [0, -0.5, 12, Raw("1e5")], ["1", True, Raw("1."), Raw(".5"), Raw("NaN")]),
    case("type", "boolean", {"type": "boolean"}, [True, False], [0, 1, "true", None]),
    case("type", "null", {"type": "null"}, [None], [0, "", False]),
    case("type", "array", {"type": "array"}, [[], [1, "a"]], [{}, "[]", None]),
    case("type", "object", OBJ, [{}, {"a": [1]}], [[], "{}", None]),
    case("type", "a list", {"type": ["string", "null"]}, ["a", None], [1, False, [], {}]),
    case("type", "integer written as 1.0", INT, [Raw("1.0")], [1.5]),
    case("enum", "", {"enum": ["a", 1, None, [1], {"b": 2}]}, ["a", 1, None, [1], {"b": 2}], ["b", 2, [], {"b": 3}]),
    case("enum", "beside type", {"type": "string", "enum": ["a", "b"]}, ["a"], ["c", 1]),
    case("enum", "values that type excludes", {"type": "string", "enum": ["a", 1]}, ["a"], [1]),
    case("enum", "beside minLength", {"type": "string", "enum": ["a", "ab"], "minLength": 2}, ["ab"], ["a"]),
    case("const", "", {"const": "a"}, ["a"], ["b", 1]),
    case("const", "an object", {"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1, "y"]}, {}]),
    case("const", "a value that type excludes", {"type": "string", "const": 1}, [], [1, "a"]),
    case("enum", "a control character", {"enum": ["a\x07b", "c"]}, ["a\x07b", "c"], ["ab", "a"]),
    case("const", "a NUL", {"const": "a\0b"}, ["a\0b"], ["ab", "a"]),
    case("const", "a NUL inside an array", {"const": ["a\0b"]}, [["a\0b"]], [["ab"]]),
    case("const", "a quote, a backslash, a tab", {"const": 'q"\\\t'}, ['q"\\\t'], ["q"]),
)

NUMBERS: tuple[Case, ...] = (
    case("minimum", "integer", {**INT, "minimum": 3}, [3, 4, 10, 100], [2, -3, 0]),
    case("minimum", "number", {**NUM, "minimum": 3}, [3, 3.5, 10], [2.9, -4, Raw("1e0"), Raw("-4e5"), Raw("3e-1")]),
    case("minimum", "a fraction for integers", {**INT, "minimum": 2.5}, [3], [2]),
    case("minimum", "without type", {"minimum": 3}, [3, "a", None], [2]),
    case("minimum", "beside a list of types", {"type": ["integer", "string"], "minimum": 3}, [3, "a"], [2]),
    case("maximum", "integer", {**INT, "maximum": 3}, [3, 0, -10], [4, 30]),
    case("maximum", "number", {**NUM, "maximum": 3}, [3, 2.9, -10], [3.1, 30, Raw("1e1"), Raw("3.00001")]),
    case("maximum", "without type", {"maximum": 3}, [3, "a"], [4]),
    case("exclusiveMinimum", "integer", {**INT, "exclusiveMinimum": 3}, [4, 30], [3, -4]),
    case("exclusiveMinimum", "number", {**NUM, "exclusiveMinimum": 3}, [3.1, 4], [3, Raw("3.0"), Raw("3e0"), 2.9]),
    case("exclusiveMinimum", "without type", {"exclusiveMinimum": 3}, [4, "a"], [3]),
    case("exclusiveMaximum", "integer", {**INT, "exclusiveMaximum": 3}, [2, -30], [3, 10]),
    case("exclusiveMaximum", "number", {**NUM, "exclusiveMaximum": 0.5}, [0.4, -1], [0.5, Raw("0.50"), Raw("5e-1"), 1]),
    case("exclusiveMaximum", "without type", {"exclusiveMaximum": 3}, [2, "a"], [3]),
    case("minimum", "with maximum", {**NUM, "minimum": -0.5, "maximum": 1.5}, [0, 1.5, -0.5], [-0.6, 1.6, 2, 15]),
    case("minimum", "with exclusiveMinimum", {**INT, "minimum": 3, "exclusiveMinimum": 4}, [5], [3, 4]),
    case("multipleOf", "integer", {**INT, "multipleOf": 3}, [0, 3, -6, 12], [1, 4, -5, 10]),
    case("multipleOf", "number", {**NUM, "multipleOf": 0.5}, [0.5, 2], [0.3, 1.7, Raw("1e-1")]),
    case("multipleOf", "a fraction for integers", {**INT, "multipleOf": 1.5}, [3, 6], [1, 2, 4]),
    case("multipleOf", "with minimum", {**INT, "multipleOf": 3, "minimum": 4}, [6, 9], [3, 4, 7]),
    case("multipleOf", "without type", {"multipleOf": 3}, [3, "a"], [4]),
)

UNESCAPED = [Raw(f'"{control}"') for control in ("\0", "\x01", "\t", "\x1f")]
SHORT_NAMES = {**OBJ, "propertyNames": {**STR, "maxLength": 3}}
LONE_QUOTE = {"type": "string", "pattern": '^[^"]$'}

STRINGS: tuple[Case, ...] = (
    case("minLength", "", {**STR, "minLength": 2}, ["ab", "abc", "\u00e9\u00e9"], ["", "a", "\n", "\U0001f600"]),
    case("minLength", "escapes count as one", {**STR, "minLength": 2}, ["\n\n"], ["\n", Raw('"\\u0061"')]),
    case("minLength", "control characters", {**STR, "minLength": 1}, ["a", "ab"], UNESCAPED),
    case("minLength", "without type", {"minLength": 2}, ["ab", 1], ["a"]),
    case("minLength", "beside a list of types", {"type": ["string", "null"], "minLength": 2}, ["ab", None], ["a"]),
    case("maxLength", "", {**STR, "maxLength": 2}, ["", "ab", "\U0001f600\u00e9"], ["abc", "\n\n\n"]),
    case("maxLength", "escapes count as one", {**STR, "maxLength": 1}, ["\n", '"'], ["ab"]),
    case("maxLength", "control characters", {**STR, "maxLength": 3}, ["a", "ab"], UNESCAPED),
    case("maxLength", "of names, control characters", SHORT_NAMES, [{"ab": 1}], [Raw('{"\t":1}'), Raw('{"\0":1}')]),
    case("maxLength", "without type", {"maxLength": 2}, ["ab", 1], ["abc"]),
    case("minLength", "with maxLength", {**STR, "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    case("pattern", "anchored", {**STR, "pattern": "^[a-c]+$"}, ["a", "cab"], ["", "d", "abd"]),
    case("pattern", "anywhere in the string", {**STR, "pattern": "b"}, ["b", "abc"], ["", "a"]),
    case("pattern", "anchored at one end", {**STR, "pattern": "^a"}, ["a", "ab"], ["", "ba"]),
    case("pattern", "anchors in a branch", {**STR, "pattern": "^a$|^b"}, ["a", "bx"], ["ax", "xb"]),
    case("pattern", "without type", {"pattern": "^a$"}, ["a", 1], ["b"]),
    case("pattern", "the dot", {**STR, "pattern": "^.$"}, ["a", "\u00e9"], ["\n", "\r", "\u2028", "ab"]),
    case("pattern", "\\d \\w \\s", {**STR, "pattern": "^\\d\\w\\s$"}, ["1a "], ["\u0663a ", "1\u00e9 ", "1a\u0085"]),
    case("pattern", "\\S", {**STR, "pattern": "^\\S$"}, ["a", "\u00e9"], [" ", "\t", "\u00a0", "\ufeff"]),
    case("pattern", "a class without the quote", LONE_QUOTE, ["a"], ['"', "ab"]),
    case("pattern", "the quote", {**STR, "pattern": '^"$'}, ['"'], ["a", "\\"]),
    case("pattern", "a line break", {**STR, "pattern": "^\\n$"}, ["\n"], ["n", "\\n"]),
    case("pattern", "a class of two classes", {**STR, "pattern": "^[a-c&&[^b]$"}, ["a", "b", "&", "["], ["d", "]"]),
    case("pattern", "\\p{L}", {**STR, "pattern": "^\\p{L}$"}, ["a", "\u00e9"], ["1"]),
    case("pattern", "characters spelled \\uXXXX", {**STR, "pattern": "^[^a]$"}, ["b"], [Raw('"\\u0061"'), "a"]),
    case("pattern", "look-around", {**STR, "pattern": "^(?!b)."}, ["a"], ["b"]),
    case("pattern", "a word boundary", {**STR, "pattern": "\\ba\\b"}, ["a", "b a"], ["ba"]),
    case("pattern", "a back reference", {**STR, "pattern": "^(a|b)\\1$"}, ["aa"], ["ab"]),
    case("pattern", "inline flags", {**STR, "pattern": "^(?s:.)$"}, [], ["\n"]),
    case("pattern", "with minLength", {**STR, "pattern": "^a+$", "minLength": 2}, ["aa"], ["a", "ab"]),
    case("pattern", "with maxLength", {**STR, "pattern": "^a+$", "maxLength": 2}, ["aa"], ["aaa", "b"]),
    case("pattern", "with format", {**STR, "pattern": "^2", "format": "date"}, ["2020-01-01"], ["1999-01-01", "2"]),
    case("format", "with maxLength", {**STR, "format": "email", "maxLength": 6}, ["a@b.co"], ["aaa@b.co"]),
)

OBJECTS: tuple[Case, ...] = (
    case("properties", "", A, [{"a": 1}, {}, {"b": "x"}, {"a": 1, "b": "x"}], [{"a": "x"}, 1]),
    case("properties", "in another order", AB, [{"a": 1, "b": 2}, {"b": 1, "a": 2}], [{"b": 1, "a": "x"}]),
    case("properties", "names repeated", A, [{"a": 1}], [Raw('{"a":1,"a":"x"}'), Raw('{"b":1,"a":"x"}')]),
    case("properties", "names spelled \\uXXXX", A, [{"a": 1}], [Raw('{"\\u0061":"x"}'), Raw('{"a":1,"\\u0061":"x"}')]),
    case("properties", "names with a quote", {**OBJ, "properties": {'"': INT}}, [{'"': 1}], [{'"': "x"}]),
    case(
        "properties", "names beyond ASCII", {**OBJ, "properties": {"\u00e9": INT}}, [{"\u00e9": 1}], [{"\u00e9": "x"}]
    ),
    case("properties", "without type", {"properties": {"a": INT}}, [{"a": 1}, 1, "x"], [{"a": "x"}]),
    case("properties", "false", {**OBJ, "properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]),
    case("required", "", {**AB, "required": ["b"]}, [{"b": 1}, {"a": 1, "b": 2}], [{}, {"a": 1}]),
    case("required", "a name not in properties", {**A, "required": ["z"]}, [{"z": 1}], [{}, {"a": 1}]),
    case("required", "without type", {"required": ["a"]}, [{"a": 1}, 1], [{}, {"b": 1}]),
    case("additionalProperties", "false", {**A, "additionalProperties": False}, [{"a": 1}, {}], [{"b": 1}]),
    case("additionalProperties", "a schema", {**A, "additionalProperties": STR}, [{"a": 1, "b": "x"}], [{"b": 1}]),
    case("additionalProperties", "alone", {**OBJ, "additionalProperties": INT}, [{}, {"q": 1}], [{"q": "x"}]),
    case("patternProperties", "", {**OBJ, "patternProperties": {"^x": INT}}, [{"x1": 1}, {"b": "s"}], [{"x1": "s"}]),
    case(
        "patternProperties",
        "with additionalProperties false",
        {**OBJ, "patternProperties": {"^x": INT}, "additionalProperties": False},
        [{"x1": 1}, {}],
        [{"x1": "s"}, {"b": 1}],
    ),
    case("patternProperties", "with properties", {**A, "patternProperties": {"^x": INT}}, [{"x": 1}], [{"x": "s"}]),
    case(
        "patternProperties",
        "that match a property",
        {**A, "patternProperties": {"^a": {"maximum": 3}}},
        [{"a": 2}],
        [{"a": 5}, {"a": "s"}],
    ),
    case("patternProperties", "without type", {"patternProperties": {"^x": INT}}, [{"x": 1}, 1], [{"x": "s"}]),
    case("propertyNames", "", {**OBJ, "propertyNames": {**STR, "maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    case("propertyNames", "enum", {**OBJ, "propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}], [{"c": 1}]),
    case("propertyNames", "with properties", {**A, "propertyNames": {"maxLength": 2}}, [{"a": 1}], [{"abc": 1}]),
    case("minProperties", "1", {**OBJ, "minProperties": 1}, [{"a": 1}], [{}]),
    case("minProperties", "2", {**OBJ, "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}, Raw('{"a":1,"a":2}')]),
    case("minProperties", "with properties", {**AB, "minProperties": 1}, [{"b": 1}], [{}]),
    case("maxProperties", "", {**OBJ, "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    case("maxProperties", "with properties", {**AB, "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 2}]),
    case("maxProperties", "without type", {"maxProperties": 1}, [{"a": 1}, 1], [{"a": 1, "b": 2}]),
    case("dependentRequired", "", {**AB, "dependentRequired": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}]),
    case("dependentSchemas", "", {**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": 1}], [{"a": 1}]),
    case("dependencies", "", {**AB, "dependencies": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}]),
    case("unevaluatedProperties", "false", {**A, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    case("unevaluatedProperties", "true", {**A, "unevaluatedProperties": True}, [{"a": 1, "b": 1}], [{"a": "x"}]),
)
