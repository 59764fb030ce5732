"""Scripts written for vLLM: LLM's options, chats, prompts, tokenizers and sampling defaults."""
import json

import pytest
from helpers.data import read_data
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.commands import flags
from helpers.servers import LocalServer

from tinyvllm import LLM, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt

# arguments: of vLLM's LLM at their defaults, or at values that scripts often use. chats: prompts by options of LLM.chat
VLLM = read_data("vllm_options.json")


def first_ids(llm, params): return llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].token_ids


def test_options_without_effect_are_accepted(words_folder):
  names = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")
  arguments = VLLM["arguments"]
  engines = [LLM(model=words_folder, **x) for x in (arguments, {name: arguments[name] for name in names})]
  outputs = [first_ids(llm, SamplingParams(temperature=0.0, max_tokens=4)) for llm in engines]
  assert outputs[0] == outputs[1]
  assert LLM(words_folder, tokenizer=str(words_folder), **ENGINE).get_tokenizer(), "the model's own tokenizer"


# Chats and prompts

def test_introductory_examples_run_with_bundled_model():
  llm = LLM(trust_remote_code=True, tensor_parallel_size=1)
  prompts = ["Hello", "The cat"]
  assert [x.prompt for x in llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95))] == prompts
  choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
  assert llm.generate("This is wonderful:", choice)[0].outputs[0].text in ("Positive", "Negative")
  hello, cat = ({"role": "user", "content": text} for text in prompts)
  chats = [[hello], [{"role": "system", "content": "Be kind."}, hello, {"role": "assistant", "content": "Hi!"}, cat]]
  params = SamplingParams(temperature=0.0, max_tokens=6)
  batch = [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=True)]
  assert batch == [llm.chat(chat, [params])[0].outputs[0].text for chat in chats] and all(batch)


@pytest.mark.parametrize("case", VLLM["chats"])
def test_chat_vllm_options_are_applied(tmp_path, case):
  folder = tiny_model(tmp_path, words=True, chat_template=VLLM["template of chats"])
  parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
  chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "cat "}]
  llm = LLM(folder, **ENGINE, default_chat_template_kwargs={"ending": "!"})
  output, = llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False, **case["options"])
  assert output.prompt == case["prompt"]
  assert output.prompt_token_ids == llm.get_tokenizer().encode(case["prompt"], False)


def test_generate_takes_tuples_priorities_and_no_lora(words_folder):
  llm = LLM(words_folder, **{**ENGINE, "max_num_seqs": 1}, scheduling_policy="priority")
  params = SamplingParams(temperature=0.0, max_tokens=2)
  ids = llm.llm_engine.get_tokenizer().encode("the cat")
  prompts = TextPrompt(prompt="the cat"), TokensPrompt(prompt_token_ids=ids)
  first, second = llm.generate(prompts, (params, params), priority=[5, 1], lora_request=None)
  assert first.prompt == "the cat" and first.outputs[0].token_ids == second.outputs[0].token_ids
  assert second.metrics.first_token_time < first.metrics.first_token_time


# Sampling parameters and their defaults

DEFAULTS = {"temperature": 1.5, "top_k": 7, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def defaults_folder(tmp_path_factory):
  """A model with a generation_config.json."""
  folder = tiny_model(tmp_path_factory.mktemp("defaults"), words=True, chat_template="{{ messages[0].content }}")
  fields = {"top_p": None, "do_sample": True, "eos_token_id": 2}
  (folder / "generation_config.json").write_text(json.dumps(DEFAULTS | fields))
  return folder


@pytest.mark.parametrize("options,fields", VLLM["sampling defaults"])
def test_generation_config_and_its_override_set_sampling_defaults(defaults_folder, options, fields):
  first, second = (LLM(defaults_folder, **ENGINE, **options) for _ in range(2))
  assert first.get_default_sampling_params() == SamplingParams(**fields)
  assert first_ids(first, None) == first_ids(second, SamplingParams(**fields))


@pytest.mark.parametrize("options,is_read", [([], True), (["--generation-config", "vllm"], False)])
def test_server_uses_generation_config_for_missing_fields(defaults_folder, options, is_read):
  message = {"role": "user", "content": "the cat"}

  def texts(server, **fields):
    body = {"max_tokens": 8, "seed": 5, **fields}
    completion = server.post("/v1/completions", {"prompt": "the cat", **body}).json()["choices"][0]
    chat = server.post("/v1/chat/completions", {"messages": [message], **body}).json()["choices"][0]
    return completion["text"], chat["message"]["content"]
  with LocalServer(defaults_folder, *flags(**ENGINE), *options) as server:
    plain, explicit = texts(server), texts(server, **DEFAULTS)
    assert [a == b for a, b in zip(plain, explicit, strict=True)] == [is_read] * 2
    assert texts(server, temperature=0) != plain


def test_detokenize_false_leaves_text_empty(words_llm):
  plain, bare = (SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=x) for x in (True, False))
  copy = bare.clone()
  assert copy == bare and copy is not bare
  plain, empty = [words_llm.generate("the cat", params)[0].outputs[0] for params in (plain, copy)]
  assert (empty.text, empty.token_ids) == ("", plain.token_ids) and plain.text
  assert sum(len(x.outputs[0].token_ids) for x in words_llm.generate_stream("the cat", bare)) == 5
