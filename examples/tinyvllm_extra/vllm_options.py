"""vLLM's options: those of the model, those without effect here, and other spellings of values. Source: vLLM's engine
arguments and `vllm serve` arguments, versions 0.6 to 0.18."""
import dataclasses, pathlib
from typing import Any

from tinyvllm.config import InputError, Options, check, logger, option

from .options import SAMPLING_DEFAULTS, LLMConfig
from .sampling.logits import SamplingParams

ANY, BOTH, OFF, NONE = [...], [True, False], [False], [None]
STRUCTURED_BACKENDS = ["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"]
# vLLM's options without an effect, and the values at which that is true (...: at any)
NO_EFFECT: dict[str, Any] = {name: values for names, values in {
  # Speed: tinyvllm chooses its own kernels, graphs, schedule and readers of files
  """attention_backend attention_config moe_backend linear_backend mamba_backend gdn_prefill_backend all2all_backend
  mm_encoder_attn_backend kernel_config compilation_config optimization_level performance_mode numa_bind_nodes
  max_cudagraph_capture_size max_seq_len_to_capture max_context_len_to_capture max_parallel_loading_workers
  long_prefill_token_threshold max_num_partial_prefills max_long_partial_prefills num_lookahead_slots
  num_scheduler_steps scheduler_delay_factor preemption_mode swap_space prefix_caching_hash_algo ignore_patterns
  safetensors_load_strategy model_loader_extra_config pt_load_map_location code_revision""": ANY,
  """async_scheduling disable_custom_all_reduce disable_cascade_attn enable_flashinfer_autotune use_v2_block_manager
  multi_step_stream_outputs disable_async_output_proc disable_hybrid_kv_cache_manager use_tqdm_on_load worker_use_ray
  enable_expert_parallel enable_dbo enable_eplb disable_nccl_for_dp_synchronization numa_bind
  trust_remote_code""": BOTH,
  # Details of features that are off: images, LoRA, Mamba layers, several nodes
  """limit_mm_per_prompt mm_processor_kwargs media_io_kwargs mm_processor_cache_gb mm_processor_cache_type
  mm_shm_cache_max_object_size_mb mm_encoder_tp_mode video_pruning_rate allowed_local_media_path allowed_media_domains
  max_loras max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size default_mm_loras mamba_cache_dtype
  mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode data_parallel_address data_parallel_rpc_port
  data_parallel_backend master_addr master_port expert_placement_strategy eplb_config""": ANY,
  """disable_mm_preprocessor_cache disable_chunked_mm_input enable_multimodal_encoder_data_parallel skip_mm_profiling
  interleave_mm_strings language_model_only fully_sharded_loras""": BOTH,
  # Logs, and features of the server that are always on
  "max_log_len uvicorn_log_level disable_access_log_for_endpoints show_hidden_metrics_for_version": ANY,
  """disable_log_requests disable_log_stats disable_uvicorn_access_log aggregate_engine_logging enable_log_deltas
  log_error_stack enable_auto_tool_choice exclude_tools_when_tool_choice_none enable_prompt_tokens_details
  enable_server_load_tracking enable_request_id_headers disable_frontend_multiprocessing
  disable_fastapi_docs""": BOTH,
  "h11_max_incomplete_event_size h11_max_header_count": ANY,
  "allowed_methods allowed_headers": [["*"]], "chat_template_content_format": ["auto", "string"],
  "response_role": ["assistant"],
  # Features that tinyvllm lacks, at their defaults
  """pipeline_parallel_size data_parallel_size data_parallel_size_local decode_context_parallel_size
  prefill_context_parallel_size nnodes api_server_count""": [1],
  "node_rank data_parallel_rank data_parallel_start_rank cpu_offload_gb": [0],
  """enable_lora enable_prompt_adapter skip_tokenizer_init disable_sliding_window enable_prompt_embeds enable_mm_embeds
  enable_sleep_mode calculate_kv_scales kv_sharing_fast_prefill ray_workers_use_nsight headless grpc tokens_only
  data_parallel_hybrid_lb data_parallel_external_lb allow_credentials enable_ssl_refresh
  return_tokens_as_token_ids enable_tokenizer_info_endpoint enable_log_requests enable_log_outputs
  enable_force_include_usage enable_per_request_metrics enable_offline_docs guided_decoding_disable_fallback
  guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties""": OFF,
  """tokenizer tokenizer_revision hf_token hf_config_path rope_scaling rope_theta override_attention_dtype
  quantization_param_path kv_cache_memory_bytes kv_offloading_size kv_transfer_config kv_events_config pooler_config
  override_pooler_config lora_modules logits_processors logits_processor_pattern io_processor_plugin scheduler_cls
  worker_extension_cls otlp_traces_endpoint collect_detailed_traces reasoning_parser_plugin
  reasoning_config tool_server tool_parser_plugin log_config_file middleware speculative_model
  num_speculative_tokens""": NONE,
  "hf_overrides additional_config profiler_config": [None, {}], "worker_cls device": ["auto"],
  "tokenizer_mode": ["auto", "slow", "hf"], "config_format": ["auto", "hf"], "model_impl": ["auto", "vllm"],
  "load_format": ["auto", "hf", "safetensors", "fastsafetensors", "runai_streamer"],
  "convert": ["auto", "none", "embed"], "task": ["auto", "generate", "embed", "score"],
  "enable_chunked_prefill": [True, None], "logprobs_mode": ["raw_logprobs"],
  "distributed_executor_backend": [None, "mp", "uni", "ray"],
  "guided_decoding_backend": STRUCTURED_BACKENDS,
  "structured_outputs_config": [None, *({"backend": backend} for backend in STRUCTURED_BACKENDS)]}.items()
  for name in names.split()}
