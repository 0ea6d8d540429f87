"""Runs inside the grading sandbox: checks in one process, the graded code in another that never sees them. Standard library only.

The text of this module is put before the checks of an imported task (agents/importers.py). The process of the checks imports no graded code: it asks
the worker for calls by a pipe and compares values of exactly the built-in types. So graded code can lie about nothing but its own results.

Not closed: where the kernel lets processes of one user trace each other (no Yama), graded code could search the memory of the checks. Making that
process undumpable would close it, but a local sandbox ends whatever hides its descriptors.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """JSON of a value, by its built-in base type; `refer` makes the JSON of anything else."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return {"int": hex(int(value))}
    if isinstance(value, float):
        return {"float": float.hex(float(value))}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]}
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, refer) for item in kind.__iter__(value)]}
    if hasattr(type(value), "__next__"):
        return {"iterator": [encode(item, refer) for item in value]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), refer)
    return {"object": refer(value)}


def decode(value: Any, find: Callable[[Any], Any]) -> Any:
    """The value of such JSON, of exactly built-in types; `find` gives what a reference stands for."""
    if value is None or isinstance(value, (bool, str)):
        return value
    ((name, content),) = value.items()
    if name in SEQUENCES:
        return SEQUENCES[name](decode(item, find) for item in content)
    if name == "int":
        return int(content, 16)
    if name == "float":
        return float.fromhex(content)
    if name == "complex":
        return complex(float.fromhex(content[0]), float.fromhex(content[1]))
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "dict":
        return {decode(key, find): decode(item, find) for key, item in content}
    if name == "iterator":
        return iter([decode(item, find) for item in content])
    if name == "object":
        return find(content)
    raise ValueError("a value of no known kind")


def work(asked: BinaryIO, answers: BinaryIO) -> None:
    """The worker: imports `solution` from the working directory when first asked, and does what is asked until the pipe ends."""
    objects: list[Any] = []

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def do(kind: str, target: Any, *rest: Any) -> Any:
        if kind == "get":
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            return getattr(importlib.import_module("solution"), target)
        if kind == "call":
            return target(*rest[0], **rest[1])
        return getattr(target, rest[0]) if kind == "attribute" else setattr(target, rest[0], rest[1])

    for line in asked:
        try:
            answer = {"value": encode(do(*decode(json.loads(line), objects.__getitem__)), refer)}
        except BaseException as error:  # whatever graded code raises is its answer
            answer = {"raised": [type(error).__name__, str(error)[:500]]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


class Ended(Exception):
    """The graded code's process is gone or does not speak the protocol."""


class Worker:
    """The other process, as the checks see it."""

    def __init__(self, source: str) -> None:
        (its_in, our_out), (our_in, its_out) = os.pipe(), os.pipe()
        code = f"{source}\nwork(open({its_in}, 'rb'), open({its_out}, 'wb'))\n"
        subprocess.Popen([sys.executable, "-I", "-c", code], pass_fds=(its_in, its_out), stdin=subprocess.DEVNULL)
        os.close(its_in)
        os.close(its_out)
        self.asks, self.answers = os.fdopen(our_out, "wb"), os.fdopen(our_in, "rb")

    def ask(self, *request: Any) -> Any:
        """What the graded code answers. Raises what it raised, as the built-in error of that name, and `Ended`."""
        text = json.dumps(encode(list(request), _number))
        try:
            self.asks.write(text.encode() + b"\n")
            self.asks.flush()
            answer = json.loads(self.answers.readline())
            if "value" in answer:
                return decode(answer["value"], lambda number: Remote(self, int(number)))
            name, message = answer["raised"]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Ended(f"the solution's process ended, or answered nonsense ({type(error).__name__})") from None
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
            raise kind(f"{name}: {message}")
        raise RuntimeError(f"{name}: {message}")


class Remote:
    """Something of the graded code's that is no plain value: it can be called, and its attributes read and set. It equals only itself."""

    __slots__ = ("_number", "_worker")

    def __init__(self, worker: Worker, number: int) -> None:
        object.__setattr__(self, "_worker", worker)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._worker.ask("call", self, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._worker.ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._worker.ask("set", self, name, value)


def _number(value: Any) -> int:
    if type(value) is not Remote:
        raise TypeError(
            f"checks can pass plain values to the solution, and what came from it, but no {type(value).__name__}"
        )
    return int(value._number)


def judge(source: str, path: str, reference: str, names: list[str], tests: list[str]) -> None:
    """Run `tests` over `reference`, whose `names` are the graded code's instead. Exits 1 with a sentence at the first that fails.

    `path` holds the checks and is removed before graded code runs; nothing that another process can read holds them then.
    """
    os.unlink(path)
    worker = Worker(source)  # imports nothing of the solution before it is asked to
    space: dict[str, Any] = {"__name__": "checks"}
    number = 0
    try:
        exec(reference, space)
        space.update((name, worker.ask("get", name)) for name in names)
        for test in tests:
            number += 1
            exec(test, space)
    except Exception as error:
        what = f"check {number} of {len(tests)}" if number else "the solution cannot be loaded"
        raise SystemExit(f"{what}: {type(error).__name__}: {str(error)[:500]}") from None
