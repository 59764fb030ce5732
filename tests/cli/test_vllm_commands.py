"""Command lines of vLLM's documentation, recipes and deployment examples, at the level of parsing: each is accepted, or
refused in one line that names the option and its value."""
import logging
import shlex

import pytest
from helpers.commands import error_line, run_command

from tinyvllm import LLM, InputError
from tinyvllm.config import EngineConfig
from tinyvllm_extra.flags import select_options
from tinyvllm_extra.server.app import parse
from tinyvllm_extra.vllm_options import NO_EFFECT, ModelOptions, expand, parse_value, read_config, split_options

# Accepted command lines, without `vllm serve`: quickstart, docs of a feature, recipes, Docker, Kubernetes, Helm
ACCEPTED = r"""
Qwen/Qwen2.5-1.5B-Instruct
NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123
meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 1 --max-model-len 2048 --host 0.0.0.0 --port 8000
meta-llama/Llama-3.2-1B-Instruct --max-model-len 4k --max-num-batched-tokens 2K
--model mistralai/Mistral-7B-Instruct-v0.3 --trust-remote-code --enable-chunked-prefill --max_num_batched_tokens 1024
--model facebook/opt-125m --port 8080 --disable-log-requests
--host=0.0.0.0 --port=8000 --model=TinyLlama/TinyLlama-1.1B-Chat-v1.0 --dtype=half --max-model-len=2048
Qwen/Qwen3-8B --max-num-batched-tokens 16384 --gpu-memory-utilization 0.8
Qwen/Qwen3-4B --host 0.0.0.0 --port 8000
Qwen/Qwen3-32B --host 0.0.0.0 --port 8000 --tensor-parallel-size 2
Qwen/Qwen2.5-32B -tp 2 -q awq
Qwen/Qwen2.5-7B-Instruct -tp=2 -pp 1 -dp 1
Qwen/Qwen2.5-7B-Instruct-AWQ --quantization awq_marlin --dtype float16
TheBloke/Llama-2-7B-Chat-GPTQ --quantization gptq --dtype half --enforce-eager
meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json --chat-template {template}
NousResearch/Hermes-3-Llama-3.1-8B --enable-auto-tool-choice --tool-call-parser hermes
Qwen/Qwen2.5-7B-Instruct --enable-auto-tool-choice --tool-call-parser hermes --max-model-len 32768
Qwen/Qwen3-0.6B --chat-template {template} --chat-template-content-format string
Qwen/Qwen3-8B --default-chat-template-kwargs '{{"enable_thinking": false}}'
meta-llama/Llama-3.1-8B-Instruct --served-model-name llama llama-3.1 gpt-4o
meta-llama/Llama-3.1-8B-Instruct --api-key key-1 key-2 --served-model-name llama
meta-llama/Llama-3.1-8B-Instruct --root-path /llm --port 8080
meta-llama/Llama-3.1-8B-Instruct --uds /tmp/vllm.sock
meta-llama/Llama-3.1-8B-Instruct --ssl-keyfile {key} --ssl-certfile {key} --ssl-cert-reqs 0
meta-llama/Llama-3.1-8B-Instruct --ssl-certfile {key} --ssl-keyfile {key} --ssl-ca-certs {key}
--config {config}
meta-llama/Llama-3.1-8B-Instruct --config {config} --port 9000
meta-llama/Llama-3.1-8B-Instruct --generation-config vllm
meta-llama/Llama-3.1-8B-Instruct --generation-config auto --override-generation-config '{{"temperature": 0.6}}'
Qwen/Qwen3-8B --override-generation-config '{{"temperature":0.6,"top_p":0.95,"top_k":20}}' --max-logprobs 20
Qwen/Qwen3-8B --override-generation-config.temperature 0.6 --override-generation-config.top_k 20
meta-llama/Llama-3.1-8B-Instruct --speculative-config '{{"method": "ngram", "num_speculative_tokens": 5}}'
Qwen/Qwen3-8B --speculative-config.method ngram --speculative-config.num_speculative_tokens 3
meta-llama/Llama-3.1-8B-Instruct -O3
meta-llama/Llama-3.1-8B-Instruct -O 3 --async-scheduling
meta-llama/Llama-3.1-8B-Instruct -O.level=3 --no-enable-prefix-caching
openai/gpt-oss-20b -cc.pass_config.fuse_rope_kvcache=True -cc.use_inductor_graph_partition=True --block-size 64
meta-llama/Llama-3.1-8B-Instruct --compilation-config '{{"cudagraph_mode": "FULL_AND_PIECEWISE"}}'
meta-llama/Llama-3.1-8B-Instruct --compilation_config.pass_config.fuse_allreduce_rms true --optimization-level 2
meta-llama/Llama-3.1-8B-Instruct --cuda-graph-sizes 1 2 4 8 --max-seq-len-to-capture 8192
meta-llama/Llama-3.1-8B-Instruct --attention-backend FLASHINFER --enable-flashinfer-autotune
openai/gpt-oss-120b --tensor-parallel-size 8 --async-scheduling --gpu-memory-utilization 0.95 --no-enable-prefix-caching
zai-org/GLM-4.7 -tp 8 --gpu-memory-utilization 0.9 --disable-log-requests --no-enable-prefix-caching --trust-remote-code
nvidia/Llama-3.1-8B-Instruct-FP8 --kv-cache-dtype fp8 --async-scheduling --trust-remote-code
meta-llama/Llama-3.1-8B-Instruct --kv-cache-dtype fp8_e4m3 --disable-custom-all-reduce --disable-cascade-attn
meta-llama/Llama-3.1-8B-Instruct --distributed-executor-backend mp --tensor-parallel-size 2
meta-llama/Llama-3.1-8B-Instruct --distributed-executor-backend ray --swap-space 16 --disable-log-stats
Qwen/Qwen3-8B --enable-prefix-caching --max-num-seqs 256 --seed 42 --disable-uvicorn-access-log
Qwen/Qwen3-8B --prefix-caching-hash-algo sha256 --max-num-partial-prefills 2 --long-prefill-token-threshold 2048
Qwen/Qwen3-8B --scheduling-policy priority --num-gpu-blocks-override 4096 --block-size 32
Qwen/Qwen3-8B --load-format fastsafetensors --safetensors-load-strategy eager --use-tqdm-on-load
Qwen/Qwen3-8B --load-format safetensors --model-loader-extra-config '{{"concurrency": 16}}'
Qwen/Qwen3-8B --tokenizer Qwen/Qwen3-8B --tokenizer-mode auto --config-format auto --model-impl vllm
Qwen/Qwen3-8B --download-dir /models --hf-overrides '{{}}' --code-revision main
Qwen/Qwen3-8B --uvicorn-log-level warning --max-log-len 100 --disable-access-log-for-endpoints /health,/metrics,/ping
Qwen/Qwen3-8B --allowed-origins '["http://localhost:3000"]' --allowed-methods '["*"]' --allowed-headers '["*"]'
Qwen/Qwen3-8B --enable-request-id-headers --enable-prompt-tokens-details --enable-server-load-tracking
Qwen/Qwen3-8B --structured-outputs-config '{{"backend": "xgrammar"}}' --response-role assistant
Qwen/Qwen3-8B --structured-outputs-config.backend guidance --shutdown-timeout 60 --stream-interval 4
Qwen/Qwen3-8B --guided-decoding-backend xgrammar --num-scheduler-steps 8 --use-v2-block-manager
Qwen/Qwen3-8B --data-parallel-size 1 --pipeline-parallel-size 1 --api-server-count 1 --nnodes 1 --node-rank 0
Qwen/Qwen3-8B --enable-expert-parallel --all2all-backend allgather_reducescatter --moe-backend triton
Qwen/Qwen3-8B --limit-mm-per-prompt '{{"image": 2, "video": 0}}' --mm-processor-cache-gb 0 --language-model-only
Qwen/Qwen3-8B --limit-mm-per-prompt.video 0 --mm-encoder-tp-mode data --allowed-local-media-path /
JetBrains/Mellum2-12B-A2.5B-Instruct --max-model-len auto --trust-remote-code --tensor-parallel-size 1
meta-llama/Llama-3.1-8B-Instruct --max-model-len -1 --task generate --runner generate --device auto
meta-llama/Llama-3.1-8B-Instruct --max-model-len 25.6k --cudagraph-capture-sizes 1 2 4 --max-cudagraph-capture-size 512
Qwen/Qwen3-8B --reasoning-parser qwen3
Qwen/Qwen3-Coder-30B --enable-auto-tool-choice --tool-call-parser qwen3_coder
/model --served-model-name muse --tensor-parallel-size 1 --generation-config auto --enable-auto-tool-choice
meta-llama/Llama-3.1-8B-Instruct --no-enable-lora --max-loras 4 --max-lora-rank 64 --cpu-offload-gb 0
Qwen/Qwen3-8B --max-logprobs 100 --trust-request-chat-template
Qwen/Qwen3-Embedding-0.6B --runner pooling
""".strip().splitlines()

