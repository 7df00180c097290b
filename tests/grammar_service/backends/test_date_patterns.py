"""The exact patterns of dates and times, compared with Python's calendar and clock."""

from __future__ import annotations

import calendar
import re
from datetime import UTC, datetime, timedelta, timezone

import pytest

from grammar_service.backends.json_schema.strings.date_patterns import exact_pattern


def pattern_of(name: str, *, lower_case: bool = False) -> re.Pattern[str]:
    return re.compile(exact_pattern(name, lower_case=lower_case).replace("$", r"\Z"))


@pytest.mark.parametrize("year", [0, 1, 4, 100, 400, 1900, 1999, 2000, 2020, 2021, 2023, 2024, 2100, 2400, 9996, 9999])
def test_a_date_is_accepted_exactly_when_the_day_exists(year: int) -> None:
    date = pattern_of("date")
    for month in range(14):
        # Python's calendar begins with the year 1; the years 0 and 400 are alike.
        days = calendar.monthrange(year or 400, month)[1] if 1 <= month <= 12 else 0
        for day in range(34):
            text = f"{year:04}-{month:02}-{day:02}"
            assert bool(date.search(text)) is (1 <= day <= days), text


def test_every_leap_year_has_a_29_february_and_no_other_year_has() -> None:
    date = pattern_of("date")
    assert [
        year for year in range(1, 10_000) if bool(date.search(f"{year:04}-02-29")) is not calendar.isleap(year)
    ] == []


@pytest.mark.parametrize("name", ["time", "date-time"])
def test_a_leap_second_is_accepted_only_in_the_last_minute_of_a_utc_day(name: str) -> None:
    pattern, prefix = pattern_of(name), "2016-12-31T" if name == "date-time" else ""
    for offset in range(-23 * 60 - 45, 24 * 60, 15):
        zone = timezone(timedelta(minutes=offset))
        sign, (hours, minutes) = "-" if offset < 0 else "+", divmod(abs(offset), 60)
        right = datetime(2016, 12, 31, 23, 59, tzinfo=UTC).astimezone(zone)
        for shift in (-60, -1, 0, 1, 60):
            local = right + timedelta(minutes=shift)
            text = f"{prefix}{local:%H:%M}:60{sign}{hours:02}:{minutes:02}"
            assert bool(pattern.search(text)) is (shift == 0 and minutes != 15), text
    assert pattern.search(prefix + "23:59:60.5Z")
    assert not pattern.search(prefix + "23:58:60Z")


@pytest.mark.parametrize("text", ["12:30:00z", "23:59:60z"])
def test_lower_case_letters_are_optional(text: str) -> None:
    assert pattern_of("time", lower_case=True).search(text)
    assert not pattern_of("time").search(text)
    assert pattern_of("date-time", lower_case=True).search("2016-12-31t" + text)


@pytest.mark.parametrize("text", ["12:30:00", "12:30Z", "24:00:00Z", "12:60:00Z", "12:30:61Z", "12:30:00+24:00", "x"])
def test_texts_of_another_form_are_not_times(text: str) -> None:
    assert not pattern_of("time").search(text)
    assert not pattern_of("date-time").search("2016-12-31T" + text)
