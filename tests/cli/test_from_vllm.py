"""Scripts written for vLLM: LLM's options, chats, prompts, tokenizers and sampling defaults."""
import json
import shutil
from pathlib import Path

import pytest
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.requests import flags
from helpers.servers import LocalServer
from helpers.tokenizers import byte_level_bpe

import tinyvllm
from tinyvllm import LLM, SamplingParams

# Arguments of vLLM's LLM at their defaults, or at values that scripts often use
VLLM = {"tokenizer": None, "tokenizer_mode": "auto", "skip_tokenizer_init": False, "trust_remote_code": True,
        "tensor_parallel_size": 1, "dtype": "float", "quantization": None, "revision": None, "tokenizer_revision": None,
        "seed": None, "gpu_memory_utilization": 0.5, "swap_space": 4, "cpu_offload_gb": 0, "enforce_eager": False,
        "disable_custom_all_reduce": False, "hf_token": None, "hf_overrides": None, "max_model_len": 64,
        "kv_cache_dtype": "auto", "download_dir": "/tmp", "load_format": "auto", "enable_chunked_prefill": True,
        "max_seq_len_to_capture": 8192, "disable_log_stats": True, "pipeline_parallel_size": 1, "enable_lora": False,
        "distributed_executor_backend": None, "speculative_config": None, "task": "generate", "runner": "auto",
        "max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 16, "enable_prefix_caching": True}
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}" \
  "{% if add_generation_prompt %}go{% endif %}{{ tools or '' }}{{ thinking }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("vllm"), words=True)


def first_ids(llm, params):
  return llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].token_ids


def test_options_without_effect_are_accepted(folder):
  plain = LLM(folder, dtype="float32", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8, block_size=16)
  params = SamplingParams(temperature=0.0, max_tokens=4)
  assert first_ids(LLM(model=folder, **VLLM), params) == first_ids(plain, params)
  assert LLM(folder, tokenizer=str(folder), **ENGINE).get_tokenizer(), "the model's own tokenizer"


@pytest.mark.parametrize("name,value", [("pipeline_parallel_size", 2), ("tokenizer", "other"), ("task", "classify")])
def test_option_at_unsupported_value_raises(folder, name, value):
  with pytest.raises(ValueError, match=f"^{name}={value!r} is not supported: .*leave it out$"):
    LLM(folder, **{name: value})


def test_seed_none_gives_different_outputs(folder):
  outputs = [first_ids(LLM(folder, **{**ENGINE, "seed": None}), SamplingParams(max_tokens=12)) for _ in range(2)]
  assert outputs[0] != outputs[1]   # equal with a probability below 10**-20


# Chats and prompts

def test_chat_several_conversations_equals_single():
  llm = LLM(**ENGINE)
  chats = [[{"role": "user", "content": text}] for text in ("Hello", "The cat")]
  params = SamplingParams(temperature=0.0, max_tokens=6)
  batch = [output.outputs[0].text for output in llm.chat(chats, params)]
  assert batch == [llm.chat(chat, [params])[0].outputs[0].text for chat in chats]


@pytest.mark.parametrize("options,text", [
  ({}, "user a \nb\nassistant cat \ngo"), ({"add_generation_prompt": False}, "user a \nb\nassistant cat \n"),
  ({"add_generation_prompt": False, "continue_final_message": True}, "user a \nb\nassistant cat "),
  ({"continue_final_message": True}, "user a \nb\nassistant cat "),
  ({"chat_template_kwargs": {"thinking": 1}, "tools": ["t"]}, "user a \nb\nassistant cat \ngo['t']1"),
  ({"chat_template": "{{ messages[0].content }}"}, "a \nb")])
def test_chat_vllm_options_are_applied(folder, tmp_path, options, text):
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
  parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
  chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "cat "}]
  llm = LLM(tmp_path, **ENGINE)
  output, = llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False, **options)
  assert output.prompt == text and output.prompt_token_ids == llm.get_tokenizer().encode(text, False)


@pytest.mark.parametrize("message,options,words", [
  ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, {}, "image_url.*not supported"),
  ({"content": "a"}, {}, "role"), ("a", {}, ""), ({"role": "user", "content": None}, {}, "content=None")])
def test_chat_invalid_message_raises(message, options, words):
  with pytest.raises(ValueError, match=f"^messages: .*{words}"): LLM(**ENGINE).chat([message], **options)


