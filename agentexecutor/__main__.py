"""`python -m agentexecutor` and the `agentexecutor` command: errors become one sentence and an exit code."""

from __future__ import annotations

import json
import sys

from agentexecutor.console import end_on_sigterm
from configs.errors import UserError, WorkFailed


def main() -> None:
    """Exit codes: 0 done, 1 the work failed, 2 bad usage or configuration, 130 interrupted."""
    from agentexecutor.cli import app

    end_on_sigterm()
    try:
        app()
    except (UserError, WorkFailed) as error:
        _say(str(error))
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept, and the same command goes on from there", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except OSError as error:  # a full or read-only disk, a file where a folder is expected
        _say(
            f"{error.filename or 'a file'}: {error.strerror or error}; free or fix it, then run the same command again."
        )
        raise SystemExit(1) from None


def _say(sentence: str) -> None:
    """The sentence for people, and for machines that asked for JSON an object on stdout."""
    print(f"error: {sentence}", file=sys.stderr)
    if "--json" in sys.argv:
        print(json.dumps({"error": sentence}, ensure_ascii=False))


if __name__ == "__main__":
    main()
