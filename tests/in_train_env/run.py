"""Runs pytest in the train environment, which does not install it: `python run.py CONTROL_SITE_PACKAGES pytest-arguments …`.

The control environment's packages come last on the path, so that only what the train environment lacks is taken from there.
"""

import sys

sys.path.append(sys.argv[1])

import pytest

sys.exit(pytest.main(sys.argv[2:]))
