"""The subjects of the guided workloads: for each a text, a JSON Schema, and the facts that connect the two.

Invariant: every leaf of a fact sheet appears in the text made from it, and the fact sheet satisfies the schema.
Not responsible for: prompts and token budgets (see workloads.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


def obj(properties: Json) -> Json:
    """A closed object schema in which every property is required."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def array(items: Json, most: int) -> Json:
    """An array schema of 1 to `most` items."""
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def enum(*values: str) -> Json:
    """A string schema that allows only `values`."""
    return {"type": "string", "enum": list(values)}


def text(most: int = 60) -> Json:
    """A string schema of at most `most` characters."""
    return {"type": "string", "maxLength": most}


INT: Json = {"type": "integer"}
NUM: Json = {"type": "number"}
BOOL: Json = {"type": "boolean"}
DATE: Json = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}
TIME: Json = {"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"}


@dataclass(frozen=True, slots=True)
class Domain:
    """One subject: a schema, a template for the text, and the fact sheets that fill it."""

    name: str
    schema: Json
    tell: Callable[[Json], str]
    """Makes the text from one fact sheet."""
    facts: tuple[Json, ...]


def _join(values: list[str]) -> str:
    return ", ".join(values[:-1]) + " and " + values[-1] if len(values) > 1 else values[0]


