"""The whole command line: importing a module of commands adds them to the application."""

from agentexecutor import loops, outcomes, steps, upkeep
from agentexecutor.options import app

__all__ = ["app", "loops", "outcomes", "steps", "upkeep"]
