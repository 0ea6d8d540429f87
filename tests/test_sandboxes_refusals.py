"""Where a backend cannot run, it says in one sentence what to do; and what is uploaded into a cloud sandbox works by itself."""

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxes import SandboxError, SandboxGone, SandboxTimeout, SandboxUnavailable, bwrap, make_backend, make_for
from sandboxes.e2b import E2BBackend, translate
from sandboxes.local import LocalBackend

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def path_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A PATH that holds nothing but what the test puts there and what drops root."""
    (tmp_path / "setpriv").symlink_to("/usr/bin/setpriv")
    monkeypatch.setenv("PATH", str(tmp_path))
    bwrap.find_bwrap.cache_clear()
    yield tmp_path
    bwrap.find_bwrap.cache_clear()


def fake_bwrap(folder: Path, version: str, stderr: str) -> None:
    """A program that answers as a bubblewrap which cannot start a box."""
    script = f'#!/bin/sh\n[ "$1" = --version ] && echo bubblewrap {version} && exit\necho "{stderr}" >&2\nexit 1\n'
    (folder / "bwrap").write_text(script)
    for item in [folder / "bwrap", *folder.parents]:
        if item.stat().st_uid == os.geteuid() and str(item).startswith("/tmp/"):
            item.chmod(0o755)


async def refusal() -> SandboxError:
    with pytest.raises(SandboxError) as caught:
        await LocalBackend().create(run_id="refused", lifetime_s=10)
    return caught.value


async def test_without_bubblewrap_the_refusal_names_the_setup_and_the_package(path_with: Path) -> None:
    error = await refusal()
    assert isinstance(error, SandboxUnavailable)
    assert all(part in str(error) for part in ("setup_env.py", "apt-get install bubblewrap", "--backend e2b"))


async def test_a_bubblewrap_without_disable_userns_is_refused_with_its_version(path_with: Path) -> None:
    fake_bwrap(path_with, "0.6.1", "")
    assert "is version 0.6" in str(await refusal())


async def test_a_machine_that_forbids_namespaces_is_told_the_sysctl_and_the_docker_option(path_with: Path) -> None:
    fake_bwrap(path_with, "0.8.0", "bwrap: setting up uid map: Permission denied")
    error = await refusal()
    assert isinstance(error, SandboxUnavailable)
    assert all(
        part in str(error)
        for part in ("apparmor_restrict_unprivileged_userns=0", "seccomp=unconfined", "setting up uid map")
    )


async def test_any_other_failure_to_start_is_infrastructure_and_carries_bubblewraps_words(path_with: Path) -> None:
    fake_bwrap(path_with, "0.8.0", "bwrap: something odd")
    error = await refusal()
    assert not isinstance(error, SandboxUnavailable)
    assert "something odd" in str(error)


async def test_e2b_without_a_key_says_what_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    for call in (E2BBackend().create(run_id="r", lifetime_s=10), E2BBackend().sweep("r")):
        with pytest.raises(SandboxUnavailable, match=r"export E2B_API_KEY"):
            await call


def test_the_sdks_errors_are_told_apart_gone_before_timeout() -> None:
    from e2b import exceptions as sdk

    assert type(translate(sdk.SandboxNotRunningException("x"))) is SandboxGone
    assert type(translate(sdk.SandboxUnreachableException("x"))) is SandboxGone
    assert type(translate(sdk.TimeoutException("x"))) is SandboxTimeout
    assert type(translate(sdk.AuthenticationException("x"))) is SandboxUnavailable
    assert type(translate(sdk.RateLimitException("x"))) is SandboxError


def test_a_profile_section_becomes_its_backend() -> None:
    from configs.profile import Sandboxes

    local = make_for(Sandboxes(backend="local", memory_mb=300, network=True))
    assert isinstance(local, LocalBackend)
    assert (local.memory_mb, local.network) == (300, True)
    cloud = make_for(Sandboxes(backend="e2b", template="mine"))
    assert isinstance(cloud, E2BBackend)
    assert cloud.template == "mine"
    assert make_for(Sandboxes(backend="mock")).name == "mock"


def test_importing_the_room_needs_none_of_the_heavy_libraries() -> None:
    code = "import sys, sandboxes, sandboxes.local, sandboxes.mock, sandboxes.e2b; print({'e2b', 'prefect', 'torch', 'litellm', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def remote(tmp_path: Path, **request: Any) -> dict[str, Any]:
    """What the uploaded program answers, run as it is in a cloud sandbox."""
    workspace = tmp_path / "workspace"
    workspace.mkdir(exist_ok=True)
    asked, sent = tmp_path / "request.json", tmp_path / "sent.bin"
    sent.write_bytes(request.pop("payload", b""))
    asked.write_text(json.dumps({"workspace": str(workspace), "payload": str(sent), **request}))
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from sandboxes.remote import main; main()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(asked)], capture_output=True, text=True, check=True, timeout=30
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_the_uploaded_program_runs_commands_as_the_local_sandbox_does(tmp_path: Path) -> None:
    base = {"op": "run", "timeout_s": 10, "env": {"A": "b"}, "cwd": "", "max_output": 4}
    plain = remote(tmp_path, **base | {"command": "echo $A; echo 123456 >&2; exit 3"})
    assert (plain["exit_code"], plain["dropped"]) == (3, 3)
    assert (base64.b64decode(plain["stdout"]), base64.b64decode(plain["stderr"])) == (b"b\n", b"1234")
    started = time.monotonic()
    assert remote(tmp_path, **base | {"command": "sleep 3 & echo x"})["exit_code"] == 0
    slow = remote(tmp_path, **base | {"command": "echo ab; sleep 100 | sleep 100", "timeout_s": 0.3})
    assert (slow["exit_code"], slow["timed_out"], base64.b64decode(slow["stdout"])) == (124, True, b"ab\n")
    assert remote(tmp_path, **base | {"command": "kill -9 $$"})["exit_code"] == 137
    assert remote(tmp_path, **base | {"command": "true", "cwd": "nope"})["exit_code"] == 126
    assert time.monotonic() - started < 10


def test_the_uploaded_program_reads_writes_and_carries_workspaces(tmp_path: Path) -> None:
    assert remote(tmp_path, op="write", path="a/b", payload=b"\x00\xff") == {}
    got = remote(tmp_path, op="read", path="a/b", max_bytes=10)
    assert Path(got["fetch"]).read_bytes() == b"\x00\xff"
    os.mkfifo(tmp_path / "workspace" / "fifo")
    assert "FIFO" in remote(tmp_path, op="read", path="fifo", max_bytes=10)["refused"]
    assert remote(tmp_path, op="read", path="none", max_bytes=10)["missing"]
    archive = Path(remote(tmp_path, op="export", max_bytes=1000)["fetch"])
    (tmp_path / "workspace" / "stale").write_text("goes")
    assert remote(tmp_path, op="import", max_bytes=1000, payload=archive.read_bytes()) == {}
    assert sorted(str(p.relative_to(tmp_path / "workspace")) for p in (tmp_path / "workspace").rglob("*")) == [
        "a",
        "a/b",
    ]
    for leftover in (archive, Path(got["fetch"])):
        leftover.unlink()


def test_an_unknown_option_is_pythons_own_error() -> None:
    with pytest.raises(TypeError):
        make_backend("mock", memory=3)
    assert asyncio.run(make_backend("mock").sweep("nothing")) == 0
