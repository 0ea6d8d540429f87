"""The multi-turn scheduler `agent_sandbox`: between ms-swift's turn loop and our rollouts. Imported by the plugin, inside the trainer only.

Colocate runs all rollouts of a step turn by turn: a turn costs its generation plus its slowest tool call.
"""

from __future__ import annotations

from copy import copy
from typing import Any, Final

from swift.rollout.multi_turn import MultiTurnScheduler

from agents.task import Task
from agents.trajectory import Message, StopReason, Trajectory, Turn
from training.rollout import Rollouts, from_environment

ROOM: Final = 8
"""Tokens that must be left for a next turn to be worth its generation."""


class AgentSandbox(MultiTurnScheduler):  # type: ignore[misc]
    """One sandbox per rollout. `rollout_infos` of a finished one: trajectory, family, verdict, stop_reason."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollouts: Rollouts = kwargs.get("rollouts") or from_environment()
        self._pending: dict[str, list[Message]] = {}

    async def on_trajectory_start(self, requests: list[Any]) -> None:
        await self.rollouts.start(
            {request.uuid: Task.model_validate_json(request.data_dict["task"]) for request in requests}
        )

    async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        rollout = infer_request.uuid
        turn = sampled_turn(response_choice, self._extract_logprobs_from_choice(response_choice))
        last = bool(self.max_turns) and current_turn >= self.max_turns
        step = await self.rollouts.turn(rollout, response_choice.message.content, turn, last=last)
        stop = step.stop
        if stop is None and not self._room(infer_request, step.messages):
            stop = StopReason.MAX_TOKENS
        if stop is None:
            self._pending[rollout] = step.messages
            return {}  # `done: False` would override ms-swift's own length check
        return {"done": True, "rollout_infos": infos(await self.rollouts.finish(rollout, stop))}

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """The next turn's request, with the sampled ids exactly as they are, stop token included: training/patches.py `one_separator`."""
        infer_request.messages += [
            {"role": "tool", "content": message.content} for message in self._pending.pop(infer_request.uuid)
        ]
        ids = list(response_choice.token_ids)
        return {"infer_request": infer_request, "response_token_ids": ids, "response_loss_mask": [1] * len(ids)}

    def _room(self, request: Any, results: list[Message]) -> bool:
        """Whether the next prompt fits the context: the engine raises for one that does not, which would end the training."""
        template = copy(self._template or self.infer_engine.template)
        template.set_mode("vllm")  # prompt ids only
        template.max_length = None  # it raises beyond its own limit
        messages = [*request.messages, *({"role": "tool", "content": result.content} for result in results)]
        inputs = {
            "messages": messages,
            "tools": request.tools,
            "chat_template_kwargs": request.chat_template_kwargs or {},
        }
        profile = self.rollouts.profile
        return len(template.encode(inputs)["input_ids"]) + ROOM <= min(
            profile.rollout.max_model_len, profile.model.max_length
        )


def sampled_turn(choice: Any, logprobs: list[float]) -> Turn:
    """What the sampler gave, unchanged."""
    ids = list(choice.token_ids)
    return Turn(
        token_ids=ids, logprobs=logprobs or None, loss_mask=[1] * len(ids), finish_reason=choice.finish_reason or ""
    )


def infos(trajectory: Trajectory) -> dict[str, Any]:
    """JSON that travels with the rollout to reward and record, also from a rollout server."""
    return {
        "trajectory": trajectory.model_dump(mode="json"),
        "family": trajectory.family,
        "verdict": str(trajectory.outcome.verdict),
        "stop_reason": str(trajectory.stop_reason),
    }