# Tables, laid out to be read as tables.
# fmt: off
EXTRACTION: tuple[Domain, ...] = (
    Domain(
        "person",
        obj({"name": text(), "age": INT, "city": text(), "occupation": text(), "hobbies": array(text(), 4)}),
        lambda f: (
            f"{f['name']} is {f['age']} years old and lives in {f['city']}, where she works as a {f['occupation']}. "
            f"In her free time she enjoys {_join(f['hobbies'])}."
        ),
        (
            {"name": "Maria Keller", "age": 34, "city": "Vienna", "occupation": "civil engineer",
             "hobbies": ["rowing", "chess", "baking"]},
            {"name": "Aiko Tanaka", "age": 58, "city": "Osaka", "occupation": "violin teacher",
             "hobbies": ["gardening", "calligraphy"]},
        ),
    ),
    Domain(
        "invoice",
        obj({"invoice_number": text(30), "customer": text(), "date": DATE, "currency": enum("EUR", "USD", "GBP"),
         "lines": array(obj({"item": text(), "quantity": INT, "unit_price": NUM}), 3)}),
        lambda f: (
            f"Invoice {f['invoice_number']}, issued on {f['date']} to {f['customer']}. All prices in {f['currency']}. "
            + " ".join(f"{x['quantity']} x {x['item']} at {x['unit_price']} each." for x in f["lines"])
        ),
        (
            {"invoice_number": "INV-2041", "customer": "Brightwater Ltd", "date": "2025-03-14", "currency": "GBP",
             "lines": [{"item": "desk lamp", "quantity": 4, "unit_price": 29.5}, {"item": "office chair",
             "quantity": 2, "unit_price": 149}]},
            {"invoice_number": "R-77810", "customer": "Casa Moreno", "date": "2024-11-02", "currency": "EUR",
             "lines": [{"item": "ceramic tile", "quantity": 120, "unit_price": 3.25}]},
        ),
    ),
    Domain(
        "event",
        obj({"title": text(), "date": DATE, "start": TIME, "venue": text(), "speakers": array(text(), 4)}),
        lambda f: (
            f"Save the date! {f['title']} takes place on {f['date']} at {f['start']} in the {f['venue']}. "
            f"Our speakers are {_join(f['speakers'])}. Entry is free."
        ),
        (
            {"title": "Autumn Robotics Meetup", "date": "2026-10-08", "start": "18:30", "venue": "Harbour Hall",
             "speakers": ["Lena Fischer", "Omar Haddad"]},
            {"title": "Night of Open Libraries", "date": "2026-05-21", "start": "20:00", "venue": "City Archive",
             "speakers": ["Paul Duval", "Grace Mensah", "Ivo Horvat"]},
        ),
    ),
    Domain(
        "product",
        obj({"name": text(), "brand": text(), "price": NUM, "in_stock": BOOL, "colours": array(text(20), 5)}),
        lambda f: (
            f"The {f['name']} by {f['brand']} costs {f['price']} dollars and comes in {_join(f['colours'])}. "
            f"Currently in stock: {str(f['in_stock']).lower()}."
        ),
        (
            {"name": "TrailLite backpack", "brand": "Norvik", "price": 89.95, "in_stock": True, "colours": ["green",
             "black", "orange"]},
            {"name": "Pico kettle", "brand": "Hearthway", "price": 42.5, "in_stock": False, "colours": ["white",
             "red"]},
        ),
    ),
    Domain(
        "flight",
        obj({"flight_number": text(10), "origin": text(), "destination": text(), "departure": TIME, "arrival": TIME,
         "gate": text(8), "stops": INT}),
        lambda f: (
            f"Flight {f['flight_number']} from {f['origin']} to {f['destination']} leaves at {f['departure']} from "
            f"gate {f['gate']} and lands at {f['arrival']} with {f['stops']} stops."
        ),
        (
            {"flight_number": "LX318", "origin": "Zurich", "destination": "London", "departure": "07:10",
             "arrival": "08:00", "gate": "B22", "stops": 0},
            {"flight_number": "QF9", "origin": "Melbourne", "destination": "Paris", "departure": "16:45",
             "arrival": "06:05", "gate": "7", "stops": 1},
        ),
    ),
    Domain(
        "weather",
        obj({"location": text(), "temperature_celsius": NUM, "humidity_percent": INT, "wind_kmh": INT,
         "condition": enum("sunny", "cloudy", "rain", "snow")}),
        lambda f: (
            f"Weather report for {f['location']}: {f['condition']} with {f['temperature_celsius']} degrees Celsius, "
            f"{f['humidity_percent']} percent humidity and wind of {f['wind_kmh']} km/h."
        ),
        (
            {"location": "Reykjavik", "temperature_celsius": -3.5, "humidity_percent": 81, "wind_kmh": 42,
             "condition": "snow"},
            {"location": "Seville", "temperature_celsius": 36, "humidity_percent": 24, "wind_kmh": 9,
             "condition": "sunny"},
        ),
    ),
    Domain(
        "recipe",
        obj({"dish": text(), "servings": INT, "minutes": INT, "ingredients": array(obj({"name": text(30),
         "amount": text(20)}), 5)}),
        lambda f: (
            f"{f['dish']} serves {f['servings']} and is ready in {f['minutes']} minutes. You need "
            + _join([f"{x['amount']} of {x['name']}" for x in f["ingredients"]]) + "."
        ),
        (
            {"dish": "Lentil soup", "servings": 4, "minutes": 45, "ingredients": [{"name": "red lentils",
             "amount": "250 g"}, {"name": "carrots", "amount": "300 g"}, {"name": "vegetable stock",
             "amount": "1 l"}]},
            {"dish": "Banana bread", "servings": 10, "minutes": 70, "ingredients": [{"name": "flour",
             "amount": "220 g"}, {"name": "sugar", "amount": "90 g"}]},
        ),
    ),
    Domain(
        "job",
        obj({"title": text(), "company": text(), "location": text(), "salary": obj({"min": INT, "max": INT}),
         "remote": BOOL, "skills": array(text(30), 5)}),
        lambda f: (
            f"{f['company']} is looking for a {f['title']} in {f['location']}. We pay between {f['salary']['min']} and "
            f"{f['salary']['max']} euros a year. Remote work possible: {str(f['remote']).lower()}. "
            f"You know {_join(f['skills'])}."
        ),
        (
            {"title": "data analyst", "company": "Solveig Energy", "location": "Oslo", "salary": {"min": 52000,
             "max": 64000}, "remote": True, "skills": ["SQL", "Python", "statistics"]},
            {"title": "pastry chef", "company": "Maison Lune", "location": "Lyon", "salary": {"min": 31000,
             "max": 38000}, "remote": False, "skills": ["chocolate work", "team leadership"]},
        ),
    ),
    Domain(
        "book",
        obj({"title": text(), "author": obj({"first_name": text(30), "last_name": text(30)}), "year": INT,
         "pages": INT, "genre": enum("novel", "poetry", "essay", "biography")}),
        lambda f: (
            f'"{f["title"]}" is a {f["genre"]} by {f["author"]["first_name"]} {f["author"]["last_name"]}, first '
            f"published in {f['year']}. The current edition has {f['pages']} pages."
        ),
        (
            {"title": "The Salt Road", "author": {"first_name": "Helena", "last_name": "Brandt"}, "year": 1987,
             "pages": 412, "genre": "novel"},
            {"title": "Small Hours", "author": {"first_name": "Tomas", "last_name": "Reyes"}, "year": 2015,
             "pages": 96, "genre": "poetry"},
        ),
    ),
    Domain(
        "ticket",
        obj({"ticket_id": INT, "reporter": text(), "priority": enum("low", "medium", "high"), "component": text(),
         "summary": text(80)}),
        lambda f: (
            f"Ticket {f['ticket_id']} was opened by {f['reporter']}. Component: {f['component']}. Priority: "
            f"{f['priority']}. Summary: {f['summary']}."
        ),
        (
            {"ticket_id": 48213, "reporter": "Nadia Petrova", "priority": "high", "component": "payment gateway",
             "summary": "card payments time out after thirty seconds"},
            {"ticket_id": 951, "reporter": "Ben Carter", "priority": "low", "component": "user profile",
             "summary": "avatar is shown upside down on tablets"},
        ),
    ),
    Domain(
        "patient",
        obj({"patient": text(), "birth_date": DATE, "blood_pressure": obj({"systolic": INT, "diastolic": INT}),
         "pulse": INT, "medication": array(text(30), 4)}),
        lambda f: (
            f"Patient {f['patient']}, born {f['birth_date']}, came in for a check. Blood pressure "
            f"{f['blood_pressure']['systolic']} over {f['blood_pressure']['diastolic']}, pulse {f['pulse']}. Takes "
            f"{_join(f['medication'])}."
        ),
        (
            {"patient": "George Lindqvist", "birth_date": "1951-07-30", "blood_pressure": {"systolic": 142,
             "diastolic": 88}, "pulse": 74, "medication": ["ramipril", "aspirin"]},
            {"patient": "Amina Diallo", "birth_date": "1990-12-05", "blood_pressure": {"systolic": 118,
             "diastolic": 76}, "pulse": 62, "medication": ["vitamin D"]},
        ),
    ),
    Domain(
        "match",
        obj({"home": text(), "away": text(), "home_goals": INT, "away_goals": INT, "stadium": text(),
         "attendance": INT, "scorers": array(text(30), 4)}),
        lambda f: (
            f"{f['home']} beat {f['away']} {f['home_goals']} to {f['away_goals']} in front of {f['attendance']} fans "
            f"at {f['stadium']}. The goals came from {_join(f['scorers'])}."
        ),
        (
            {"home": "Rovers", "away": "United", "home_goals": 2, "away_goals": 1, "stadium": "Mill Lane",
             "attendance": 18450, "scorers": ["Adeyemi", "Clarke", "Novak"]},
            {"home": "Sporting", "away": "Athletic", "home_goals": 1, "away_goals": 0, "stadium": "Estadio Sur",
             "attendance": 30212, "scorers": ["Vidal"]},
        ),
    ),
)

