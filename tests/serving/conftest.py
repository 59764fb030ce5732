"""Models and servers of most files in this folder. A file may define its own under these names."""

import pytest
from helpers.models import tiny_model
from helpers.protocol import CHAT, SMALL
from helpers.commands import flags
from helpers.servers import LocalServer, checked

from tinyvllm import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model with a word tokenizer and a chat template that renders all messages."""
  return tiny_model(tmp_path_factory.mktemp("served"), words=True, chat_template=CHAT)


@pytest.fixture(scope="module")
def llm(folder):
  """The reference: the server's model in this process."""
  return LLM(folder, **SMALL)


@pytest.fixture(scope="module")
def server(folder): yield from checked(LocalServer(folder, *flags(**SMALL)))


@pytest.fixture(scope="module")
def limited(chat_folder):
  """A server with an API key, a model name, two allowed origins and small limits: 1 running and 2 waiting requests."""
  options = flags(dtype="float32", max_num_seqs=1, max_num_batched_tokens=4, scheduling_policy="priority", max_queue=2,
                  api_key="secret", max_body_size=4096, served_model_name="mine")
  origins = ["--allowed-origins", "http://b.example", '["http://page.example"]']
  yield from checked(LocalServer(chat_folder, *options, *origins))
