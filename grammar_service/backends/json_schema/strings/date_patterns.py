"""Patterns that say exactly what the formats `date`, `time` and `date-time` allow (RFC 3339, section 5.6).

The libraries' own formats accept 29 February in every year, and a leap second in every minute. RFC 3339 allows the
second 60 only in the minute that is 23:59 in UTC, so a leap second's hour and minute depend on its offset.
Invariant: a pattern describes the whole string, in notation that every library reads alike. Every year from 0000 to
9999 follows the Gregorian calendar. A leap second is accepted with offsets of whole hours and of 30 or 45 minutes
past the hour, which covers the time zones in use; with other offsets it is rejected, which is stricter than RFC 3339.
Not responsible for: which days had a leap second, since future ones are unknown.
"""

from __future__ import annotations

from collections import defaultdict

FORMATS = ("date", "time", "date-time")

_LEAP_YEAR = "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
_FRACTION = "(?:[.][0-9]+)?"
_DAY = 24 * 60
"""Minutes of a day."""
_OFFSET_MINUTES = (0, 30, 45)
"""Minutes past the hour of the offsets with which a leap second is accepted."""


def exact_pattern(name: str, *, lower_case: bool) -> str:
    """Return the pattern of one of FORMATS. `lower_case`: whether `t` and `z` are accepted next to `T` and `Z`."""
    time = _time("[Zz]" if lower_case else "Z")
    pattern = {"date": _DATE, "time": time, "date-time": f"{_DATE}{'[Tt]' if lower_case else 'T'}{time}"}[name]
    return f"^{pattern}$"


def _time(utc: str) -> str:
    plain = f"{_HOUR}:[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:{utc}|[+\\u002d]{_HOUR}:[0-5][0-9])"
    # Hour -> minute -> the offsets with which this is 23:59 in UTC.
    offsets: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    offsets[23][59].append(utc)
    for hour in range(24):
        for minute in _OFFSET_MINUTES:
            offset = 60 * hour + minute
            for sign, local in (("[+]", offset - 1), ("-", -offset - 1)):
                at = local % _DAY
                offsets[at // 60][at % 60].append(f"{sign}{hour:02}:{minute:02}")
    hours = [
        f"{hour:02}:(?:" + "|".join(f"{m:02}:60{_FRACTION}(?:{'|'.join(minutes[m])})" for m in sorted(minutes)) + ")"
        for hour, minutes in sorted(offsets.items())
    ]
    return f"(?:{'|'.join([plain, *hours])})"
