"""What needs the tokenizer: which rows can be trained on, and whether SFT rows and rollouts start from the same tokens.

`check` runs `python -m training.encode …` in the train environment, supervised. The child uses ms-swift's own template, drops rows with their
reason, writes the others, and leaves a report:
`{"rows", "kept", "dropped": {reason: n}, "named": {reason: [row, …]}, "longest", "tokens", "trained_tokens", "compared"}`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final, Literal

from configs.errors import UserError, WorkFailed
from configs.files import read_jsonl, write_json, write_jsonl
from configs.run import Run
from training.environment import environment
from training.launch import plain
from training.supervise import run_child

Kind = Literal["sft", "rl"]

TOO_LONG: Final = "too_long"
NOTHING_TRAINED: Final = "no_trainable_token"
UNREADABLE: Final = "unreadable"
OTHER_PROMPT: Final = "prompt_differs"
"""The tokens of the row's start are not those that a rollout of the same task would start from. Nothing is trained then."""
NAMED: Final = 20


def check(
    run: Run, kind: Kind, rows: Path, out: Path, report: Path, *, limit: int, against: Path | None = None
) -> dict[str, Any]:
    """Write the usable rows of `rows` to `out` and return the report.

    `limit` is in tokens: of a whole row for sft, of the prompt for rl. `against` are rows of the other kind, whose prompts must be the same for the
    same task. Raises `UserError` for a file that holds no rows, `WorkFailed` when no row is left or prompts differ.
    """
    given = read_jsonl(rows)  # here, and not only in the child: a damaged file is the user's, and said at once
    if not given or not all(isinstance(row, dict) and "messages" in row for row in given):
        raise UserError(f"{rows}: holds no rows with `messages`; agentexecutor export writes them.")
    model = run.profile.model
    flags = ["--kind", kind, "--rows", str(rows), "--out", str(out), "--report", str(report), "--limit", str(limit)]
    flags += ["--model", str(run.profile.model_path), "--model_type", model.model_type, "--template", model.template]
    flags += ["--agent_template", model.agent_template, "--thinking", model.thinking]
    flags += ["--against", str(against)] if against is not None else []
    command = plain(run.profile, "training.encode", flags, environment("encode", run.profile))
    report.unlink(missing_ok=True)
    run_child(
        command,
        run.log(f"{kind}-encode"),
        name="the check of the rows",
        expect=lambda: None if report.is_file() else f"{report} is missing",
    )
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    dropped = ", ".join(f"{count} {reason}" for reason, count in found["dropped"].items() if count) or "none"
    if found["dropped"][OTHER_PROMPT]:
        raise WorkFailed(
            f"{rows}: {found['dropped'][OTHER_PROMPT]} prompts differ between SFT rows and rollouts (first: {found['named'][OTHER_PROMPT][0]}); "
            "collect, export and rl-prepare must use the same tools and template: run them again."
        )
    if not found["kept"]:
        raise WorkFailed(
            f"{rows}: no row is left to train on ({dropped} of {found['rows']}, limit {limit} tokens); see {report}."
        )
    run.event("encode", step=kind, **{key: value for key, value in found.items() if key != "named"})
    return found


class Encoder:
    """ms-swift's template of one model: token ids exactly as training and rollouts make them. Loads swift (about 8 s)."""

    def __init__(self, model: str, model_type: str, template: str, agent_template: str, thinking: str = "none") -> None:
        from swift.model import get_processor
        from swift.template import get_template

        from training.arguments import THINKING

        processor = get_processor(model, model_type=model_type)
        self.template = get_template(
            processor, template_type=template, agent_template=agent_template, enable_thinking=THINKING[thinking]
        )

    @classmethod
    def of(cls, template: Any) -> Encoder:
        """With a template that is loaded already; its mode is changed."""
        made = cls.__new__(cls)
        made.template = template
        return made

    def row(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Token ids and labels (-100 is not trained) of a whole row."""
        self.template.set_mode("train")
        encoded = self.template.encode(_plain(row))
        return list(encoded["input_ids"]), list(encoded["labels"])

    def prompt(self, row: dict[str, Any]) -> list[int]:
        """Token ids that a rollout of this row's task starts from, the assistant's opening included."""
        self.template.set_mode("transformers")
        start = [message for message in row["messages"] if message["role"] in ("system", "user")][:2]
        return list(self.template.encode(_plain({**row, "messages": start}))["input_ids"])


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("messages", "tools", "chat_template_kwargs") if row.get(key)}


def examine(
    encoder: Encoder, kind: Kind, rows: list[dict[str, Any]], limit: int, others: list[dict[str, Any]]
) -> tuple[list[Any], dict[str, Any]]:
    """The usable rows and the report."""
    reasons = (TOO_LONG, NOTHING_TRAINED, UNREADABLE, OTHER_PROMPT)
    dropped: Counter[str] = Counter(dict.fromkeys(reasons, 0))
    named: dict[str, list[str]] = {reason: [] for reason in reasons}
    known = {row["task_digest"]: encoder.prompt(row) for row in others if "task_digest" in row}
    kept: list[Any] = []
    longest = tokens = trained_tokens = compared = 0
    for number, row in enumerate(rows, start=1):
        name = f"line {number} ({row.get('task_id', 'unnamed')})"
        reason: str | None = None
        try:
            prompt = encoder.prompt(row)
            ids, labels = encoder.row(row) if kind == "sft" else (prompt, prompt)
        except Exception as error:  # a row that the template refuses is dropped, counted and named, whatever it raised
            dropped[UNREADABLE] += 1
            named[UNREADABLE].append(f"{name}: {type(error).__name__}: {error}")
            continue
        trained = sum(label != -100 for label in labels)
        same = known.get(row.get("task_digest", ""), prompt) == prompt
        compared += row.get("task_digest") in known
        if not same or ids[: len(prompt)] != prompt:
            reason = OTHER_PROMPT
        elif not trained:
            reason = NOTHING_TRAINED
        elif len(ids) > limit:
            reason = TOO_LONG
        if reason is not None:
            dropped[reason] += 1
            named[reason].append(f"{name}: {len(ids)} tokens")
            continue
        kept.append(row)
        longest, tokens, trained_tokens = max(longest, len(ids)), tokens + len(ids), trained_tokens + trained
    report = {
        "rows": len(rows),
        "kept": len(kept),
        "dropped": dict(dropped),
        "named": {reason: names[:NAMED] for reason, names in named.items()},
        "longest": longest,
        "tokens": tokens,
        "trained_tokens": trained_tokens if kind == "sft" else 0,
        "compared": compared,
    }
    return kept, report


def main(argv: list[str] | None = None) -> int:
    """The child: see `check`."""
    parser = argparse.ArgumentParser(prog="python -m training.encode")
    parser.add_argument("--kind", choices=("sft", "rl"), required=True)
    for name in ("rows", "out", "report"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--limit", type=int, required=True)
    for name in ("model", "model_type", "template", "agent_template", "thinking"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args(argv)
    rows, others = read_jsonl(args.rows), read_jsonl(args.against) if args.against else []
    encoder = Encoder(args.model, args.model_type, args.template, args.agent_template, args.thinking)
    kept, report = examine(encoder, args.kind, rows, args.limit, others)
    write_jsonl(args.out, kept)
    write_json(args.report, report)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