INVENTION: tuple[tuple[str, Json, tuple[str, ...]], ...] = (
    ("character", obj({"name": text(30), "species": text(20), "level": {"type": "integer", "minimum": 1,
     "maximum": 99}, "class": enum("warrior", "mage", "ranger", "healer"), "backstory": text(120)}),
     ("a hero of a fantasy game", "a villain of a space opera")),
    ("config", obj({"host": text(40), "port": {"type": "integer", "minimum": 1, "maximum": 65535}, "tls": BOOL,
     "log_level": enum("debug", "info", "warning", "error"), "limits": obj({"max_connections": INT,
     "timeout_seconds": NUM})}), ("the settings of a mail server", "the settings of a small web cache")),
    ("quiz", obj({"question": text(100), "options": {"type": "array", "items": text(30), "minItems": 3,
     "maxItems": 3}, "answer_index": {"type": "integer", "minimum": 0, "maximum": 2}}),
     ("a quiz question about the sea", "a quiz question about music")),
    ("shape", {"type": "object", "properties": {"shapes": array({"anyOf": [obj({"kind": {"const": "circle"},
     "radius": NUM}), obj({"kind": {"const": "rectangle"}, "width": NUM, "height": NUM})]}, 3)},
     "required": ["shapes"], "additionalProperties": False}, ("the shapes of a simple house",
     "the shapes of a traffic light")),
    ("travel", obj({"country": text(30), "days": {"type": "integer", "minimum": 1, "maximum": 14},
     "stops": array(obj({"city": text(25), "nights": INT, "activity": text(60)}), 3)}), ("a short trip to Italy",
     "a winter trip to Japan")),
    ("review", obj({"title": text(50), "rating": {"type": "integer", "minimum": 1, "maximum": 5},
     "pros": array(text(40), 2), "cons": array(text(40), 2), "recommend": BOOL}), ("a review of a phone",
     "a review of a restaurant")),
    ("tree", {"$defs": {"node": {"type": "object", "properties": {"name": text(20), "children": {"type": "array",
     "items": {"$ref": "#/$defs/node"}, "maxItems": 2}}, "required": ["name"], "additionalProperties": False}},
     "$ref": "#/$defs/node"}, ("the folders of a photo archive", "the departments of a school")),
    ("alert", obj({"id": {"type": "string", "pattern": "^ALT-[0-9]{4}$"}, "severity": enum("info", "warning",
     "critical"), "source": text(30), "message": text(80), "tags": array(text(15), 3)}), ("an alert of a power plant",
     "an alert of a bakery's oven")),
)
"""(name, schema, subjects): what the `schema` workload asks the model to invent."""
# fmt: on
