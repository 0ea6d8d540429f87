"""One contract for every backend that runs here: `local` does it with real processes, `mock` in memory."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from sandboxes import WORKSPACE, Backend, FileRefused, Sandbox, SandboxGone, make_backend
from sandboxes.background import background_loop


def tar_of(*entries: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                archive.addfile(info, io.BytesIO(entry[1]))
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return opened.getnames()


@pytest.fixture(params=["local", "mock"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return make_backend(request.param)


@pytest.fixture
async def box(backend: Backend) -> AsyncIterator[Sandbox]:
    made = await backend.create(run_id="contract", lifetime_s=120)
    yield made
    await made.kill()


def test_an_unknown_backend_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(UserError, match=r"'docker'.*local, e2b, mock"):
        make_backend("docker")


async def test_backends_and_sandboxes_satisfy_the_protocols(backend: Backend, box: Sandbox) -> None:
    assert isinstance(backend, Backend)
    assert isinstance(box, Sandbox)


async def test_commands_run_in_an_empty_workspace_and_report_their_exit_code(box: Sandbox) -> None:
    where = await box.run("pwd && ls")
    assert (where.exit_code, where.stdout, where.timed_out) == (0, WORKSPACE + "\n", False)
    assert (await box.run("false")).exit_code == 1
    assert (await box.run("no-such-program")).exit_code == 127


async def test_what_a_command_writes_the_file_calls_read_and_the_other_way_round(box: Sandbox) -> None:
    await box.run("mkdir -p a/b && echo one > a/b/c.txt")
    assert await box.read_file("a/b/c.txt") == b"one\n"
    await box.write_file(f"{WORKSPACE}/new/folder/d.bin", b"two\n")
    assert (await box.run("cat new/folder/d.bin")).stdout == "two\n"


async def test_output_beyond_the_limit_is_counted_not_kept(box: Sandbox) -> None:
    result = await box.run("echo abcdefghij", max_output=4)
    assert (result.stdout, result.dropped_bytes) == ("abcd", 7)


async def test_wrong_file_requests_are_refused_or_not_found(box: Sandbox) -> None:
    await box.run("mkdir d")
    await box.write_file("f", b"12345")
    with pytest.raises(FileNotFoundError, match="nope"):
        await box.read_file("nope")
    for path in ("d", WORKSPACE, "bad\0name", "lone\ud800"):
        with pytest.raises(FileRefused):
            await box.read_file(path)
    with pytest.raises(FileRefused, match="5 bytes"):
        await box.read_file("f", max_bytes=4)
    for path in ("d", "f/below", "bad\0name", "ends/"):
        with pytest.raises(FileRefused):
            await box.write_file(path, b"")
    with pytest.raises(FileRefused, match="9000000 bytes"):
        await box.write_file("big", b"x" * 9_000_000)


async def test_a_workspace_travels_to_another_sandbox(backend: Backend, box: Sandbox) -> None:
    await box.run("mkdir -p deep/er empty")
    await box.write_file("deep/er/x", bytes(range(256)))
    await box.import_workspace(await box.export_workspace())
    other = await backend.create(run_id="contract", lifetime_s=60)
    try:
        await other.write_file("stale", b"goes away")
        await other.import_workspace(await box.export_workspace())
        assert await other.read_file("deep/er/x") == bytes(range(256))
        assert (await other.run("ls")).stdout == "deep\nempty\n"
    finally:
        await other.kill()


async def test_an_export_larger_than_asked_is_refused(box: Sandbox) -> None:
    await box.write_file("f", b"x" * 1000)
    with pytest.raises(FileRefused, match="more than 999 bytes"):
        await box.export_workspace(max_bytes=999)


@pytest.mark.parametrize(
    "archive",
    [
        tar_of(("../escape", b"x")),
        tar_of(("/etc/escape", b"x")),
        tar_of(("a/../../escape", b"x")),
        tar_of(special("link", tarfile.SYMTYPE, "/tmp"), ("link/escape", b"x")),
        tar_of(special("hard", tarfile.LNKTYPE, "/etc/passwd")),
        tar_of(special("fifo", tarfile.FIFOTYPE)),
        tar_of(special("device", tarfile.CHRTYPE)),
        tar_of(("twice", b"1"), ("twice", b"2")),
        tar_of(("file", b"1"), ("file/below", b"2")),
        b"this is no archive" * 100,
    ],
)
async def test_archives_that_would_leave_the_workspace_are_refused_and_change_nothing(
    box: Sandbox, archive: bytes
) -> None:
    await box.write_file("kept", b"yes")
    with pytest.raises(FileRefused):
        await box.import_workspace(archive)
    assert await box.read_file("kept") == b"yes"


async def test_after_kill_every_call_says_gone_and_kill_stays_silent(box: Sandbox) -> None:
    await box.kill()
    await box.kill()
    for call in (box.run("true"), box.read_file("f"), box.write_file("f", b""), box.quiesce(), box.export_workspace()):
        with pytest.raises(SandboxGone):
            await call


async def test_a_sandbox_ends_at_its_lifetime(backend: Backend) -> None:
    box = await backend.create(run_id="short", lifetime_s=0.5)
    await asyncio.sleep(1.0)
    with pytest.raises(SandboxGone):
        await box.run("true")
    assert await backend.sweep("short") == 0


async def test_sweep_kills_the_runs_sandboxes_and_no_others(backend: Backend) -> None:
    doomed = [await backend.create(run_id="run/1 ü", lifetime_s=60) for _ in range(2)]
    other = await backend.create(run_id="run2", lifetime_s=60)
    assert await backend.sweep("run/1 ü") == 2
    assert await backend.sweep("run/1 ü") == 0
    with pytest.raises(SandboxGone):
        await doomed[0].run("true")
    assert (await other.run("true")).exit_code == 0
    await other.kill()


def test_one_sandbox_serves_successive_event_loops(backend: Backend) -> None:
    box = asyncio.run(backend.create(run_id="loops", lifetime_s=60))
    asyncio.run(box.write_file("f", b"first loop"))
    assert asyncio.run(box.run("cat f")).stdout == "first loop"

    async def gathered() -> list[str]:
        return [result.stdout for result in await asyncio.gather(*(box.run(f"echo {i}") for i in range(8)))]

    assert asyncio.run(gathered()) == [f"{i}\n" for i in range(8)]
    asyncio.run(box.kill())


NAMES = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda n: n not in (".", "..") and len(n.encode()) < 200
)


@pytest.mark.parametrize("kind", ["local", "mock"])
def test_any_file_name_and_content_come_back_by_file_call_and_by_archive(kind: str) -> None:
    backend = make_backend(kind)
    run = asyncio.run_coroutine_threadsafe
    loop = background_loop()
    box = run(backend.create(run_id="property", lifetime_s=120), loop).result()

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(NAMES, min_size=1, max_size=4), st.binary(max_size=300))
    def check(parts: list[str], data: bytes) -> None:
        path = "/".join(parts)
        run(box.import_workspace(tar_of()), loop).result()
        run(box.write_file(path, data), loop).result()
        archive = run(box.export_workspace(), loop).result()
        assert path in names_in(archive)
        run(box.import_workspace(archive), loop).result()
        assert run(box.read_file(path), loop).result() == data

    try:
        check()
    finally:
        run(box.kill(), loop).result()


@pytest.mark.parametrize("kind", ["local", "mock"])
def test_any_path_at_all_is_answered_by_bytes_or_one_of_two_errors(kind: str) -> None:
    backend = make_backend(kind)
    run, loop = asyncio.run_coroutine_threadsafe, background_loop()
    box = run(backend.create(run_id="property", lifetime_s=120), loop).result()

    @settings(max_examples=100, deadline=None)
    @given(
        st.one_of(
            st.text(st.characters(), max_size=40),
            st.lists(st.sampled_from(["..", ".", "proc", "self", "mem", "dev", "null", "a", ""])).map("/".join),
        )
    )
    def check(path: str) -> None:
        for call in (box.read_file(path, max_bytes=100_000), box.write_file(path, b"x")):
            with suppress(FileRefused, FileNotFoundError):
                run(call, loop).result(timeout=10)
        assert run(box.run("true"), loop).result().exit_code == 0

    try:
        check()
    finally:
        run(box.kill(), loop).result()
