"""Stop strings are found at the token that completes them, as in the whole text."""

import pytest

from conveyor.data.stop_strings import StopSearch
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def first_end(ids: list[int], stop: list[str]) -> int | None:
    search = StopSearch(decode, stop)
    return next((place for place, token in enumerate(ids) if search.ends(token)), None)


@pytest.mark.parametrize("text", ["a stop here", "no end", "ststop", "sto p", "übergroße §§ stop ©", "xENDstop", "…"])
def test_the_same_place_as_in_the_whole_text(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    wholes = [decode(ids[: end + 1]) for end in range(len(ids))]
    right = next((place for place, whole in enumerate(wholes) if "stop" in whole or "END" in whole or "§" in whole or "…" in whole), None)
    assert first_end(ids, ["stop", "END", "§", "…"]) == right


def test_a_character_of_several_tokens_counts_when_it_is_whole() -> None:
    ids = TOKENIZER("a§b", add_special_tokens=False).input_ids
    assert len(ids) == 4 and first_end(ids, ["§"]) == 2


def test_special_tokens_have_no_text() -> None:
    assert (
        first_end([*TOKENIZER("st", add_special_tokens=False).input_ids, 3, *TOKENIZER("op", add_special_tokens=False).input_ids], ["stop"])
        == 4
    )
    assert first_end([1, 2], ["</s>"]) is None


def test_only_a_window_is_decoded() -> None:
    longest = 0

    def counted(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    search = StopSearch(counted, ["zz"])
    assert not any(search.ends(token) for token in TOKENIZER("ab" * 300, add_special_tokens=False).input_ids)
    assert longest <= 3
