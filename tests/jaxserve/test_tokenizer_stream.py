"""Streams of ids against whole decoding, and stop strings against a search of the whole text."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.tokenizer import StreamDecoder, Tokenizer, TokenizerError, completion_text
from tests.byte_tokenizer import ByteTokenizer
from tests.tokenizer_cases import TEXTS, Case, build_case, case_names

BYTES = ByteTokenizer()


@pytest.fixture(scope="module", params=case_names())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return build_case(request.param, tmp_path_factory.mktemp("tokenizer"))


def assert_stream_is_exact(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> None:
    """Check that after every id the stream has all text but an unfinished last character.

    ED A0 counts as unfinished, though it can only begin a surrogate, and becomes two U+FFFD.
    """
    stream = StreamDecoder(tokenizer, prompt)
    whole = completion_text(tokenizer, prompt, ids)
    text = ""
    for count, token_id in enumerate(ids, start=1):
        text += stream.push([token_id])
        assert whole.startswith(text)
        assert completion_text(tokenizer, prompt, ids[:count])[len(text) :] in (
            "",
            "\ufffd",
            "\ufffd\ufffd",
        )
    assert text + stream.finish() == whole


def pushed(stream: StreamDecoder, ids: Sequence[int], seed: int) -> str:
    """Return the text of ids pushed in lots of random size, including 0."""
    sizes = random.Random(seed)
    text = ""
    start = 0
    while start < len(ids):
        end = start + sizes.randrange(4)
        text = text + stream.push(ids[start:end])
        start = end
    return text + stream.finish()


def cut_by_reading(text: str, stop: Sequence[str], include_stop: bool) -> tuple[str, str | None]:
    """Return the text up to the first character that completes a stop string, by a plain search."""
    for end in range(1, len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            longest = max(found, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("text", TEXTS)
def test_stream_of_a_text_cut_into_prompt_and_completion(case: Case, text: str) -> None:
    ids = case.tokenizer.encode(text)
    for cut in range(0, len(ids) + 1, 1 + len(ids) // 12):
        assert_stream_is_exact(case.tokenizer, ids[:cut], ids[cut:])


@pytest.mark.parametrize("text", TEXTS)
def test_stream_that_ends_inside_a_character(case: Case, text: str) -> None:
    ids = case.tokenizer.encode(text)
    for end in range(0, len(ids), 1 + len(ids) // 12):
        stream = StreamDecoder(case.tokenizer)
        assert stream.push(ids[:end]) + stream.finish() == case.tokenizer.decode(ids[:end])


@settings(max_examples=25)
@given(data=st.data())
def test_stream_of_random_ids(case: Case, data: st.DataObject) -> None:
    size = case.tokenizer.vocab_size
    token_ids = st.lists(st.integers(0, min(size, 300) - 1) | st.integers(0, size + 2), max_size=12)
    assert_stream_is_exact(case.tokenizer, data.draw(token_ids), data.draw(token_ids))


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from([0x61, 0xA0, 0x80, 0xBF, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xFF, 256]),
        max_size=12,
    )
)
def test_stream_of_ill_formed_bytes(ids: list[int]) -> None:
    assert_stream_is_exact(BYTES, [], ids)
    assert completion_text(BYTES, [], ids) == BYTES.decode(ids)


def test_completion_continues_the_text_of_the_prompt(case: Case) -> None:
    ids = case.tokenizer.encode("the fox and the dog")
    for cut in range(len(ids) + 1):
        prompt = case.tokenizer.decode(ids[:cut])
        assert prompt + completion_text(
            case.tokenizer, ids[:cut], ids[cut:]
        ) == case.tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["sp-first-space", "sp-every-space", "json-byte-fallback"])
def test_first_word_keeps_its_space_only_after_text(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = build_case(name, tmp_path_factory.mktemp("tokenizer")).tokenizer
    word = next(
        index for index in range(tokenizer.vocab_size) if tokenizer.token_text(index) == " the"
    )
    assert tokenizer.decode([word, word]) == "the the"
    assert StreamDecoder(tokenizer, [1, 1]).push([2, word, 2, word]) == "the the"
    assert StreamDecoder(tokenizer, [1, word]).push([word, word]) == " the the"


def test_unfinished_character_of_the_prompt_belongs_to_the_completion() -> None:
    ids = BYTES.encode("a😀b")
    stream = StreamDecoder(BYTES, ids[:4])
    assert [stream.push([token_id]) for token_id in ids[4:]] == ["", "😀", "b"]


def test_bytes_that_never_complete_come_out() -> None:
    stream = StreamDecoder(BYTES)
    assert [stream.push([byte]) for byte in (0xFF, 0xF0, 0x9F, 0xFF, 0x61)] == [
        "\ufffd",
        "",
        "",
        "\ufffd\ufffd",
        "a",
    ]
    assert stream.push([0xE2, 0x82]) == ""
    assert (stream.finish(), stream.finish()) == ("\ufffd", "")


@settings(max_examples=400)
@given(
    text=st.text("abé", max_size=20),
    stop=st.lists(st.text("abé", min_size=1, max_size=5), max_size=4),
    include_stop=st.booleans(),
    seed=st.integers(0, 999),
)
@example(
    text="aabaaabaaac", stop=["aabaaac"], include_stop=False, seed=0
)  # falls back to a border of a border
def test_stop_strings_against_reading_the_whole_text(
    text: str, stop: list[str], include_stop: bool, seed: int
) -> None:
    ids = BYTES.encode(text)
    stream = StreamDecoder(BYTES, stop=stop, include_stop=include_stop)
    expected, found = cut_by_reading(text, stop, include_stop)
    assert pushed(stream, ids, seed) == expected
    assert stream.stopped == found
    needed = [
        count
        for count in range(len(ids) + 1)
        if any(word in BYTES.decode(ids[:count]) for word in stop)
    ]
    assert stream.stop_token_count == (needed[0] if needed else None)


@pytest.mark.parametrize("stop", ["fox and", "\n\n", "é, c", "👩‍👧", "本語", "d!"])
def test_stop_strings_across_token_borders(case: Case, stop: str) -> None:
    for text in TEXTS:
        ids = case.tokenizer.encode(text)
        expected, found = cut_by_reading(case.tokenizer.decode(ids), [stop], include_stop=False)
        stream = StreamDecoder(case.tokenizer, stop=[stop])
        assert "".join(stream.push([token_id]) for token_id in ids) + stream.finish() == expected
        assert stream.stopped == found
        if stream.stop_token_count is not None:
            assert stop in case.tokenizer.decode(ids[: stream.stop_token_count])
            assert stop not in case.tokenizer.decode(ids[: stream.stop_token_count - 1])


def test_text_that_may_begin_a_stop_string_is_held_until_decided() -> None:
    stream = StreamDecoder(BYTES, stop=["abab!", "bac"])
    assert [stream.push([ord(letter)]) for letter in "xababa"] == ["x", "", "", "", "", "ab"]
    assert [stream.push([ord(letter)]) for letter in "bd"] == ["", "ababd"]
    assert stream.push(b"aba") == ""
    assert (stream.finish(), stream.stopped, stream.stop_token_count) == ("aba", None, None)


def test_the_stop_string_completed_first_wins_and_the_longest_of_several() -> None:
    stream = StreamDecoder(BYTES, stop=["abcd", "bc"])
    assert (stream.push(b"abcd"), stream.stopped, stream.stop_token_count) == ("a", "bc", 3)
    stream = StreamDecoder(BYTES, stop=["bc", "abc"])
    assert (stream.push(b"xabc"), stream.stopped) == ("x", "abc")


def test_nothing_comes_after_a_stop_string() -> None:
    stream = StreamDecoder(BYTES, stop=["."], include_stop=True)
    assert stream.push(b"one. two") == "one."
    assert (stream.push(b" three. "), stream.finish()) == ("", "")
    assert (stream.stopped, stream.stop_token_count) == (".", 4)


class WideTokenizer(ByteTokenizer):
    """A tokenizer with one more token: the end of a sentence, a word and half of a character."""

    WIDE = 300

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        return (
            (b". And\xc3", False)
            if token_id == self.WIDE
            else super().token_bytes(token_id, opening)
        )


@pytest.mark.parametrize(("include_stop", "expected"), [(False, "end"), (True, "end.")])
def test_the_rest_of_the_token_that_stops_is_dropped(include_stop: bool, expected: str) -> None:
    stream = StreamDecoder(WideTokenizer(), stop=["."], include_stop=include_stop)
    assert stream.push([*b"end", WideTokenizer.WIDE, 0xA9]) + stream.finish() == expected
    assert stream.stop_token_count == 4


def test_stop_string_completed_by_the_end() -> None:
    stream = StreamDecoder(BYTES, stop=["\ufffd"])
    assert stream.push([0x61, 0xC3]) == "a"
    assert (stream.finish(), stream.stopped, stream.stop_token_count) == ("", "\ufffd", 2)


def test_stop_string_is_not_found_in_the_prompt() -> None:
    stream = StreamDecoder(BYTES, prompt_ids=b"a stop", stop=["stop", "ps"])
    assert (stream.push(b"s here") + stream.finish(), stream.stopped) == ("s here", None)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(TokenizerError, match="a stop string is empty; remove it"):
        StreamDecoder(BYTES, stop=["a", ""])


class CountingTokenizer(ByteTokenizer):
    """A tokenizer that counts the tokens it is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        self.asked += 1
        return super().token_bytes(token_id, opening)


@pytest.mark.parametrize("letter", [0x61, 0xFF, 256])
def test_a_push_costs_the_same_however_long_the_text(letter: int) -> None:
    tokenizer = CountingTokenizer()
    stream = StreamDecoder(tokenizer, prompt_ids=[0x61] * 5000, stop=["b"])
    assert tokenizer.asked <= 8
    tokenizer.asked = 0
    for _ in range(5000):
        stream.push([letter])
    assert tokenizer.asked == 5000
