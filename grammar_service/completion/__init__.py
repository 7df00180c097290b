"""The way to an answer's end: rows near `max_tokens` are narrowed so that the answer still ends in time.

- `texts`: the vocabulary as bytes, in the groups that the search tries;
- `search`: finds tokens that complete an answer from a matcher's state;
- `growth`: how much longer one token can make the way to the end, read from a JSON Schema;
- `plan`: a way to the end and a minimum length, found in a compile worker before the first token;
- `budget`: follows one answer and narrows its rows.

Depends on the matchers of `grammar_service.backends`, on no thread, socket or clock.
"""
