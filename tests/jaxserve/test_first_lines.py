"""First lines that people type, ours and those of other libraries: each works, or its error says
what to type instead."""

import copy
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any

import jax.numpy as jnp
import pytest

import jaxserve
from jaxserve import LLM, Completion, EngineOptions, SamplingParams
from jaxserve.errors import RequestError
from jaxserve.names_elsewhere import (
    COMPLETION_ATTRIBUTES,
    LLM_ATTRIBUTES,
    LLM_KEYWORDS,
    PACKAGE_NAMES,
    SAMPLING_KEYWORDS,
    explains_names,
)
from tests.jaxserve.test_llm import BUNDLED, OPTIONS

HELLO = [{"role": "user", "content": "Hello"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

WORKS = [
    # our own
    "llm.generate('Once')[0].text",
    "llm.generate(['Once', 'The dog'], SamplingParams(temperature=0, max_tokens=3))[1].token_ids",
    "llm.generate('Once', temperature=0, max_tokens=3, stop='.')[0].finish_reason",
    "llm.generate([[1, 400], 'Once'], max_tokens=3)[0].text",
    "llm.generate((text for text in ('Once', 'The dog')), max_tokens=3)[1].text",
    "''.join(delta.text for delta in llm.stream('Once', max_tokens=3))",
    "llm.chat(HELLO, max_tokens=3)[0].text",
    "llm.chat([HELLO, HELLO], SamplingParams(max_tokens=3))[1].text",
    # vLLM
    "LLM(model=DIR, dtype='bfloat16', options=OPTIONS)",
    "llm.generate(['Once'] * 2, [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])",
    "llm.chat(messages=HELLO, max_tokens=3)[0].text",
    # jax
    "LLM(DIR, dtype=jnp.bfloat16, options=OPTIONS)",
]
NAMES_THE_RIGHT_ONE = [
    # vLLM and SGLang
    ("LLM(DIR, tensor_parallel_size=4)", TypeError, "use tensor"),
    ("LLM(DIR, max_model_len=512)", TypeError, "use max_context"),
    ("LLM(DIR, gpu_memory_utilization=0.9)", TypeError, "EngineOptions(cache_tokens=...)"),
    ("LLM(DIR, quantization='fp8')", TypeError, "use weights"),
    ("LLM(DIR, trust_remote_code=True)", TypeError, "leave it out"),
    ("LLM(DIR, max_num_seqs=8)", TypeError, "EngineOptions(max_batch=...)"),
    ("LLM(model_path=DIR)", TypeError, "use model"),
    ("LLM(DIR, max_batch=8)", TypeError, "use options=EngineOptions(max_batch=...)"),
    ("LLM(DIR, seed=0)", TypeError, "use SamplingParams(seed=...)"),
    ("llm.generate(['Once'], sampling_params=SamplingParams())", TypeError, "use params"),
    ("llm.generate('Once', use_tqdm=False)", TypeError, "use progress=False"),
    ("llm.generate({'prompt': 'Once'})", RequestError, "give a text, or a list of prompts"),
    ("llm.generate([{'prompt': 'Once'}])", RequestError, "give the text"),
    ("llm.generate('Once', {'temperature': 0})", RequestError, "give SamplingParams"),
    ("llm.generate(['Once'], [{'n': 2}])", RequestError, "params[0] is {'n': 2}; give SamplingPar"),
    ("llm.generate('Once', max_tokens=1)[0].outputs", AttributeError, "use text or token_ids"),
    ("SamplingParams(structured_outputs={})", TypeError, "use structure=Structure.of"),
    ("SamplingParams(top_k=-1)", RequestError, "0 stands for all"),
    ("llm.get_tokenizer()", AttributeError, "use model.tokenizer"),
    ("import AsyncLLMEngine", ImportError, "use AsyncLLM"),
    # OpenAI
    ("import OpenAI", ImportError, "http://127.0.0.1:8000/v1"),
    ("import Client", ImportError, "import it from jaxserve.client"),
    ("llm.chat(HELLO, max_completion_tokens=3)", TypeError, "use max_tokens"),
    ("llm.chat(HELLO, response_format={})", TypeError, "use structure"),
    ("llm.chat(HELLO, stream=True)", TypeError, "use the method stream"),
    ("llm.generate(HELLO)", RequestError, "give one conversation to chat"),
    ("llm.chat('Hello')", RequestError, "give a list of messages"),
    ("llm.generate('Once', max_tokens=1)[0].choices", AttributeError, "use text or token_ids"),
    # transformers
    ("import pipeline", ImportError, "use LLM(folder).generate(prompts)"),
    ("import AutoModelForCausalLM", ImportError, "use LLM(folder).generate(prompts)"),
    ("llm.generate('Once', max_new_tokens=3)", TypeError, "use max_tokens"),
    ("llm.generate('Once', do_sample=False)", TypeError, "use temperature"),
    ("llm.generate([1, 400])", RequestError, "give the token ids of one prompt as a list"),
    ("LLM(DIR, torch_dtype='bfloat16')", TypeError, "use dtype"),
    # our own, misspelt
    ("SamplingParams(temprature=0)", TypeError, "did you mean temperature?"),
    ("LLM(DIR, tensors=2)", TypeError, "did you mean tensor?"),
]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(TEMPLATE)
    with LLM(BUNDLED, options=OPTIONS, chat_template=template, progress=False) as llm:
        yield {
            **{"llm": llm, "LLM": LLM, "SamplingParams": SamplingParams, "jnp": jnp},
            **{"DIR": str(BUNDLED), "OPTIONS": OPTIONS, "HELLO": HELLO},
        }


@pytest.mark.system
@pytest.mark.parametrize("line", WORKS)
def test_a_line_that_works(line: str, names: dict[str, Any]) -> None:
    value = eval(line, names)
    assert value
    if isinstance(value, LLM):
        value.close()


@pytest.mark.parametrize(("line", "kind", "right"), NAMES_THE_RIGHT_ONE)
def test_a_line_whose_error_names_the_right_one(
    line: str, kind: type[Exception], right: str, names: dict[str, Any]
) -> None:
    typed = f"from jaxserve {line}" if line.startswith("import ") else line
    with pytest.raises(kind) as raised:
        exec(typed, names)
    assert right in str(raised.value)


def test_a_name_is_explained_only_where_it_does_not_exist(names: dict[str, Any]) -> None:
    llm = names["llm"]
    (completion,) = llm.generate("Once", max_tokens=1)
    assert not set(LLM_KEYWORDS) & set(LLM.__init__.__annotations__)
    assert not set(SAMPLING_KEYWORDS) & set(SamplingParams.__annotations__)
    assert not set(PACKAGE_NAMES) & set(jaxserve.__all__)
    assert not [name for name in LLM_ATTRIBUTES if hasattr(llm, name)]
    assert not [name for name in COMPLETION_ATTRIBUTES if hasattr(completion, name)]


KEYWORDS = {*signature(LLM).parameters, *signature(LLM.generate).parameters, *dir(LLM)}
FIELDS = {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("table", "known"),
    [
        (LLM_KEYWORDS, KEYWORDS | FIELDS),
        (SAMPLING_KEYWORDS, FIELDS | {"params", "the", "progress"}),
        (LLM_ATTRIBUTES, {*dir(LLM), "model", "engine", "AsyncLLM"}),
        (COMPLETION_ATTRIBUTES, {field.name for field in fields(Completion)} | {"len", "sum"}),
        (PACKAGE_NAMES, set(jaxserve.__all__)),
    ],
)
def test_an_explanation_names_what_exists(table: Mapping[str, str], known: set[str]) -> None:
    options = {field.name for field in fields(EngineOptions)}
    for name, explanation in table.items():
        for word in re.findall(r"^use (\w+)", explanation):
            assert word in known, (name, explanation)
        for option in re.findall(r"EngineOptions\((\w+)=", explanation):
            assert option in options, (name, explanation)


def test_unknown_names_elsewhere_are_pythons_own_errors(names: dict[str, Any]) -> None:
    llm = names["llm"]
    (completion,) = llm.generate("Once", max_tokens=1)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'nothing'"):
        _ = llm.nothing
    with pytest.raises(AttributeError, match="'Completion' object has no attribute 'nothing'"):
        _ = completion.nothing
    with pytest.raises(TypeError, match=r"SamplingParams has no keyword 'xyz'$"):
        SamplingParams(**{"xyz": 1})
    with pytest.raises(AttributeError, match="module 'jaxserve' has no attribute 'nothing'"):
        _ = jaxserve.nothing


def test_an_error_inside_of_a_property_is_not_hidden() -> None:
    @explains_names(attributes={"other": "use broken"})
    class Owner:
        @property
        def broken(self) -> int:
            return [].nothing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'list' object has no attribute 'nothing'"):
        _ = Owner().broken


def test_a_completion_in_a_notebook(names: dict[str, Any]) -> None:
    (plain,) = names["llm"].generate("A <b> & ", temperature=0, max_tokens=8)
    assert plain._repr_html_().count("<span") == 1, "the prompt alone"
    assert "A &lt;b&gt; &amp; </span>" in plain._repr_html_()
    assert plain._repr_html_().endswith(f"{plain.text}</div>")

    (scored,) = names["llm"].generate("Once", temperature=0, max_tokens=8, logprobs=2)
    html = scored._repr_html_()
    assert html.count("<span") == 1 + 8 and html.count("rgba(") == 8
    tokenizer = names["llm"].model.tokenizer
    first = scored.logprobs[0]
    assert f">{tokenizer.token_text(first.token)}</span>" in html
    strongest = min(scored.logprobs, key=lambda entry: entry.logprob)
    assert f", {1 - 2.718281828**strongest.logprob:.2f})" in html


def test_the_end_of_a_long_prompt_is_shown(names: dict[str, Any]) -> None:
    (done,) = names["llm"].generate("a cat and " * 100, max_tokens=1)
    assert 400 < len(done._repr_html_()) < 700 and "…" in done._repr_html_()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_completion_leaves_its_tokenizer_behind(copied: Any, names: dict[str, Any]) -> None:
    (done,) = names["llm"].generate("Once", temperature=0, max_tokens=3, logprobs=0)
    other = copied(done)
    assert other == done and "rgba(" not in other._repr_html_()
    assert "rgba(" in done._repr_html_()
