r"""Patterns that say what the formats of JSON Schema allow, in place of the libraries' own readings.

    duration                             RFC 3339, appendix A
    email, idn-email                     RFC 5321 and RFC 6531, with a name as its local part
    hostname, idn-hostname               RFC 1123 and RFC 5890
    ipv4, ipv6                           RFC 2673 and RFC 4291
    uri, uri-reference                   RFC 3986
    iri, iri-reference                   RFC 3987
    uri-template                         RFC 6570
    json-pointer, relative-json-pointer  RFC 6901 and draft-bhutton-relative-json-pointer
    uuid                                 RFC 4122

Invariant: a pattern describes the whole string, and every string that it matches has the format. Where the format's own
language is not regular (the length of a whole host name, the code of an `xn--` label), the pattern is stricter;
`STRICTER` says how.
Not responsible for: dates and times (see date_patterns.py), the notation of a library (see ecma_pattern.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from grammar_service.backends.json_schema.strings import date_patterns
from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.json_schema.walk import Schema, subschemas


def _label(letters: str, longest: int) -> str:
    """Return the labels of host names over `letters`, at most `longest` characters, without `--` at the third place."""
    inner = f"[{letters}\\-]"
    short = f"[{letters}](?:{inner}?[{letters}])?"
    return f"(?:{short}|[{letters}]{inner}(?:[{letters}]{inner}?|-)[{letters}]|" + (
        f"[{letters}]{inner}(?:[{letters}]{inner}|-[{letters}]){inner}{{0,{longest - 5}}}[{letters}])"
    )


def _names(letters: str, *dots: tuple[int, int]) -> str:
    """Return the names of labels. `dots`: (longest label, most dots) of each alternative."""
    return "(?:" + "|".join(f"(?:{_label(letters, n)}[.]){{0,{most}}}{_label(letters, n)}" for n, most in dots) + ")"


_LDH = "A-Za-z0-9"
# Letters that IDNA 2008 allows in any place and that normalisation leaves alone: Latin-1, kana, common ideographs.
_IDN = "a-z0-9\u00e0-\u00f6\u00f8-\u00ff\u3041-\u3094\u4e00-\u9fa5"
_ATOM = "A-Za-z0-9!#$%&'*+/=?\\^_`{|}~\\-"
_WIDE = "\u00a1-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
"""Characters beyond ASCII of RFC 3987 (`ucschar`) in the first plane."""


def _mail(atom: str, host: str) -> str:
    # At most 64 characters before the at sign.
    return f"(?:[{atom}]{{1,64}}|[{atom}](?:[.]?[{atom}]){{0,31}})@{host}"


def _uri(*, wide: str, private: str, reference: bool) -> str:
    free = f"A-Za-z0-9\\-._~{wide}"
    code, others = "%[0-9A-Fa-f]{2}", "!$&'()*+,;="
    character = f"(?:[{free}{others}:@]|{code})"
    segments = f"(?:/{character}*)*"
    host = f"(?:\\[(?:{_IPV6}|[vV][0-9A-Fa-f]+[.][A-Za-z0-9\\-._~{others}:]+)\\]|(?:[{free}{others}]|{code})*)"
    authority = f"//(?:(?:[{free}{others}:]|{code})*@)?{host}(?::[0-9]*)?{segments}"
    absolute = f"/(?:{character}+{segments})?"
    tail = f"(?:[?](?:[{free}{others}:@/?{private}]|{code})*)?(?:#(?:[{free}{others}:@/?]|{code})*)?"
    full = f"[A-Za-z][A-Za-z0-9+\\-.]*:(?:{authority}|{absolute}|{character}+{segments})?{tail}"
    if not reference:
        return full
    first = f"(?:[{free}{others}@]|{code})+"
    return f"(?:{full}|(?:{authority}|{absolute}|{first}{segments})?{tail})"


def _ipv6(tail: str) -> str:
    group = "[0-9A-Fa-f]{1,4}"
    last = f"(?:{group}:{group}|{tail})"
    ways = [f"(?:{group}:){{6}}{last}"]
    for before in range(8):
        left = f"(?:(?:{group}:){{0,{before - 1}}}{group})?" if before > 1 else f"(?:{group})?" if before else ""
        after = 5 - before
        right = f"(?:{group}:){{{after}}}{last}" if after > 0 else last if after == 0 else group if after == -1 else ""
        ways.append(f"{left}::{right}")
    return "(?:" + "|".join(ways) + ")"


_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:[.]{_BYTE}){{3}}"
_IPV6 = _ipv6(_IPV4)
_SECONDS = "[0-9]+S"
_MINUTES = f"[0-9]+M(?:{_SECONDS})?"
_TIME = f"T(?:[0-9]+H(?:{_MINUTES})?|{_MINUTES}|{_SECONDS})"
_MONTHS = "[0-9]+M(?:[0-9]+D)?"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_VARIABLE = "(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})(?:[.]?(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(?::[1-9][0-9]{0,3}|[*])?"
_LITERAL = "[!#$&()*+,\\-./0-9:;=?@A-Z\\[\\]_a-z~\u00a1-\ud7ff\uf900-\ufdcf\ufdf0-\uffef]"
_PATTERNS = {
    "duration": f"P(?:(?:[0-9]+D|{_MONTHS}|[0-9]+Y(?:{_MONTHS})?)(?:{_TIME})?|{_TIME}|[0-9]+W)",
    "email": _mail(_ATOM, _names(_LDH, (63, 1), (31, 4))),
    "idn-email": _mail(_ATOM + _WIDE, _names(_LDH, (63, 1), (31, 4))),
    "hostname": _names(_LDH, (63, 2), (31, 6)),
    "idn-hostname": f"(?:{_names(_LDH, (63, 2), (31, 6))}|{_names(_IDN, (12, 6))})",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _uri(wide="", private="", reference=False),
    "uri-reference": _uri(wide="", private="", reference=True),
    "iri": _uri(wide=_WIDE, private="\ue000-\uf8ff", reference=False),
    "iri-reference": _uri(wide=_WIDE, private="\ue000-\uf8ff", reference=True),
    "uri-template": f"(?:{_LITERAL}|%[0-9A-Fa-f]{{2}}|\\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}

KNOWN = (*date_patterns.FORMATS, *_PATTERNS)
"""The formats that are enforced. Any other one is an annotation."""
VERIFIED = ("regex",)
"""Formats that no grammar can say and that the validator checks: an annotation has an effect where answers are
verified."""


@lru_cache(maxsize=64)
def exact_pattern(name: str, *, lower_case: bool) -> str:
    """Return the pattern of one of KNOWN, in ECMA-262.

    `lower_case`: whether `t` and `z` are accepted in times next to `T` and `Z`.
    """
    if name in date_patterns.FORMATS:
        return date_patterns.exact_pattern(name, lower_case=lower_case)
    return f"^(?:{_PATTERNS[name]})$"


def take_out_annotations(schema: Any, path: str, *, strict: bool) -> list[Unenforced]:
    """Take the formats that are not known out of the schema at `path`, in place. Return what was taken out.

    With `strict` they stay, and each of them is refused. The format of a node without strings has no effect, as in
    `{"type": "number", "format": "float"}` of OpenAPI, and goes without a word.
    """
    found: list[Unenforced] = []
    for where, node in list(subschemas(schema, path)):
        name = node.get("format")
        if not isinstance(name, str):
            continue
        if not admits_strings(node):
            del node["format"]
        elif name not in KNOWN and not strict:
            del node["format"]
            why = f"{name!r} is not a format that is enforced; it has no effect"
            if name in VERIFIED:
                why = f"no grammar enforces {name!r}; it has an effect only on verified answers"
            found.append(Unenforced(where, "format", why, is_annotation=True, can_be_verified=name in VERIFIED))
    return found


def admits_strings(node: Schema) -> bool:
    """Return whether the types of a schema allow strings."""
    types: Any = node.get("type", "string")
    return types == "string" or (isinstance(types, Sequence) and not isinstance(types, str) and "string" in types)
