"""Row fields as the host packs them, and as the device unpacks them."""

from dataclasses import fields, replace

import numpy as np
import pytest

from jaxserve.config.kv_policy import NO_PAGE
from jaxserve.engine.device.row_packing import admission_layout, pack_admission
from jaxserve.engine.device.sampling import SMALL_FIELDS, disable_idle_rows
from jaxserve.engine.row_fields import NEVER, NO_TOKEN, ROW_FIELDS, RowSampling
from jaxserve.request import ThoughtBudget
from tests.jaxserve.engine.device.sampling_rows import EVERYTHING, PLAIN, RowParams, row_sampling


def test_the_device_unpacks_what_the_host_packed() -> None:
    admission = replace(
        EVERYTHING.admission, lane=1, row=3, length=8, tables=((7, NO_PAGE, 9), (4,))
    )
    layout = admission_layout(groups=2, pages_per_row=4)
    packed = pack_admission(admission, pages_per_row=4)
    assert packed.shape == (layout.size,) and packed.dtype == np.int32
    found = layout.unpack_on_host(packed)
    assert (found["lane"], found["row"], found["length"]) == (1, 3, 8)
    assert found["table"].tolist() == [[7, 0, 9, 0], [4, 0, 0, 0]]
    fields = SMALL_FIELDS.unpack_on_host(found["fields"])
    for name, declared in ROW_FIELDS.items():
        assert fields[name].dtype == declared.dtype
        np.testing.assert_array_equal(fields[name], getattr(admission.sampling, name))


def test_fields_of_rows_are_replaced_on_the_device() -> None:
    sampling = row_sampling([EVERYTHING, PLAIN])
    kept = {name: np.asarray(getattr(sampling, name)) for name in ROW_FIELDS}
    packed = SMALL_FIELDS.pack_on_device(kept)
    given = {"key": np.array([[1, 2**32 - 1], [2**31, 0]], np.uint32)}
    given["top_p"] = np.array([1e-40, -0.0], np.float32)
    replaced = SMALL_FIELDS.unpack(SMALL_FIELDS.replace_fields(packed, **given))
    for name, value in (kept | given).items():
        assert np.asarray(replaced[name]).tobytes() == value.tobytes(), name
    with pytest.raises(TypeError, match="top_k is float32; the field is int32"):
        SMALL_FIELDS.replace_fields(packed, top_k=given["top_p"])


def test_the_numbers_of_a_row() -> None:
    assert EVERYTHING.admission.sampling == RowSampling(
        key=(2**31, 5),
        choice=3,
        temperature=pytest.approx(0.8),
        top_k=9,
        top_p=pytest.approx(0.9),
        min_p=pytest.approx(0.01),
        repetition_penalty=pytest.approx(1.3),
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logprobs=20,
        end_after=2**30 + 4,
        end_ids=(2, 40) + (NO_TOKEN,) * 46,
        biased=1,
        masked=1,
        penalised=1,
        closes_at=4 + 2 + 10,
        closing=(20, 21) + (NO_TOKEN,) * 6,
        thought_end=21,
        opens_at=4,
        opening=(5, 5, NO_TOKEN, NO_TOKEN),
        gap=9,
    )


def test_a_budget_counts_known_tokens() -> None:
    """A row that is entered again, with output already, closes a thought that has not ended."""
    began = replace(EVERYTHING, prompt=(1, 2), output=(5, 5, 7))
    assert closes_at(began) == 2 + 2 + 10
    for same in ((), (5,), (5, 5), (5, 5, 9)):
        assert closes_at(replace(began, output=same)) == 14
    for another in ((6, 5), (5, 6), (9, 5, 7), (5, 5, 21)):
        assert closes_at(replace(began, output=another)) == NEVER
    # Its own closing does not count as an earlier end, so that the rest of it follows.
    assert closes_at(replace(began, output=(5, 5, *(7,) * 10, 20, 21))) == 14
    assert closes_at(replace(began, budget=None)) == NEVER
    beyond = ThoughtBudget(2**31 - 1, end=21, closing=(21,))
    assert closes_at(replace(began, budget=beyond)) == NEVER


def test_a_token_before_a_thought_counts_once() -> None:
    later = replace(EVERYTHING, prompt=(1, 2), output=(9, 5)).admission.sampling
    assert (later.opens_at, later.closes_at, later.gap) == (3, 15, NO_TOKEN)
    first = replace(EVERYTHING, prompt=(1, 2), output=(9,)).admission.sampling
    assert (first.opens_at, first.closes_at, first.gap) == (3, 15, NO_TOKEN)


def closes_at(row: RowParams) -> int:
    return row.admission.sampling.closes_at


def test_idle_rows_ask_for_no_optional_work() -> None:
    rows = row_sampling([EVERYTHING, EVERYTHING, PLAIN])
    found = disable_idle_rows(rows, np.array([True, False, True]))
    optional = ("temperature", "logprobs", "end_after", "biased", "masked", "penalised")
    for field in fields(RowSampling):
        before = getattr(rows, field.name)
        after = np.asarray(getattr(found, field.name))
        np.testing.assert_array_equal(after[1], before[1])
        if field.name in optional:
            assert after[0] == after[2] == (-1 if field.name == "logprobs" else 0)
        else:
            np.testing.assert_array_equal(after, before)
