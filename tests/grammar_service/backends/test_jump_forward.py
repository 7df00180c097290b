"""Jump-forward tokens after a token that ends within a character."""

from __future__ import annotations

from grammar_service.grammar.value import Kind
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import spell


def test_the_rest_of_a_character_is_no_error(library: Library) -> None:
    tokens = spell("a\u2581b")
    matcher = library.compiled(Kind.REGEX, "a\u2581b|c").matcher()
    for at in range(len(tokens)):
        forced = matcher.jump_forward_tokens(9)
        assert list(forced) == tokens[at : at + len(forced)], at
        assert matcher.accept(tokens[at])
