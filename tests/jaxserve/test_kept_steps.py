"""Compiled steps that an LLM keeps for the next process, beside caches that the program has."""

import resource
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve import LLM, EngineOptions
from jaxserve.compilation_cache import OPTIONS as OF_JAX
from jaxserve.compilation_cache import CacheWarnings, KeptSteps, use_compilation_cache

BUNDLED = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat-draft"
SMALL = EngineOptions(max_batch=2, step_tokens=16, page_size=16, cache_tokens=64, max_context=64)


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Take the tests' own cache away from jax; conftest gives it back after the test."""
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield


def missed(**asked) -> tuple[list[str], int]:
    """Names of the steps that were compiled for one answer, and how many were found."""
    jax.clear_caches()  # what this process has compiled would not be looked for on disk
    before = {name: getattr(jax.config, name) for name in OF_JAX}
    with LLM(BUNDLED, options=SMALL, **asked) as llm:
        llm.generate("Once", max_tokens=4)
        assert llm.runner.compiles_after_ready == 0
        found = (llm.runner.executables.missed, llm.runner.executables.found_compiled)
    assert {name: getattr(jax.config, name) for name in OF_JAX} == before
    return found


def test_the_next_llm_compiles_nothing(no_cache: None, tmp_path: Path) -> None:
    jax.jit(lambda x: x + 1)(2.0)  # jax has looked at its options before
    first, _ = missed(compilation_cache=tmp_path)
    assert any(name.startswith("decode") for name in first)
    again, found = missed(compilation_cache=str(tmp_path))
    assert not again and found == len(first)


def test_auto_is_the_users_cache(
    no_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    missed()
    assert any((tmp_path / "jaxserve" / "xla").iterdir())


@pytest.mark.slow
def test_none_keeps_nothing(
    no_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled, found = missed(compilation_cache=None)
    assert compiled and not found and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_cache_of_the_program_wins(no_cache: None, tmp_path: Path) -> None:
    own = tmp_path / "own"
    jax.config.update("jax_compilation_cache_dir", str(own))
    missed(compilation_cache=tmp_path / "other")
    assert list(own.iterdir()) and not (tmp_path / "other").exists()


def test_commands_leave_a_cache_that_jax_was_given_unless_a_flag_names_one(
    no_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX_COMPILATION_CACHE_DIR sets the same option, when jax is imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    before = {name: getattr(jax.config, name) for name in OF_JAX}
    use_compilation_cache(None)
    assert {name: getattr(jax.config, name) for name in OF_JAX} == before
    use_compilation_cache(tmp_path / "asked")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "asked")
    jax.config.update("jax_compilation_cache_dir", None)
    use_compilation_cache(None)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jaxserve" / "xla")


def test_a_folder_that_cannot_be_written(
    no_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match=r"steps are not kept: .*file/x: Not a directory"):
        LLM(BUNDLED, options=SMALL, compilation_cache=tmp_path / "file" / "x").close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"steps are not kept: .*file/jaxserve/xla: Not"):
        LLM(BUNDLED, options=SMALL).close()


def test_commands_go_on_where_a_folder_cannot_be_written(
    no_cache: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # given back afterwards
    (tmp_path / "file").touch()
    use_compilation_cache(tmp_path / "file" / "x")
    assert jax.config.jax_compilation_cache_dir is None
    line = f"compiled steps are not kept: {tmp_path}/file/x: Not a directory (--compilation-cache)"
    assert capsys.readouterr().err == f"{line}\n"


def test_entries_that_cannot_be_read_or_written_are_a_line_of_each_kind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    others: list[str] = []
    show = CacheWarnings(lambda message, *_: others.append(str(message)))
    entry = "persistent compilation cache entry for 'jit_run'"
    for number in range(3):
        show(UserWarning(f"Error reading {entry}: zlib.error: {number}"), UserWarning, "", 1)
        show(UserWarning(f"Error writing {entry}: OSError: {number}"), UserWarning, "", 1)
    show(UserWarning("something else"), UserWarning, "", 1)
    assert others == ["something else"]
    read, written = capsys.readouterr().err.splitlines()
    assert read.startswith("kept steps are damaged,") and ": zlib.error: 0 (--comp" in read
    assert written.startswith("compiled steps cannot be written,") and ": OSError: 0 (" in written


def test_kept_steps_with_a_flipped_bit_are_compiled_again(
    no_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With zstd, which a client here happens to install, or Python 3.14 has, jax writes no checksum.
    for package in ("zstd", "zstandard"):
        monkeypatch.setattr(f"jax._src.compilation_cache.{package}", None, raising=False)
    expected = compiled(tmp_path)
    for entry in tmp_path.glob("*-cache"):
        content = bytearray(entry.read_bytes())
        content[len(content) // 2] ^= 1
        entry.write_bytes(content)
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert compiled(tmp_path) == expected


@pytest.mark.system  # the limit holds for whatever this process writes meanwhile
def test_kept_steps_that_are_too_large_for_a_file(no_cache: None, tmp_path: Path) -> None:
    """The answer is there, and the parts of files that were written harm no later start."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limit[1]))
    try:
        with pytest.warns(UserWarning, match="Error writing persistent compilation cache entry"):
            expected = compiled(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {entry.stat().st_size for entry in tmp_path.glob("*-cache")} == {1024}
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert compiled(tmp_path) == expected


def compiled(folder: Path) -> float:
    """Return what a function gives that is compiled in the way of an LLM's steps."""
    jax.clear_caches()
    with KeptSteps(folder).used():
        return float(jax.jit(lambda x: jnp.cumsum(jnp.sin(x))[-1])(jnp.arange(64.0)))
