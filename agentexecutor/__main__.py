"""`python -m agentexecutor` and the `agentexecutor` command: errors become one sentence and an exit code."""

from __future__ import annotations

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
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept, and the same command goes on from there", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