@pytest.mark.parametrize("is_file", [True, False])
def test_chat_template_option_replaces_the_models(folder, tmp_path, is_file):
  text = "{{ messages[0].content }}{{ ending }}"
  (tmp_path / "template.jinja").write_text(text)
  template = str(tmp_path / "template.jinja") if is_file else text
  llm = LLM(folder, **ENGINE, chat_template=template, default_chat_template_kwargs={"ending": "!"})
  chat = [{"role": "user", "content": "the cat"}]
  params = SamplingParams(max_tokens=1)
  assert llm.chat(chat, params)[0].prompt == "the cat!"
  assert llm.chat(chat, params, chat_template_kwargs={"ending": "?"})[0].prompt == "the cat?"


def test_text_prompt_and_tokens_prompt_give_equal_outputs(folder):
  llm = LLM(folder, **ENGINE)
  params = SamplingParams(temperature=0.0, max_tokens=3)
  ids = llm.get_tokenizer().encode("the cat")
  text, ids = llm.generate([tinyvllm.TextPrompt(prompt="the cat"), tinyvllm.TokensPrompt(prompt_token_ids=ids)], params)
  assert text.outputs[0].token_ids == ids.outputs[0].token_ids


def test_llm_engine_attribute_runs_requests(folder):
  llm = LLM(folder, **ENGINE)
  llm.llm_engine.add_request("mine", "the cat", SamplingParams(max_tokens=2, ignore_eos=True))
  while llm.llm_engine.has_unfinished_requests(): outputs = llm.llm_engine.step()
  assert [len(output.outputs[0].token_ids) for output in outputs] == [2]


def test_generate_takes_tuples_priorities_and_no_lora(folder):
  llm = LLM(folder, **{**ENGINE, "max_num_seqs": 1}, scheduling_policy="priority")
  params = SamplingParams(temperature=0.0, max_tokens=2)
  outputs = llm.generate(("the cat", "the dog"), (params, params), priority=[5, 1], lora_request=None)
  assert [output.prompt for output in outputs] == ["the cat", "the dog"]
  assert outputs[1].metrics.first_token_time < outputs[0].metrics.first_token_time
  with pytest.raises(ValueError, match="priority=.1. must have length 2"): llm.generate(["a"] * 2, priority=[1])
  with pytest.raises(ValueError, match="lora_request='x' is not supported"): llm.generate("a", lora_request="x")


# Tokenizers

def test_tokenizer_has_bos_token_id_and_vocab(folder):
  tokenizer = LLM(folder, **ENGINE).get_tokenizer()
  vocab = tokenizer.get_vocab()
  assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2) and len(vocab) == 320
  assert vocab["<s>"] == 1 and tokenizer.decode([vocab["▁the"]]) == "the"
  assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_tokenizer_json_has_bos_token_id_and_vocab(tmp_path):
  library = byte_level_bpe()
  library.add_special_tokens(["<bos>"])
  library.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<bos>"}')
  folder = tiny_model(tmp_path, tokenizer=False, vocab_size=library.get_vocab_size())
  tokenizer = LLM(folder, **ENGINE).get_tokenizer()
  assert tokenizer.get_vocab() == library.get_vocab() and tokenizer.bos_token_id == library.token_to_id("<bos>")


# Sampling parameters and their defaults

@pytest.fixture(scope="module")
def defaults_folder(tmp_path_factory):
  """A model with a generation_config.json."""
  folder = tiny_model(tmp_path_factory.mktemp("defaults"), words=True)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
  fields = {"temperature": 1.5, "top_k": 7, "top_p": None, "repetition_penalty": 1.1, "do_sample": True,
            "eos_token_id": 2}
  (folder / "generation_config.json").write_text(json.dumps(fields))
  return folder


def test_generation_config_sets_sampling_defaults(defaults_folder):
  defaults = SamplingParams(temperature=1.5, top_k=7, repetition_penalty=1.1)
  llm = LLM(defaults_folder, **ENGINE)
  assert llm.get_default_sampling_params() == defaults
  implicit, explicit = [first_ids(LLM(defaults_folder, **ENGINE), params) for params in (None, defaults)]
  assert implicit == explicit != first_ids(llm, SamplingParams())
  assert LLM(defaults_folder, **ENGINE, generation_config="vllm").get_default_sampling_params() == SamplingParams()