# Refused command lines, and the start of the message
REFUSED = {
  "deepseek-ai/DeepSeek-V3.1 --pipeline-parallel-size 2": "pipeline_parallel_size=2",
  "Qwen/Qwen3.5-397B-A17B-FP8 -dp 8 --enable-expert-parallel": "data_parallel_size=8",
  "mistralai/Ministral-3-3B-Instruct-2512 --tokenizer_mode mistral": "tokenizer_mode='mistral'",
  "Qwen/Qwen3-8B --runner draft": "runner='draft'",
  "meta-llama/Llama-2-7b-hf --enable-lora --lora-modules sql-lora=/lora": "enable_lora=True",
  "meta-llama/Llama-2-7b-hf --lora-modules a=/lora b=/lora": "lora_modules=['a=/lora', 'b=/lora']",
  "baidu/ERNIE-4.5-VL-424B-A47B-PT --cpu-offload-gb 50": "cpu_offload_gb=50",
  "Qwen/Qwen3-8B --kv-transfer-config '{\"kv_connector\": \"LMCacheConnectorV1\"}'": "kv_transfer_config=",
  "Qwen/Qwen3-8B --hf-overrides '{\"max_position_embeddings\": 65536}'": "hf_overrides=",
  "Qwen/Qwen3-8B --rope-scaling '{\"rope_type\": \"yarn\", \"factor\": 4.0}'": "rope_scaling=",
  "Qwen/Qwen3-8B --tokenizer other/tokenizer": "tokenizer='other/tokenizer'",
  "Qwen/Qwen3-8B --load-format dummy": "load_format='dummy'",
  "Qwen/Qwen3-8B --middleware my.Module": "middleware='my.Module'",
  "Qwen/Qwen3-8B --chat-template ./nowhere.jinja": "chat_template='./nowhere.jinja' cannot be read",
  "Qwen/Qwen3-8B --override-generation-config '{\"temperature\": -1}'": "override_generation_config: temperature=-1",
  "Qwen/Qwen3-8B --config nowhere.yaml": "config='nowhere.yaml' cannot be read",
  "Qwen/Qwen3-8B --ssl-keyfile key.pem": "ssl_keyfile='key.pem'"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("vllm")
  paths = {name: folder / name for name in ("template", "key", "config")}
  paths["template"].write_text("{{ messages[0].content }}")
  paths["key"].write_text("")
  paths["config"].write_text("model: facebook/opt-125m\nhost: 127.0.0.1\nport: 8001\nmax_model_len: 1k\n"
                             "trust-remote-code: true\nenable-prefix-caching: false\nserved-model-name: [a, b]\n"
                             "override-generation-config: {temperature: 0.5}\nswap-space: null\n")
  return paths


def parse_command(command, files): return parse(shlex.split(command.format(**files)))


@pytest.mark.parametrize("command", ACCEPTED)
def test_command_of_vllm_is_accepted(command, files):
  model, _, _ = parse_command(command, files)
  assert model


@pytest.mark.parametrize("command", REFUSED)
def test_command_with_missing_feature_is_one_line_and_exit_code_1(command):
  line = error_line(run_command("serve", *shlex.split(command)))
  assert line.startswith(f"tinyvllm: {REFUSED[command]}")


# Words of the command line

def test_values_reach_the_options(files):
  command = "m --max-model-len 1k -tp 2 -q awq_marlin --max_num_seqs 7 --no-enable-prefix-caching --swap-space 4"
  _, engine, _ = parse_command(command, files)
  assert engine == {"max_model_len": 1000, "tensor_parallel_size": 2, "quantization": "awq_marlin", "max_num_seqs": 7,
                    "enable_prefix_caching": False, "swap_space": 4}


@pytest.mark.parametrize("words,expanded", [
  ("a -b ./x-y -1", "a -b ./x-y -1"), ("--max_num_seqs 7", "--max-num-seqs 7"), ("--a_b=c_d", "--a-b=c_d"),
  ("-tp 2", "--tensor-parallel-size 2"), ("-tp=2", "--tensor-parallel-size=2"), ("-O3", "--compilation-config=3"),
  ("-O 3", "--compilation-config 3"), ("--cuda_graph_sizes 1 2", "--cudagraph-capture-sizes 1 2"),
  ("--x.a 1 y", 'y --x {"a": 1}'), ("-cc.a=b=c", '--compilation-config {"a": "b=c"}'),
  ("--x.a=None --x.b.c d --x_x.b_b 2", '--x {"a": null, "b": {"c": "d"}} --x-x {"b_b": 2}'),
  ("--x.a.b 1 --x.a.c=2 --x.d", '--x {"a": {"b": 1, "c": 2}, "d": ""}')])
def test_expand_returns_full_flags_and_joins_parts_of_json(words, expanded):
  """The result is shown in one line: JSON holds spaces."""
  assert " ".join(expand(words.split())) == expanded


def test_json_flag_in_parts_equals_json(files):
  whole = parse_command("""m --speculative-config '{{"method": "ngram", "a": {{"b": 1, "c": "x"}}}}'""", files)
  parts = "m --speculative-config.method ngram --speculative-config.a.b=1 --speculative_config.a.c x"
  assert parse_command(parts, files) == whole


@pytest.mark.parametrize("text,value", [("1", 1), ("[1]", [1]), ('{"a": true}', {"a": True}), ("None", None),
                                        ("null", None), ("none", "none"), ("a b", "a b"), ("", "")])
def test_parse_value_reads_json_none_or_text(text, value): assert parse_value(text) == value


# --config

def test_config_file_applies_unless_command_line_sets_option(files):
  model, engine, server = parse_command("--config {config} --port 9000 --served-model-name c", files)
  assert (model, server.port, server.host, server.served_model_name) == ("facebook/opt-125m", 9000, "127.0.0.1", ["c"])
  assert engine == {"max_model_len": 1000, "enable_prefix_caching": False, "trust_remote_code": True,
                    "override_generation_config": {"temperature": 0.5}}
  assert parse_command("other --config {config}", files)[0] == "other"


def test_read_config_returns_words(files):
  assert read_config(str(files["config"])) == [
    "--model=facebook/opt-125m", "--host=127.0.0.1", "--port=8001", "--max-model-len=1k", "--trust-remote-code",
    "--no-enable-prefix-caching", "--served-model-name", "a", "b", '--override-generation-config={"temperature": 0.5}']


@pytest.mark.parametrize("content,words", [(None, "cannot be read"), ("a: [", "cannot be read"), ("- a", "must hold"),
                                           ("", "must hold")])
def test_invalid_config_file_raises(tmp_path, content, words):
  path = tmp_path / "config.yaml"
  if content is not None: path.write_text(content)
  with pytest.raises(InputError, match=f"^config='{path}' {words}"): read_config(str(path))


# Options

def test_ignored_options_are_logged_in_one_line(caplog):
  with caplog.at_level(logging.INFO, "tinyvllm"): LLM(trust_remote_code=True, swap_space=4, max_num_seqs=2)
  line, = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
  assert line.endswith(": swap_space=4, trust_remote_code=True")
  caplog.clear()
  with caplog.at_level(logging.INFO, "tinyvllm"): LLM(max_num_seqs=2)
  assert "without effect" not in caplog.text


def test_options_are_disjoint():
  assert not NO_EFFECT.keys() & {*EngineConfig.__match_args__, *ModelOptions.__match_args__}


@pytest.mark.parametrize("options,engine", [
  ({"quantization": "awq_marlin", "swap_space": 4}, {"quantization": "awq"}),
  ({"quantization": "gptq_marlin", "tokenizer": None}, {"quantization": "gptq"}),
  ({"kv_cache_dtype": "fp8_e4m3", "revision": "x"}, {"kv_cache_dtype": "fp8"}),
  ({"max_model_len": -1, "tokenizer": "m"}, {"max_model_len": None}), ({"max_model_len": 9}, {"max_model_len": 9})])
def test_split_options_returns_the_engines_options(options, engine):
  before = dict(options)
  assert split_options(options, "m")[0] == engine and options == before


def test_split_options_returns_model_options():
  defaults = ModelOptions()
  assert split_options({"revision": "x", "max_logprobs": -1})[1] == ModelOptions(revision="x", max_logprobs=-1)
  assert split_options({"task": "embed"})[1].runner == "pooling" and split_options({"task": "generate"})[1] == defaults
  assert split_options({"task": "embed", "runner": "generate"})[1].runner == "generate"
  assert (defaults.max_logprobs, defaults.runner, defaults.default_chat_template_kwargs) == (20, "auto", None)


@pytest.mark.parametrize("options,message", [
  ({"nnodes": 2}, "nnodes=2 is not supported: use 1, or leave it out"),
  ({"enable_lora": True}, "enable_lora=True is not supported: use False, or leave it out"),
  ({"hf_token": "x"}, "hf_token='x' is not supported: leave it out"),
  ({"config_format": "mistral"}, "config_format='mistral' is not supported: use 'auto', 'hf', or leave it out"),
  ({"tokenizer": "m2"}, "tokenizer='m2' is not supported"), ({"max_model_len": 0}, "max_model_len=0 must be"),
  ({"override_generation_config": {"do_sample": True}},
   "override_generation_config: 'do_sample' must be one of temperature"),
  ({"override_generation_config": {"max_new_tokens": 0}}, "override_generation_config: max_tokens=0 must be"),
  ({"chat_template": "/nowhere.jinja"}, "chat_template='/nowhere.jinja' cannot be read: No such file"),
  ({"max_logprobs": -2}, "max_logprobs=-2 must be"), ({"runner": "x"}, "runner='x' must be")])
def test_split_options_refuses_values_with_an_effect(options, message):
  with pytest.raises(InputError) as error: split_options(options, "m")
  assert str(error.value).startswith(message)


@pytest.mark.parametrize("template", ["{{ messages }}", "several\nlines", "{% raw %}", ""])
def test_chat_template_with_braces_or_lines_is_text(template):
  assert ModelOptions(chat_template=template).chat_template == template


def test_chat_template_file_is_read_from_the_home_folder(tmp_path, monkeypatch):
  (tmp_path / "file.jinja").write_text("content")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert ModelOptions(chat_template="~/file.jinja").chat_template == "content"


def test_select_options_of_the_engine_include_vllms():
  args = {"dtype": "auto", "revision": "x", "swap_space": 4, "port": 1, "temperature": 0.5}
  assert select_options(args, EngineConfig) == {"dtype": "auto", "revision": "x", "swap_space": 4}
  assert select_options(args, ModelOptions) == {"revision": "x"}
