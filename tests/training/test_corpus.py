"""The corpus of the bundled models: seeded, split, and consistent."""

import json
import random
import re
from collections.abc import Sequence

import pytest

from training import grammar, records, stories, sums
from training.chats import TALK_FILE
from training.corpus import KINDS, LONG, Document, documents
from training.grammar import Telling, read_grammar

MARKUP = re.compile(r"[(){}|;]|//|=>|SUBJECT")


def texts(seed: int, split: str, count: int, kind: str | None = None) -> list[Document]:
    return list(documents(seed, split, count, kind))


def said(document: Document) -> list[str]:
    return [turn.text for turn in document.turns]


@pytest.mark.parametrize("kind", [None, LONG])
def test_a_document_depends_on_seed_split_kind_and_index_alone(kind: str | None):
    assert texts(3, "train", 4, kind) == texts(3, "train", 8, kind)[:4]
    assert texts(3, "train", 4, kind) != texts(4, "train", 4, kind)


def test_no_text_is_in_both_splits():
    train = texts(0, "train", 1000, "small talk")
    held_out = texts(1, "held-out", 50, "small talk")
    assert len(set(train)) < len(train)  # short texts repeat, so that chance would put some in both
    assert not set(train) & set(held_out)
    assert all(text.held_out for text in held_out) and not any(text.held_out for text in train)


def test_every_kind_occurs_in_about_its_share():
    count = 1000
    drawn = [document.kind for document in texts(0, "train", count)]
    assert sum(share for share, _ in KINDS.values()) == 100
    for kind, (share, _) in KINDS.items():
        assert drawn.count(kind) == pytest.approx(share / 100 * count, rel=0.4), kind
    assert min(sum(map(len, said(text))) for text in texts(0, "train", 3, LONG)) > 3000


@pytest.mark.parametrize("file", [stories.FILE, TALK_FILE])
def test_every_rule_of_a_grammar_can_be_expanded(file: str):
    rules = read_grammar(file)
    for name in [*rules.choices, *rules.tables]:
        for seed in range(20):
            text = Telling(rules, random.Random(seed)).text(f"{{{name}}}")
            question, _, answer = text.replace("SUBJECT", "").partition(" => ")
            assert question and not MARKUP.search(question + answer), (name, text)
            assert not re.search(r"\b[Aa] [aeiou]\w*", text), (name, text)  # "a owl"


@pytest.mark.parametrize(
    ("text", "message"), [("a b =\n  one", "1 cells"), ("a\n  one", "begins no rule")]
)
def test_a_broken_grammar_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        grammar.parse(text)


def test_stories_hold_together():
    """The lost thing is the one that is found, with its color, by the friend who came by."""
    told = [
        re.search(r"I lost my (\w+) (.+?),\" said (\w+)\.", said(text)[0])
        for text in texts(0, "train", 300, "story")
    ]
    matches = [match for match in told if match]
    assert len(matches) > 10
    for match in matches:
        color, toy, hero = match.groups()
        assert f"{hero} took " in match.string and f" {color} {toy} to the " in match.string
        assert f"saw something {color}. It was the {toy}!" in match.string


def test_questions_and_summaries_speak_of_their_story():
    rules = read_grammar(stories.FILE)
    plots = set()
    for seed in range(120):
        story = stories.tell(rules, random.Random(seed))
        plots.add(story.plot)
        hero = story.telling.value("hero")
        friend = story.telling.value("friend")
        told = [story.summary(), *(answer for _, answer in (story.question() for _ in range(4)))]
        names = set(re.findall(r"\b[A-Z]\w+", " ".join(told)))
        assert hero in story.text and names & {hero, friend}
        cast = {cell for row in rules.tables["hero"].rows for cell in re.findall(r"\w+", row[0])}
        assert not names & (cast - {hero})
        if friend in names:
            assert friend in story.text, (story.plot, story.text, told)
    assert plots == set(stories.PLOTS)


def read_answer(text: str) -> None:
    for first, sign, second, result in re.findall(r"(\d+) (plus|minus) (\d+) is (-?\d+)\.", text):
        assert int(result) == (
            int(first) + int(second) if sign == "plus" else int(first) - int(second)
        ), text


def test_sums_are_right_and_cover_their_range():
    sheets = [said(text)[0] for text in texts(0, "train", 900, "sum sheet")]
    for sheet in sheets:
        read_answer(sheet)
    lines = {line for sheet in sheets for line in sheet.split("\n")}
    assert lines == {exercise.answer() for exercise in sums.all_sums()} and len(lines) == 672


def asked_numbers(question: str) -> list[str]:
    found = re.findall(r"\d+", question)
    return found[::-1] if re.match(r"(Take|Subtract)", question) else found


def test_an_answer_is_about_the_sum_that_was_asked():
    seen = 0
    for text in texts(0, "train", 60, "sums"):
        turns = [turn for turn in text.turns if turn.role != "system"]
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            assert (question.role, answer.role) == ("user", "assistant")
            read_answer(answer.text)
            assert asked_numbers(question.text)[:2] == re.findall(r"\d+", answer.text)[:2]
            seen += 1
    assert seen > 180


def test_a_problem_says_what_is_left():
    for seed in range(50):
        question, answer = sums.story_problem(random.Random(seed))
        result = re.search(r"is (\d+)\.", answer)
        assert (
            result
            and f" has {result[1]} " in answer
            and (" more" in question) == ("plus" in answer)
        )


def test_records_parse_and_match_their_descriptions():
    kinds = set()
    for seed in range(300):
        rng = random.Random(seed)
        record = records.draw(rng)
        request = record.request(rng)
        fields = json.loads(record.answer())
        assert fields == record.fields and fields
        assert all(re.search(rf"\b{value}\b", record.sentence) for value in fields.values())
        assert record.sentence in request and "JSON" in request
        if record.named:
            asked = request.replace(record.sentence, "")
            assert sorted(fields, key=asked.index) == list(fields) and all(
                name in asked for name in fields
            )
        kinds.add(tuple(sorted(fields)))
    assert len(kinds) > 20


def roles(document: Document) -> Sequence[str]:
    return [turn.role for turn in document.turns if turn.role != "system"]


def test_chats_take_turns():
    for kind in (*KINDS, LONG):
        for text in texts(2, "train", 5, kind):
            if kind in ("story", "sum sheet"):
                assert roles(text) == [""]
            else:
                assert roles(text) == ["user", "assistant"] * (len(roles(text)) // 2)
                assert all(turn.role != "system" for turn in text.turns[1:])


def test_a_name_is_recalled():
    found = 0
    for text in texts(0, "train", 60, "mixed chat"):
        whole = "\n".join(said(text))
        if given := re.search(r"(?:My name is|I am) ([A-Z]\w+)\.\nNice to meet you, (\w+)!", whole):
            assert given[1] == given[2] and text.turns[-1].text.lower().endswith(
                f"your name is {given[1].lower()}."
            )
            found += 1
    assert found > 5


def test_texts_hold_no_marks_of_the_chat_format():
    assert not any("<|" in turn.text for text in texts(0, "train", 100) for turn in text.turns)
