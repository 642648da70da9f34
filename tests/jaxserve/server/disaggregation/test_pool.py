"""Several prefill servers: chosen, added and removed while requests run."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.addresses import server_problem
from jaxserve.errors import ConfigError
from jaxserve.server.disaggregation.addresses import read_addresses
from jaxserve.server.disaggregation.prefill_pool import State
from tests.jaxserve.cluster.transfer.harness import pass_time
from tests.jaxserve.server.disaggregation.harness import LONG, PLAN, apart, asking
from tests.jaxserve.server.disaggregation.test_remote_prefill_faults import before_step
from tests.jaxserve.server.harness import until


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":50051",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "a b:1",
        "h:1²",
        "h:" + "1" * 5000,
        "http://host:1",
        "https://host:1",
        "[::1:1",
        "::1:1",
        "[host]:1",
        "-host:1",
    ],
)
def test_no_address(text: str) -> None:
    assert server_problem(text)


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.7:50051",
        "prefill-0.prefill:1",
        "prefill_0.default.svc.cluster.local.:1",
        "[::1]:65535",
        "[fe80::1%eth0]:1",
        "dns:///prefill:50051",
    ],
)
def test_an_address(text: str) -> None:
    assert server_problem(text) is None


def test_a_file_of_addresses(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("# prefill\n\n a:1  # the first\nb:2\n")
    assert read_addresses(file) == ["a:1", "b:2"]
    file.write_text("a:1\nb\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_addresses(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_addresses(tmp_path / "none")


def test_the_idle_one_is_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with apart(tmp_path, prefills=2, prefill_seconds=0.02) as servers:
            texts = [f"{i}{LONG}" for i in range(4)]
            await asyncio.gather(
                *(servers.decode.inference.Generate(asking(text)) for text in texts)
            )
            assert [server.runner.steps > 4 for server in servers.prefills] == [True, True]
            await servers.at_rest()

    asyncio.run(main())


def test_who_has_a_prefix_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.server.disaggregation.prefix_affinity.BLOCK", 32)

    async def main() -> None:
        async with apart(tmp_path, prefills=2) as servers:
            for i in range(4):
                await servers.decode.inference.Generate(asking(LONG + str(i), cache_salt="s"))
                servers.decode.engine.scheduler.flush_cache()
            assert servers.decisions("remote") == 4
            assert sorted(bool(server.runner.steps) for server in servers.prefills) == [False, True]
            await servers.at_rest()

    asyncio.run(main())


@pytest.mark.system
def test_servers_come_and_go_without_a_restart(tmp_path: Path) -> None:
    """A prompt that a removed server computes is finished."""
    file = tmp_path / "servers"
    file.write_text("")

    async def main() -> None:
        plan = replace(PLAN, servers_file=file)
        async with (
            apart(tmp_path, plan=plan, prefills=0, ready=False) as decode_only,
            apart(_folder(tmp_path), prefills=2, prefill_seconds=0.02) as others,
        ):
            first, second = (f"127.0.0.1:{proxy.port}" for proxy in others.proxies)
            generate = decode_only.decode.inference.Generate
            file.write_text(f"{first}\n")
            await decode_only.until(State.READY)
            under_way = asyncio.ensure_future(generate(asking()))
            await until(lambda: others.prefills[0].runner.steps)
            file.write_text(f"{second}  # instead\n")
            await until(
                lambda: [server.address for server in decode_only.role._pool.ready] == [second]
            )
            await under_way
            assert not decode_only.failures and decode_only.count("seconds_count") == 1
            await generate(asking("b" + LONG))
            assert others.prefills[1].runner.steps and decode_only.decisions("remote") == 2
            file.write_text("not an address")
            await asyncio.sleep(1.2)
            assert decode_only.states == {"ready": 1}, "it stays as it was"
            file.write_text("")
            await until(lambda: not decode_only.states)
            await generate(asking("c" + LONG))
            assert decode_only.decisions("local_no_server") == 1
            await decode_only.at_rest()
            await others.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_server_that_is_removed_sends_what_it_computes(tmp_path: Path, late: bool) -> None:
    """After the grace the prompt is computed here, from the pages that came."""
    grace = 60.0

    async def main() -> None:
        async with apart(tmp_path) as servers:
            async with before_step(servers, 2) as there:
                answering = asyncio.ensure_future(servers.decode.inference.Generate(asking()))
                await there.wait()
                servers.role._pool._grace = grace
                servers.role._pool.change(lambda address: pytest.fail("nobody is new"), ())
                await asyncio.sleep(0)  # closing it begins
                pass_time(grace if late else grace / 2)
                if late:
                    await until(lambda: not servers.role._pool._closing)
            assert (await answering).choices
            assert servers.failures == ({"cancelled": 1} if late else {})
            await until(lambda: not servers.role._pool._closing)
            await servers.at_rest()

    asyncio.run(main())


@pytest.mark.system
def test_a_server_that_is_not_there_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the server once."""

    async def main() -> None:
        async with apart(tmp_path, plan=replace(PLAN, servers=("127.0.0.1:1",)), prefills=0):
            await until(lambda: "prefill server 127.0.0.1:1 is unreachable: " in caplog.text)
            await asyncio.sleep(2.5)
            assert caplog.text.count("127.0.0.1:1 is") == 1

    asyncio.run(main())


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "others"
    folder.mkdir()
    return folder
