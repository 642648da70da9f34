"""Log-probabilities that the fake device never has: equal texts, infinity, split characters."""

from math import inf

from jaxserve.engine.events import Logprob
from jaxserve.server.http.json import dumps
from jaxserve.server.http.logprobs import ChatLogprobs, TextLogprobs, prompt_logprobs
from tests.byte_tokenizer import ByteTokenizer

A = 65
B = 66
C = 67


class Twins(ByteTokenizer):
    """A tokenizer whose tokens A and B have the same text."""

    def token_text(self, token_id: int) -> str:
        return "A" if token_id == B else super().token_text(token_id)


def test_the_chosen_token_has_one_value() -> None:
    """The device computes the value twice, and evaluation harnesses compare both for equality."""
    entry = Logprob(A, -0.5, ((A, -0.50000001), (C, -1.0)))
    found = TextLogprobs(ByteTokenizer(), (), False, 2).render([(A, entry)])
    assert found["token_logprobs"] == [-0.5] and found["top_logprobs"] == [{"A": -0.5, "C": -1.0}]
    (chat,) = ChatLogprobs(ByteTokenizer(), 1).render([entry])["content"]
    assert chat["logprob"] == chat["top_logprobs"][0]["logprob"] == -0.5
    assert prompt_logprobs(ByteTokenizer(), [entry], 1)[1] == {
        "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"}
    }


def test_the_chosen_token_is_always_there() -> None:
    entry = Logprob(A, -9.0, ((B, -0.1), (C, -1.0)))
    assert TextLogprobs(ByteTokenizer(), (), False, 1).render([(A, entry)])["top_logprobs"] == [
        {"A": -9.0, "B": -0.1}
    ]
    (chat,) = ChatLogprobs(ByteTokenizer(), 1).render([entry])["content"]
    assert [top["token"] for top in chat["top_logprobs"]] == ["B"]
    assert prompt_logprobs(ByteTokenizer(), [entry], 0)[1] == {
        "65": {"logprob": -9.0, "rank": None, "decoded_token": "A"}
    }


def test_tokens_that_read_the_same_stay_apart() -> None:
    for chosen, other in ((A, B), (B, A)):
        entry = Logprob(chosen, -0.5, ((other, -0.25), (chosen, -0.5)))
        (top,) = TextLogprobs(Twins(), (), False, 2).render([(chosen, entry)])["top_logprobs"]
        assert top["A"] == -0.5 and top[f"token_id:{other}"] == -0.25


def test_minus_infinity_is_a_number_in_json() -> None:
    entry = Logprob(A, -inf, ((B, -inf),))
    found = TextLogprobs(ByteTokenizer(), (), False, 1).render([(A, entry)])
    assert b"-9999.0" in dumps(found) and b"Infinity" not in dumps(found)
    assert b"Infinity" not in dumps(ChatLogprobs(ByteTokenizer(), 1).render([entry]))
    assert b"Infinity" not in dumps(prompt_logprobs(ByteTokenizer(), [entry], 1))


def test_offsets_count_characters_that_are_whole() -> None:
    ids = [256, *"é1€x".encode(), 257]
    found = TextLogprobs(ByteTokenizer(), ids, True, 0).render([(token, None) for token in ids])
    assert found["text_offset"] == [0, 0, 0, 1, 2, 2, 2, 3, 4]


def test_a_special_token_has_no_bytes() -> None:
    (entry,) = ChatLogprobs(ByteTokenizer(), 0).render([Logprob(257, -1.0, ())])["content"]
    assert (entry["token"], entry["bytes"]) == ("<eos>", None)