# vLLM's names for values of LLMConfig
SPELLINGS: dict[str, dict[str, Any]] = {
  "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"}, "kv_cache_dtype": {"fp8_e4m3": "fp8"},
  "max_model_len": {"-1": None}}


@dataclasses.dataclass(frozen=True)
class ModelOptions(Options):
  """Options of LLM beyond the core's LLMConfig, under vLLM's names."""
  chat_template: str | None = option(None, "Jinja file or text (default: the model's)")
  default_chat_template_kwargs: dict[str, Any] | None = option(None, "Variables of the chat template (default: none)")
  override_generation_config: dict[str, Any] | None = option(
    None, 'Sampling defaults, as in {"temperature": 0.5} (default: none)')
  revision: str | None = option(None, "Branch, tag or commit on the hub (default: main)")
  download_dir: str | None = option(None, "Folder for downloads (default: the hub's cache)")
  max_logprobs: int = option(20, "Maximum log probabilities per token; -1: no limit", min=-1, max=2**31 - 1)

  def __post_init__(self) -> None:
    super().__post_init__()
    names = (*SAMPLING_DEFAULTS, "max_new_tokens")
    for name in self.override_generation_config or {}:
      check(name in names, f"override_generation_config: {name!r} must be one of {', '.join(names)}")
    try: SamplingParams(**self.sampling_defaults())
    except InputError as error: raise InputError(f"override_generation_config: {error}") from error
    template = self.chat_template
    if not template or "{" in template or "\n" in template: return
    try: vars(self)["chat_template"] = pathlib.Path(template).expanduser().read_text()
    except OSError as error: raise InputError(f"chat_template={template!r} cannot be read: {error.strerror}") from error

  def sampling_defaults(self) -> dict[str, Any]:
    """Return override_generation_config under the names of SamplingParams."""
    return {name.replace("max_new_tokens", "max_tokens"): value
            for name, value in (self.override_generation_config or {}).items()}


def split_options(options: dict[str, Any], model: Any = None) -> tuple[dict[str, Any], ModelOptions]:
  """Check LLM's options, and return the fields of LLMConfig and the ModelOptions. Raises InputError for an unknown
  option, or for one without effect whose value would have one."""
  options = {**({"runner": "pooling"} if options.get("task") == "embed" else {}), **options}   # task: the former name
  if options.get("tokenizer") and str(options["tokenizer"]) == str(model): del options["tokenizer"]   # the model's own
  for name in [name for name in options if name in NO_EFFECT]:
    values = NO_EFFECT[name]
    alternatives = ", ".join(repr(x) for x in values if x is not None)
    check(options[name] in values or ... in values, f"{name}={options[name]!r} is not supported: "
          f"{f'use {alternatives}, or ' if alternatives else ''}leave it out")
  engine = {name: x for name, x in options.items() if name not in NO_EFFECT.keys() | set(ModelOptions.__match_args__)}
  for name in engine.keys() & SPELLINGS.keys():
    engine[name] = SPELLINGS[name].get(str(engine[name]), engine[name])
  LLMConfig(**engine)
  return engine, ModelOptions(**{name: options[name] for name in ModelOptions.__match_args__ if name in options})


def log_ignored(options: dict[str, Any]) -> None:
  """Log the options without effect in one line."""
  text = ", ".join(f"{name}={options[name]!r}" for name in sorted(options.keys() & NO_EFFECT.keys()))
  if text: logger.info(f"vLLM's options without effect here: {text}")
