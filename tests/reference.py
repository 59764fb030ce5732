"""Old names, until all tests have moved."""
from helpers.engines import *   # noqa
from helpers.models import *   # noqa
from helpers.reference import *   # noqa
from helpers.models import load, VOCAB   # noqa
from helpers.gguf_files import *   # noqa
import pytest
def slow(*values): return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values]
def mark_slow_except(quick, values): return [x for value in values for x in ([value] if value in quick else slow(value))]
