"""The word lists that training prompts are made of: subjects with their fields, and names to fill them with.

Invariant: plain data.
Not responsible for: the prompts made from it (see prompts.py).
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST = _words(
    "Maria Aiko Samuel Priya Liam Olga Noah Fatima Jonas Elena Wei Carlos Amara Hugo Ingrid Tariq Sofia Peter "
    "Nadia Owen Leila Marco Hannah Dmitri Grace Yuki Ahmed Clara Ravi Emma Lucas Zara Felix Mina Oscar Ruth Ivan "
    "Chloe Kofi Julia"
)
LAST = _words(
    "Keller Tanaka Orr Sharma Murphy Petrov Andersen Haddad Weber Rossi Zhang Garcia Okafor Laurent Lind Aziz "
    "Costa Novak Brown Reyes Moretti Cohen Volkov Miller Sato Hassan Fischer Patel Johnson Silva Khan Braun Park "
    "Nilsson Levy Popov"
)
CITIES = _words(
    "Vienna Osaka Lisbon Nairobi Toronto Oslo Madrid Chicago Sydney Prague Cairo Lima Dublin Seoul Hamburg Austin "
    "Bologna Lagos Helsinki Mumbai Geneva Boston Kyoto Porto Denver Athens Warsaw Bogota Leeds Tunis Bergen "
    "Santiago"
)
STREETS = (
    "Main Street",
    "Oak Avenue",
    "Harbour Road",
    "Station Lane",
    "Mill Hill",
    "Elm Drive",
    "King Square",
    "Park Row",
)
ADJECTIVES = _words(
    "quiet northern red annual mobile green central portable modern historic wireless early silver public rapid "
    "gentle solar compact royal coastal hidden organic digital heavy bright local global frozen open narrow"
)
NOUNS = _words(
    "garden harbour engine library festival river lamp bridge market camera forest museum station pump orchestra "
    "kitchen tower valley notebook sensor island studio battery theatre wagon archive mirror tunnel cabin printer"
)
VERBS = (
    "repaired",
    "visited",
    "designed",
    "opened",
    "sold",
    "inspected",
    "photographed",
    "described",
    "found",
    "painted",
)

Fields = tuple[tuple[str, str], ...]


def _fields(text: str) -> Fields:
    pairs = [entry.split("=") for entry in text.split()]
    return tuple((name, kind) for name, kind in pairs)


SUBJECTS: dict[str, Fields] = {
    "person": _fields(
        "name=name age=int city=city occupation=words email=email phone=phone is_member=bool hobbies=list:words "
        "birth_date=date"
    ),
    "invoice": _fields(
        "invoice_number=code customer=name issued_on=date due_date=date total=num currency=enum:EUR|USD|GBP|JPY "
        "paid=bool notes=sentence"
    ),
    "order line": _fields(
        "item=words quantity=int unit_price=num sku=code discount=num in_stock=bool color=enum:red|blue|black|white"
    ),
    "flight": _fields(
        "flight_number=code origin=city destination=city departure_time=time arrival_time=time gate=code "
        "passengers=int status=enum:on_time|delayed|cancelled"
    ),
    "recipe": _fields(
        "title=words servings=int ingredients=list:words steps=list:sentence prep_minutes=int "
        "difficulty=enum:easy|medium|hard vegetarian=bool"
    ),
    "book": _fields(
        "title=words author=name year=int isbn=code genre=enum:novel|poetry|history|science pages=int "
        "publisher=words rating=num"
    ),
    "movie": _fields(
        "title=words director=name release_date=date duration_minutes=int cast=list:name rating=num "
        "language=enum:English|French|Korean"
    ),
    "patient": _fields(
        "patient_id=code full_name=name date_of_birth=date blood_type=enum:A|B|AB|O allergies=list:words "
        "diagnosis=sentence weight_kg=num insured=bool"
    ),
    "appointment": _fields(
        "date=date time=time doctor=name room=code reason=sentence duration_minutes=int confirmed=bool"
    ),
    "vehicle": _fields(
        "make=words model=words year=int vin=code mileage=int fuel_type=enum:petrol|diesel|electric|hybrid "
        "owner=name price=num"
    ),
    "property listing": _fields(
        "address=address bedrooms=int bathrooms=int area_sqm=num price=num furnished=bool agent=name "
        "features=list:words url=url"
    ),
    "job posting": _fields(
        "title=words company=words location=city salary_min=int salary_max=int remote=bool skills=list:words "
        "posted_on=date contact_email=email"
    ),
    "employee": _fields(
        "employee_id=code name=name department=enum:sales|engineering|finance|support manager=name hired_on=date "
        "salary=int skills=list:words active=bool"
    ),
    "weather report": _fields(
        "city=city date=date temperature=num humidity=int wind_speed=num condition=enum:sunny|cloudy|rain|snow "
        "forecast=sentence"
    ),
    "hotel booking": _fields(
        "booking_id=code guest=name check_in=date check_out=date room_type=enum:single|double|suite nights=int "
        "breakfast=bool total_price=num"
    ),
    "event": _fields(
        "title=words venue=words city=city start_time=time date=date organizer=name capacity=int tickets_sold=int "
        "tags=list:words"
    ),
    "song": _fields(
        "title=words artist=name album=words duration_seconds=int genre=enum:rock|jazz|pop|folk explicit=bool "
        "release_year=int"
    ),
    "device": _fields(
        "device_id=code type=enum:sensor|camera|lock|thermostat firmware_version=code battery_level=int "
        "online=bool location=words last_seen=date"
    ),
    "shipment": _fields(
        "tracking_number=code carrier=words origin=address destination=address weight_kg=num shipped_on=date "
        "delivered=bool status=enum:pending|in_transit|delivered"
    ),
    "bank transfer": _fields(
        "transaction_id=code amount=num currency=enum:EUR|USD|GBP sender=name recipient=name executed_on=date "
        "reference=sentence fee=num"
    ),
    "insurance claim": _fields(
        "claim_number=code policy_holder=name incident_date=date description=sentence amount=num "
        "status=enum:open|approved|rejected witnesses=list:name"
    ),
    "bug report": _fields(
        "id=int title=words severity=enum:low|medium|high|critical reporter=name steps_to_reproduce=list:sentence "
        "affected_version=code assigned_to=name open=bool"
    ),
    "server": _fields(
        "hostname=code region=enum:us-east|eu-west|ap-south cpu_cores=int memory_gb=int disk_gb=int public=bool "
        "tags=list:words uptime_days=num"
    ),
    "container": _fields(
        "image=code name=words replicas=int ports=list:int environment=enum:dev|staging|production "
        "restart_policy=enum:Always|OnFailure|Never cpu_limit=num"
    ),
    "course": _fields(
        "course_code=code title=words instructor=name credits=int schedule=list:time room=code enrolled=int "
        "prerequisites=list:code online=bool"
    ),
    "student": _fields(
        "student_id=code name=name major=words gpa=num year=int email=email courses=list:words scholarship=bool"
    ),
    "football match": _fields(
        "home_team=words away_team=words home_score=int away_score=int stadium=words date=date attendance=int "
        "scorers=list:name"
    ),
    "animal": _fields(
        "species=words common_name=words habitat=words weight_kg=num endangered=bool "
        "diet=enum:herbivore|carnivore|omnivore lifespan_years=int"
    ),
    "planet": _fields(
        "name=words radius_km=num moons=int orbital_period_days=num has_rings=bool discovered_by=name "
        "atmosphere=list:words"
    ),
    "experiment": _fields(
        "experiment_id=code hypothesis=sentence researcher=name started_on=date samples=int temperature_c=num "
        "successful=bool findings=list:sentence"
    ),
    "contract": _fields(
        "contract_id=code party_a=name party_b=name effective_date=date term_months=int value=num "
        "clauses=list:sentence signed=bool jurisdiction=city"
    ),
    "restaurant": _fields(
        "name=words cuisine=enum:italian|thai|mexican|indian address=address rating=num price_level=int "
        "opening_time=time closing_time=time specialties=list:words"
    ),
    "review": _fields(
        "product=words reviewer=name stars=int comment=sentence verified=bool date=date helpful_votes=int "
        "pros=list:words cons=list:words"
    ),
    "news article": _fields(
        "headline=sentence author=name published_on=date section=enum:politics|sports|business|culture "
        "summary=sentence keywords=list:words url=url word_count=int"
    ),
    "meeting": _fields(
        "topic=words date=date start_time=time attendees=list:name decisions=list:sentence location=words "
        "duration_minutes=int recurring=bool"
    ),
    "museum exhibit": _fields(
        "title=words artist=name year=int medium=words origin=city on_display=bool insurance_value=num "
        "accession_number=code"
    ),
    "search filter": _fields(
        "query=words category=enum:all|books|music|home min_price=num max_price=num in_stock=bool "
        "sort_by=enum:price|rating|date page=int page_size=int"
    ),
    "function call": _fields(
        "function=words location=city unit=enum:celsius|fahrenheit date=date limit=int verbose=bool "
        "recipients=list:email query=sentence"
    ),
    "address": _fields("street=address city=city postal_code=code country=words latitude=num longitude=num"),
    "subscription": _fields(
        "plan=enum:free|basic|premium user_email=email started_on=date renews_on=date price=num auto_renew=bool "
        "seats=int coupon_code=code"
    ),
}
"""Subject -> (field, kind) pairs; kinds are those of `prompts._leaf`."""
