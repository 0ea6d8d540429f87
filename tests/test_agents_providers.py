"""Providers and policies against a real local server with faults: each failure has its own reason, and only transient ones are retried."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable

import pytest
from agents_kit import Says

from agents.episode import Settings, run_episode
from agents.fake_llm import FakeLLM
from agents.generate import SAMPLE
from agents.llm import LLM, Failure, LLMError, from_status, retry_after
from agents.policy import PolicyLLM
from agents.prompts import SYSTEM, initial_messages
from agents.providers import LiteLLM, litellm_name
from agents.retry import Retrying
from agents.task import ToolCall
from agents.tools import schemas
from agents.trajectory import Message, Verdict
from agents.wire import to_policy, to_provider
from sandboxes import SandboxPool
from sandboxes.mock import MockBackend

KEY = "sk-for-the-tests-0123456789"

EXPECTED = {
    "401": Failure.BAD_KEY,
    "402": Failure.NO_BALANCE,
    "404": Failure.UNKNOWN_MODEL,
    "429": Failure.RATE_LIMITED,
    "500": Failure.SERVER_ERROR,
    "503": Failure.SERVER_ERROR,
    "html": Failure.NOT_AN_ANSWER,
    "empty": Failure.EMPTY_ANSWER,
    "cut": Failure.CUT_ANSWER,
    "hang": Failure.TIMEOUT,
    "overflow": Failure.CONTEXT_OVERFLOW,
    "policy": Failure.CONTENT_POLICY,
    "400": Failure.BAD_REQUEST,
}

CLIENTS: dict[str, Callable[[str], LLM]] = {
    "policy": lambda url: PolicyLLM(url, "sft", "hermes", timeout_s=0.5),
    "provider": lambda url: LiteLLM("some-model", url, timeout_s=0.5),
}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_API_KEY", KEY)


async def ask(llm: LLM) -> LLMError:
    with pytest.raises(LLMError) as caught:
        await llm.complete(initial_messages(SAMPLE), schemas(["bash", "write_file"]), max_tokens=64)
    return caught.value


@pytest.mark.parametrize("fault", EXPECTED)
@pytest.mark.parametrize("client", CLIENTS)
async def test_behaviour_21_every_fault_has_its_own_reason_and_is_sent_once(client: str, fault: str) -> None:
    async with FakeLLM([SAMPLE], faults={0: fault}) as server:
        error = await ask(CLIENTS[client](server.url))
    assert error.reason is EXPECTED[fault]
    assert error.retry_after_s == (2.0 if fault == "429" else None)
    assert len(server.requests) == 1
    assert KEY not in str(error)


@pytest.mark.parametrize("client", CLIENTS)
async def test_behaviour_21_a_refused_connection_has_its_own_reason(client: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        error = await ask(CLIENTS[client](f"http://127.0.0.1:{taken.getsockname()[1]}/v1"))
    assert error.reason is Failure.NO_CONNECTION


TRANSIENT = {"429", "500", "503", "html", "empty", "cut", "hang"}


@pytest.mark.parametrize("fault", EXPECTED)
async def test_behaviour_21_only_transient_failures_are_retried(fault: str) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with FakeLLM([SAMPLE], style="policy", faults={1: fault, 2: fault}) as server:
        llm = Retrying(PolicyLLM(server.url, "sft", "hermes", timeout_s=0.3), sleep=sleep, rng=random.Random(1))
        if fault in TRANSIENT:
            reply = await llm.complete(initial_messages(SAMPLE), [], max_tokens=64)
            assert reply.message.tool_calls == [SAMPLE.solution[0].model_copy(update={"id": "call_0"})]
            assert len(server.requests) == 3
        else:
            assert (await ask(llm)).reason is EXPECTED[fault]
            assert (len(server.requests), waits) == (1, [])
    if fault == "429":
        assert all(2.0 <= wait <= 3.0 for wait in waits)


async def test_behaviour_21_retries_have_jitter_and_end_with_their_budget() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    failing = Says([LLMError(Failure.SERVER_ERROR, "down")] * 50)
    error = await ask(Retrying(failing, calls=6, sleep=sleep, rng=random.Random(7)))
    assert error.reason is Failure.SERVER_ERROR
    assert len(failing.seen) == 6
    assert len(set(waits)) == 5
    assert all(0 <= wait <= 2**n for n, wait in enumerate(waits))
    patient = Says([LLMError(Failure.RATE_LIMITED, "later", retry_after_s=3600.0)] * 50)
    assert (await ask(Retrying(patient, sleep=sleep))).reason is Failure.RATE_LIMITED
    assert len(patient.seen) == 1  # an hour is beyond the budget: said at once


async def test_a_hanging_call_ends_at_its_deadline_even_where_the_client_has_none() -> None:
    llm = Retrying(
        Says(["hangs"] * 2), calls=2, call_timeout_s=0.05, wait_budget_s=5, sleep=lambda seconds: asyncio.sleep(0)
    )
    assert (await ask(llm)).reason is Failure.TIMEOUT


@pytest.mark.parametrize("client", CLIENTS)
async def test_behaviour_24_a_local_or_unknown_model_costs_null_and_the_tokens_are_counted(client: str) -> None:
    style = "policy" if client == "policy" else "provider"
    async with FakeLLM([SAMPLE], style=style) as server:  # type: ignore[arg-type]
        reply = await CLIENTS[client](server.url).complete(initial_messages(SAMPLE), [], max_tokens=64)
    assert reply.usage.cost_usd is None
    assert reply.usage.calls == 1
    assert reply.usage.prompt_tokens > 0 < reply.usage.completion_tokens


async def test_behaviour_24_a_model_with_a_known_price_costs_something() -> None:
    async with FakeLLM([SAMPLE]) as server:
        reply = await LiteLLM("openai/gpt-4o", server.url).complete(initial_messages(SAMPLE), [], max_tokens=64)
    assert reply.usage.cost_usd is not None
    assert reply.usage.cost_usd > 0


async def test_a_whole_episode_runs_against_a_policy_server_and_sends_its_raw_text_back() -> None:
    task = SAMPLE.model_copy(update={"verifier": SAMPLE.verifier.model_copy(update={"command": "test -f hello.py"})})
    async with (
        FakeLLM([task], style="policy") as server,
        PolicyLLM(server.url, "sft", "hermes", temperature=0.7, seed=5) as llm,
        SandboxPool(MockBackend(), run_id="t", concurrency=1) as pool,
    ):
        trajectory = await run_episode(task, lambda _: llm, pool, Settings(max_turns=4))
    assert trajectory.outcome.verdict is Verdict.PASSED
    first, second = server.requests
    assert {key: first[key] for key in ("model", "temperature", "seed", "return_details", "logprobs")} == {
        "model": "sft", "temperature": 0.7, "seed": 5, "return_details": True, "logprobs": True
    }  # fmt: skip
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][0]["content"] == SYSTEM
    assert second["messages"][2]["content"].encode() == bytes(trajectory.turns[0].token_ids or [])
    for turn in trajectory.turns:
        assert len(turn.loss_mask or []) == len(turn.token_ids or [])
        assert len(turn.logprobs or []) == sum(turn.loss_mask or [])


async def test_a_whole_episode_runs_against_a_provider_and_its_calls_are_paired_with_their_results() -> None:
    task = SAMPLE.model_copy(update={"verifier": SAMPLE.verifier.model_copy(update={"command": "test -f hello.py"})})
    async with FakeLLM([task]) as server, SandboxPool(MockBackend(), run_id="t", concurrency=1) as pool:
        trajectory = await run_episode(task, lambda _: LiteLLM("m", server.url), pool, Settings(max_turns=4))
    assert trajectory.outcome.verdict is Verdict.PASSED
    sent = server.requests[1]["messages"]
    assert sent[3]["role"] == "tool"
    assert sent[3]["tool_call_id"] == sent[2]["tool_calls"][0]["id"]


def test_an_unreadable_call_goes_back_to_a_provider_as_text_with_its_error_as_a_user_message() -> None:
    messages = [
        Message(
            role="assistant",
            content="<tool_call>\nbash {\n</tool_call>",
            tool_calls=[ToolCall(name="bash", arguments={}, id="a")],
        ),
        Message(role="tool", content="not run", tool_call_id="a"),
        Message(role="tool", content="exit_code: 1\nerror: broken"),
    ]
    assert [m["role"] for m in to_provider(messages)] == ["assistant", "tool", "user"]
    assert [m["role"] for m in to_policy(messages)] == ["assistant", "tool", "tool"]
    assert all(m["content"] is not None for m in to_policy([Message(role="assistant")]))


@pytest.mark.parametrize(
    ("model", "url", "name"),
    [
        ("deepseek-chat", "https://api.deepseek.com/v1", "deepseek/deepseek-chat"),
        ("deepseek-chat", "http://127.0.0.1:1/v1", "openai/deepseek-chat"),
        ("Qwen/Qwen3.8-27B", "http://127.0.0.1:1/v1", "openai/Qwen/Qwen3.8-27B"),
        ("anthropic/claude", "http://127.0.0.1:1/v1", "anthropic/claude"),
        ("gpt-4o", "", "gpt-4o"),
    ],
)
def test_litellm_is_told_the_provider_of_a_custom_endpoint(model: str, url: str, name: str) -> None:
    assert litellm_name(model, url, {"openai", "anthropic", "deepseek"}) == name


def test_retry_after_is_read_as_seconds_or_as_a_date() -> None:
    assert retry_after("3") == 3.0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after("soon") is None
    assert retry_after(None) is None


def test_an_empty_account_behind_a_429_is_not_a_rate_limit() -> None:
    assert from_status(429, '{"error": {"code": "insufficient_quota"}}').reason is Failure.NO_BALANCE
    assert from_status(502, "the context length service is down").reason is Failure.SERVER_ERROR
