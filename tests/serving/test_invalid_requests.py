"""Invalid fields, unknown models and unknown routes: the status, the field, and the cause in one line. The requests are
in data/invalid_requests.json."""
import pytest
from helpers.agents import start
from helpers.invalid_values import check_refused, refused_requests
from helpers.servers import checked


@pytest.fixture(scope="module")
def server(tmp_path_factory): yield from checked(start(tmp_path_factory.mktemp("refused")))


@pytest.mark.parametrize("path,body,status,param,words", refused_requests("text"), ids=lambda x: str(x)[:60])
def test_invalid_request_is_refused_and_its_field_named(server, path, body, status, param, words):
  check_refused(server, path, body, status, param, words)
