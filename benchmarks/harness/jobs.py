"""The workload `repeated`: jobs and agents that send many requests under few schemas.

Three kinds of request: a support desk that sorts messages, a shop that reads orders, and an agent that calls one of
three tools. Names, places and numbers are drawn from short lists with a fixed seed, as those of one customer repeat.
Invariant: equal arguments give equal jobs on any machine; every fact sheet satisfies its schema, and every leaf of it
that is not a choice among an enum's values is in the text. Not responsible for: prompts (see workloads.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.domains import BOOL, DATE, INT, NUM, TIME, Json, array, enum, obj, text

_SEED = 20261122


@dataclass(frozen=True, slots=True)
class Job:
    """One request: the schema, the task in words, and the facts of the answer."""

    name: str
    schema: Json
    task: str
    facts: Json


# Tables, laid out to be read as tables.
# fmt: off
_PEOPLE = ("Maria Keller", "Aiko Tanaka", "Omar Haddad", "Lena Fischer", "Paul Duval", "Grace Mensah", "Ivo Horvat",
           "Nadia Petrova", "Ben Carter", "Amina Diallo")
_CITIES = (("Vienna", "Austria"), ("Osaka", "Japan"), ("Lyon", "France"), ("Oslo", "Norway"), ("Porto", "Portugal"),
           ("Leeds", "England"))
_ITEMS = (("desk lamp", 29.5), ("office chair", 149.0), ("ceramic tile", 3.25), ("steel kettle", 42.5),
          ("wool blanket", 64.0), ("garden hose", 18.75))
_PRODUCTS = ("mobile app", "web shop", "payment gateway", "user profile", "newsletter")
_PROBLEMS = (
    ("billing", "high", "I was charged twice for my last order"),
    ("login", "high", "the password reset mail never arrives"),
    ("delivery", "medium", "my parcel has been on its way for two weeks"),
    ("login", "medium", "I am signed out every few minutes"),
    ("feedback", "low", "the new colours are hard to read"),
    ("billing", "low", "I need a copy of my invoice from March"),
)
_TITLES = ("planning meeting", "design review", "budget talk", "team lunch")

_TICKET = obj({"category": enum("billing", "login", "delivery", "feedback"), "priority": enum("low", "medium", "high"),
 "product": text(), "customer": text(), "needs_reply": BOOL, "summary": text(80)})
_ORDER = obj({"order_id": text(20), "customer": text(), "currency": enum("EUR", "USD", "GBP"), "shipping":
 obj({"city": text(), "country": text(), "method": enum("standard", "express", "pickup")}),
 "lines": array(obj({"item": text(), "quantity": INT, "unit_price": NUM}), 3)})


def _tool(name: str, arguments: Json) -> Json:
    return obj({"tool": {"const": name}, "arguments": obj(arguments)})


_CALL: Json = {"anyOf": [
    _tool("search_flights", {"origin": text(), "destination": text(), "departure_date": DATE,
     "cabin_class": enum("economy", "business", "first"), "passengers": INT}),
    _tool("get_weather_forecast", {"city": text(), "country": text(), "days": INT,
     "unit": enum("celsius", "fahrenheit")}),
    _tool("create_calendar_event", {"title": text(), "date": DATE, "start_time": TIME, "attendees": array(text(), 3)}),
]}
# fmt: on


def _ticket(draw: random.Random) -> tuple[Json, str, Json]:
    category, priority, problem = draw.choice(_PROBLEMS)
    customer, product, reply = draw.choice(_PEOPLE), draw.choice(_PRODUCTS), draw.random() < 0.5
    wish = "Please write back to me." if reply else "No reply is needed."
    task = (
        f"Sort this message of the support desk as JSON.\n\nMessage from {customer} about the {product}: "
        f"Hello, {problem}. {wish} ({category}, priority {priority})"
    )
    facts = {"category": category, "priority": priority, "product": product, "customer": customer}
    return _TICKET, task, {**facts, "needs_reply": reply, "summary": problem}


def _order(draw: random.Random) -> tuple[Json, str, Json]:
    (city, country), customer = draw.choice(_CITIES), draw.choice(_PEOPLE)
    currency, method = draw.choice(("EUR", "USD", "GBP")), draw.choice(("standard", "express", "pickup"))
    order_id = f"ORD-{draw.randrange(1000, 9999)}"
    lines = [
        {"item": item, "quantity": draw.randint(1, 20), "unit_price": price}
        for item, price in draw.sample(_ITEMS, draw.randint(1, 3))
    ]
    listed = ", ".join(f"{line['quantity']} x {line['item']} at {line['unit_price']}" for line in lines)
    task = (
        f"Read this order as JSON.\n\nOrder {order_id} of {customer}: {listed}. All prices in {currency}. "
        f"Ship to {city}, {country}, by {method} delivery."
    )
    shipping = {"city": city, "country": country, "method": method}
    return (
        _ORDER,
        task,
        {"order_id": order_id, "customer": customer, "currency": currency, "shipping": shipping, "lines": lines},
    )


def _call(draw: random.Random) -> tuple[Json, str, Json]:
    kind, day = draw.randrange(3), f"2026-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
    (city, country), (other, _) = draw.sample(_CITIES, 2)
    if kind == 0:
        cabin, seats = draw.choice(("economy", "business", "first")), draw.randint(1, 4)
        wish = f"Find {cabin} class flights from {city} to {other} on {day} for {seats} passengers."
        name = "search_flights"
        arguments: Json = {"origin": city, "destination": other, "departure_date": day, "cabin_class": cabin}
        arguments["passengers"] = seats
    elif kind == 1:
        days, unit = draw.randint(1, 7), draw.choice(("celsius", "fahrenheit"))
        wish = f"What will the weather in {city}, {country}, be in the next {days} days? In {unit}, please."
        name, arguments = "get_weather_forecast", {"city": city, "country": country, "days": days, "unit": unit}
    else:
        title, start = draw.choice(_TITLES), f"{draw.randint(8, 18):02}:{draw.choice(('00', '30'))}"
        people = draw.sample(_PEOPLE, draw.randint(1, 3))
        wish = f"Put a {title} into my calendar on {day} at {start}, with {', '.join(people)}."
        name = "create_calendar_event"
        arguments = {"title": title, "date": day, "start_time": start, "attendees": people}
    return _CALL, f"Call the right tool for this request.\n\nRequest: {wish}", {"tool": name, "arguments": arguments}


_KINDS: tuple[tuple[str, Callable[[random.Random], tuple[Json, str, Json]]], ...] = (
    ("ticket", _ticket),
    ("order", _order),
    ("call", _call),
)


def repeated_jobs(count: int) -> list[Job]:
    """Return `count` jobs, the three kinds in turn. The first jobs do not depend on `count`."""
    draw = random.Random(_SEED)
    jobs = []
    for number in range(count):
        name, make = _KINDS[number % len(_KINDS)]
        schema, task, facts = make(draw)
        jobs.append(Job(f"{name}-{number // len(_KINDS)}", schema, task, facts))
    return jobs
