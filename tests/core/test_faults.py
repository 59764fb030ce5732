"""Errors that name the wrong cause, and internal errors reported as the user's."""
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.engines import check_invariants, greedy, ids_of, run_to_end, tokens
from helpers.reference import reference_greedy

from tinyvllm import SamplingParams, config


@pytest.mark.parametrize("parameter, value", [
  ("top_p", 2), ("temperature", "hot"), ("stop", [""]), ("logit_bias", {5: 101}), ("n", 0), ("seed", 2**63),
  *(("logit_bias", bias) for bias in ({"a": 1}, {"1.5": 1.0}, {1.5: 1.0}, {None: 1.0}, {5: 1, "x": 2}))], ids=str)
def test_input_error_has_parameter_and_value(parameter, value):
  with pytest.raises(config.InputError, match=parameter) as e: SamplingParams(**{parameter: value})
  message = str(e.value)
  assert isinstance(e.value, ValueError) and (e.value.parameter, e.value.value) == (parameter, value)
  assert repr(value) in message
  if parameter == "logit_bias" and value != {5: 101}:
    assert "token ids" in message and "int" in message and "between" not in message, "the keys are wrong"


@pytest.mark.parametrize("function", ["concatenate", "zeros"])
def test_internal_value_error_is_not_an_input_error(llm, folder, monkeypatch, function):
  ids = [5, 6, 7]
  fail = Mock(side_effect=ValueError("all the input array dimensions must match exactly"))
  llm.add_request("a", tokens(ids), greedy(8))
  llm.step()
  with monkeypatch.context() as patch:
    patch.setattr(np, function, fail)
    with pytest.raises(ValueError, match="must match exactly") as e: llm.step()
  assert not isinstance(e.value, config.InputError)
  check_invariants(llm)
  assert ids_of(run_to_end(llm, 100)["a"]) == reference_greedy(folder, ids, 8)
