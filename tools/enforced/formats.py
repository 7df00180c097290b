"""Cases for `format`: valid texts, invalid texts, and texts of the right form with an invalid value. Data only."""

from __future__ import annotations

from tools.enforced.case import Case, case

_FORMATS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "1999-12-31"],
        ["2024-1-1", "24-01-01", "2024-13-01", "2023-02-29", "2100-02-29", "2024-02-30", "2024-04-31", "x", ""],
        [],
    ),
    "time": (
        ["12:30:00Z", "23:59:59.5+01:00", "23:59:60Z", "15:59:60-08:00", "01:29:60+01:30"],
        ["12:30", "24:00:00Z", "12:60:00Z", "12:30:60Z", "23:59:60+01:00", "x"],
        [],
    ),
    "date-time": (
        ["2024-02-29T12:30:00Z", "1999-12-31T23:59:59.25-08:00", "2016-12-31T23:59:60Z"],
        ["2024-02-29", "2024-02-29 12:30", "2024-13-01T00:00:00Z", "2023-02-29T12:30:00Z", "2024-01-01T12:30:60Z"],
        [],
    ),
    "duration": (["P1D", "P3Y6M4DT12H30M5S", "P2W"], ["1D", "P", "PT", "P1S", "x"], ["P1Y2D"]),
    "email": (["joe@example.com", "a.b+c@x.org"], ["joe", "@x.org", "joe@", "a b@x.org"], [".a@x.org", "a..b@x.org"]),
    "idn-email": (["joe@example.com", "jos\u00e9@example.com"], ["joe", "joe@", "a b@x.org"], ["a..b@x.org"]),
    "hostname": (["example.com", "a-b.c", "a" * 63 + ".x"], ["-a.com", "a..b", "a_b.com", "a b"], ["a" * 64, "xn--X"]),
    "idn-hostname": (["example.com", "b\u00fccher.de"], ["a b", "-a", "a_b.com"], ["a\u302eb", "xn--X"]),
    "ipv4": (["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "1.2.3.4.5", "a.b.c.d"], ["01.2.3.4"]),
    "ipv6": (
        ["::1", "2001:db8::ff00:42:8329", "::ffff:1.2.3.4"],
        ["12345::", "1::2::3", "g::", "x"],
        ["1:2:3:4:5:6:7"],
    ),
    "uuid": (
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400g", "x"],
        [],
    ),
    "uri": (
        ["https://example.com/a?b=c#d", "urn:a:b"],
        ["example.com", "//x/y", "http://a b", "http://[::1"],
        ["http://a:b"],
    ),
    "uri-reference": (["https://example.com", "/a/b?c", "#d", "a"], ["a b", "\\x"], ["//["]),
    "iri": (
        ["https://example.com", "http://\u00e9.x/\u00fc?\u00fc#\u00fc"],
        ["a b", "//x", "http://a b"],
        ["http://a:b"],
    ),
    "iri-reference": (["/a", "\u00fc", "//\u00fc/x"], ["a b", "\\x"], ["//["]),
    "uri-template": (["/a/{b}", "http://x/{?q}"], ["/a/{b", "{"], ["/a/}"]),
    "json-pointer": (["", "/a/b~0c~1d"], ["a", "/a~2", "/a~"], []),
    "relative-json-pointer": (["0", "1/a/b", "2#"], ["/a", "-1", "01", "x"], []),
    "regex": (["a+"], ["(", ")("], []),
    "a format that does not exist": (["x"], [], []),
}

FORMATS: tuple[Case, ...] = tuple(
    case(
        "format",
        name,
        {"type": "string", "format": "zork" if " " in name else name},
        valid,
        [*invalid, 1],
        beyond,
    )
    for name, (valid, invalid, beyond) in _FORMATS.items()
)
