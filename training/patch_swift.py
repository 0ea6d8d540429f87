"""`patch-swift`: writes the fix of the redundant first base-weight sync into an installed ms-swift, for those who start ms-swift without our plugin.

Our own GRPO applies the same rule at run time (training/patches.py). Only files whose digest is known are touched; what is inserted stands between
marked lines and `revert` takes exactly it out again. Standard library only.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import subprocess
from pathlib import Path
from typing import Final

from configs.errors import UserError
from configs.files import write_atomic
from training.base_sync import unsafe_reason

TARGET: Final = "rlhf_trainers/rollout_mixin.py"

KNOWN: Final = {
    "4.6.0": "5bf2ca9b283dab64a6f13dfca78ec57b5106e5074a55170cff55290adfab0934",
    "4.5.2": "d8090adba74eacf13705b564a82fe23be49a57688036b775aff45480a4676461",
}
"""ms-swift version → SHA-256 of its untouched file."""

BEGIN: Final = "# agentexecutor patch-swift: begin\n"
END: Final = "# agentexecutor patch-swift: end\n"

REMEMBER: Final = """\
        self._patch_load_format = (args.vllm_engine_kwargs or {}).get('load_format', 'auto')
"""

SKIP: Final = """\
        if not self.base_sync_done and tuner_type == 'lora':
            # vLLM has loaded the same base from the same folder: where that is certain, the adapter alone is sent.
            unsafe = _patch_unsafe_reason(self, self._patch_load_format)
            self.base_sync_done = not unsafe
            logger.info(f'patch-swift: first base sync kept: {unsafe}' if unsafe else 'patch-swift: first base sync skipped')
"""

ANCHORS: Final = (
    ("        self.base_sync_done = False\n", "after", REMEMBER),
    ("        if tuner_type == 'full' or (not self.base_sync_done or args.sleep_level == 2)", "before", SKIP),
)
"""Text that stands exactly once in the file, and what is put beside it."""

FIND: Final = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("swift")
version = importlib.metadata.version("ms-swift") if spec else ""
print(json.dumps([spec.submodule_search_locations[0] if spec else "", version]))
"""


def patch(environment_python: Path) -> str:
    """Patch the ms-swift of that interpreter; one sentence on what was done. Raises `UserError` for a missing, unknown or altered one."""
    file, version = find(environment_python)
    text = file.read_text(encoding="utf-8")
    if BEGIN in text:
        _check(remove(text), version, file)
        return f"{file} (ms-swift {version}) is already patched."
    _check(text, version, file)
    patched = insert(text)
    compile(patched, str(file), "exec")
    write_atomic(file, patched)
    return f"{file} (ms-swift {version}) is patched: a safe first base-weight sync is skipped."


def revert(environment_python: Path) -> str:
    """Take the patch out again; one sentence on what was done. Raises `UserError` like `patch`."""
    file, version = find(environment_python)
    text = file.read_text(encoding="utf-8")
    if BEGIN not in text:
        _check(text, version, file)
        return f"{file} (ms-swift {version}) is not patched."
    original = remove(text)
    _check(original, version, file)
    write_atomic(file, original)
    return f"{file} (ms-swift {version}) is as it was installed."


def find(environment_python: Path) -> tuple[Path, str]:
    """The file to patch and ms-swift's version in that environment; nothing of ms-swift is imported."""
    if not environment_python.is_file():
        raise UserError(
            f"{environment_python}: there is no such interpreter; make it with `python3 scripts/setup_env.py`, or set paths.train_python."
        )
    # -I: a folder named swift in the current directory is not the package
    done = subprocess.run(
        [str(environment_python), "-I", "-c", FIND], capture_output=True, text=True, timeout=60, check=False
    )
    folder, version = json.loads(done.stdout) if done.returncode == 0 else ("", "")
    if not folder:
        raise UserError(f"{environment_python}: ms-swift is not installed there; run `python3 scripts/setup_env.py`.")
    if version not in KNOWN:
        raise UserError(
            f"ms-swift {version} in {folder}: the patch is known for {' and '.join(KNOWN)} only; nothing was changed."
        )
    return Path(folder) / TARGET, version


def insert(text: str) -> str:
    """`text` with the patch in it."""
    for anchor, side, block in ANCHORS:
        if text.count(anchor) != 1:
            raise UserError(
                f"the place of the patch ({anchor.strip()!r}) is there {text.count(anchor)} times instead of once; nothing was changed."
            )
        marked = f"{BEGIN}{block}{END}"
        text = text.replace(anchor, anchor + marked if side == "after" else marked + anchor)
    rule = inspect.getsource(unsafe_reason).replace("def unsafe_reason(", "def _patch_unsafe_reason(")
    return f"{text}{BEGIN}\n\n{rule}{END}"


def remove(text: str) -> str:
    """`text` without the patch."""
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", "", text, flags=re.DOTALL)


def _check(text: str, version: str, file: Path) -> None:
    if hashlib.sha256(text.encode()).hexdigest() != KNOWN[version]:
        raise UserError(
            f"{file}: is not the file of ms-swift {version} as released; reinstall ms-swift, then run patch-swift again."
        )


def run(environment_python: Path, *, revert: bool = False, dry_run: bool = False) -> str:
    """What the command line calls."""
    if dry_run:
        file, version = find(environment_python)
        return f"would {'restore' if revert else 'patch'} {file} (ms-swift {version})"
    return _revert(environment_python) if revert else patch(environment_python)


_revert: Final = revert
