"""Bring a model into models/: `python scripts/download_model.py [MODEL] [--profile NAME]`.

Without an argument it is the profile's model; MODEL is a local folder or a ModelScope id. An interrupted download is continued, a finished one is
checked. Runs itself again in the train environment, where the libraries are; what it does is training/models.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / ".venv-train"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Bring the profile's model, or MODEL, into models/; resumable and checked."
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="local model folder or ModelScope id, instead of the profile's own"
    )
    parser.add_argument("--profile", help="shipped profile or YAML file; default: by the NVIDIA GPUs of this machine")
    arguments = parser.parse_args()
    if Path(sys.prefix).resolve() != TRAIN:
        python = TRAIN / "bin" / "python"
        if not python.exists():
            print(f"download_model.py: {python} is missing; run `python3 scripts/setup_env.py` first.", file=sys.stderr)
            raise SystemExit(2)
        os.execv(python, [str(python), *sys.argv])

    from configs.errors import UserError, WorkFailed
    from training.models import provision_for

    try:
        print(provision_for(arguments.profile, arguments.model), flush=True)
    except (UserError, WorkFailed) as error:
        print(f"download_model.py: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("download_model.py: interrupted; run the same command again, it goes on.", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