def test_override_generation_config_sets_sampling_defaults(defaults_folder):
  llm = LLM(defaults_folder, **ENGINE, override_generation_config={"temperature": 0.5, "max_new_tokens": 3})
  expected = SamplingParams(temperature=0.5, top_k=7, repetition_penalty=1.1, max_tokens=3)
  assert llm.get_default_sampling_params() == expected


@pytest.mark.parametrize("options,is_read", [([], True), (["--generation-config", "vllm"], False)])
def test_server_uses_generation_config_for_missing_fields(defaults_folder, options, is_read):
  defaults = {"temperature": 1.5, "top_k": 7, "repetition_penalty": 1.1}
  message = {"role": "user", "content": "the cat"}

  def texts(server, **fields):
    body = {"max_tokens": 8, "seed": 5, **fields}
    completion = server.post("/v1/completions", {"prompt": "the cat", **body}).json()["choices"][0]
    chat = server.post("/v1/chat/completions", {"messages": [message], **body}).json()["choices"][0]
    return completion["text"], chat["message"]["content"]
  with LocalServer(defaults_folder, *flags(**ENGINE), *options) as server:
    plain, explicit = texts(server), texts(server, **defaults)
    assert [a == b for a, b in zip(plain, explicit, strict=True)] == [is_read] * 2
    assert texts(server, temperature=0) != plain


def test_max_tokens_none_generates_to_max_model_len(folder):
  llm = LLM(folder, **{**ENGINE, "max_model_len": 32})
  output, = llm.generate("the cat", SamplingParams(max_tokens=None, ignore_eos=True))
  assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 32


def test_sampling_params_clone_is_equal_copy():
  params = SamplingParams(max_tokens=None, stop="x", logit_bias={"5": 1.0}, seed=7)
  assert params.clone() == params and params.clone() is not params


def test_best_of_is_accepted_if_equal_to_n():
  assert SamplingParams(best_of=1) == SamplingParams() and SamplingParams(n=2, best_of=2).n == 2
  with pytest.raises(ValueError, match="best_of=3 .*not supported.*n=2"): SamplingParams(n=2, best_of=3)


def test_detokenize_false_leaves_text_empty(folder):
  llm = LLM(folder, **ENGINE)
  fields = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
  params = SamplingParams(**fields, detokenize=False)
  plain, bare = [llm.generate("the cat", x)[0].outputs[0] for x in (SamplingParams(**fields), params.clone())]
  assert (bare.text, bare.token_ids) == ("", plain.token_ids) and plain.text
  assert sum(len(x.outputs[0].token_ids) for x in llm.generate_stream("the cat", params)) == 5
  with pytest.raises(ValueError, match="detokenize=False.*stop_token_ids"): SamplingParams(detokenize=False, stop="a")


# vLLM's introductory examples, with `tinyvllm` imported instead of `vllm`. ./model is a model folder
SCRIPTS = {
  "offline inference": """
from tinyvllm import LLM, SamplingParams
prompts = ["Hello", "The cat"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="./model", trust_remote_code=True, tensor_parallel_size=1)
for output in llm.generate(prompts, sampling_params):
  print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
assert [output.prompt for output in llm.generate(prompts, sampling_params)] == prompts
""", "chat": """
from tinyvllm import LLM
llm = LLM(model="./model")
sampling_params = llm.get_default_sampling_params()
conversation = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Who are you?"}]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
assert outputs[0].outputs[0].text
assert len(llm.chat([conversation] * 2, sampling_params, use_tqdm=True)) == 2
""", "structured outputs": """
from tinyvllm import LLM, SamplingParams, StructuredOutputsParams
llm = LLM(model="./model", max_model_len=200)
choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
assert llm.generate("This is wonderful:", choice)[0].outputs[0].text in ("Positive", "Negative")
regex = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]{1,9}@[a-z]{1,9}[.]com"), max_tokens=60)
assert llm.generate("An address:", regex)[0].outputs[0].text.endswith(".com")
"""}


@pytest.mark.parametrize("name", SCRIPTS)
def test_vllm_example_script_runs(tmp_path, monkeypatch, name):
  (tmp_path / "model").symlink_to(Path(tinyvllm.__file__).with_name("default_model"))
  monkeypatch.chdir(tmp_path)
  exec(SCRIPTS[name], {})
