#!/usr/bin/env bash
# Call every route of `tinyvllm serve` with curl.   bash examples/deploy/curl.sh [URL]
#
# Default URL: http://127.0.0.1:8000. If the server was started with --api-key, set the key in OPENAI_API_KEY.
# To run a single command, copy it and the definitions of $url, $auth and $json. -N prints a stream as it arrives.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
auth="Authorization: Bearer ${OPENAI_API_KEY:-none}"
json="Content-Type: application/json"

title() { printf '\n\n# %s\n' "$*"; }
curl() { command curl --silent --show-error --fail-with-body --max-time 120 "$@"; }   # exits at the first failure

title "Health: HTTP 200, or 503 until the model is loaded"
curl "$url/health"

title "Health, for SageMaker"
curl "$url/ping"

title "Number of unfinished requests"
curl "$url/load"

title "Version"
curl "$url/version"

title 'Models: a request may set "model" to this id, or omit it'
curl "$url/v1/models" -H "$auth"

title "A model by name"
model=$(curl "$url/v1/models" -H "$auth" | sed 's/.*"id":"\([^"]*\)".*/\1/')
curl "$url/v1/models/$model" -H "$auth"

title "Completion"
curl "$url/v1/completions" -H "$auth" -H "$json" -d '{"prompt": "The cat", "max_tokens": 24, "temperature": 0}'

title "Completion as a stream, with token usage at the end"
curl -N "$url/v1/completions" -H "$auth" -H "$json" -d '{
  "prompt": "The cat", "max_tokens": 8, "seed": 1, "stream": true, "stream_options": {"include_usage": true}}'

title "Two prompts, two samples each, with log probabilities of the two most probable tokens"
curl "$url/v1/completions" -H "$auth" -H "$json" -d '{
  "prompt": ["The cat", "The sun"], "n": 2, "seed": 1, "max_tokens": 2, "logprobs": 2}'

title "JSON that matches a schema; x-guidance forbids white space, which a small model may repeat forever"
curl "$url/v1/completions" -H "$auth" -H "$json" -d '{
  "prompt": "My pet, as JSON:", "max_tokens": 60, "seed": 1,
  "response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": {
    "type": "object", "x-guidance": {"whitespace_flexible": false}, "additionalProperties": false,
    "properties": {"name": {"enum": ["Tom", "Kim"]}, "age": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["name", "age"]}}}}'

title "Chat (needs a model with a chat template)"
curl "$url/v1/chat/completions" -H "$auth" -H "$json" -d '{
  "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 24, "temperature": 0}'

title "Chat as a stream"
curl -N "$url/v1/chat/completions" -H "$auth" -H "$json" -d '{
  "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 8, "seed": 1, "stream": true}'

title "OpenAI's newer protocol"
curl "$url/v1/responses" -H "$auth" -H "$json" -d '{"input": "Hello", "max_output_tokens": 24, "temperature": 0}'

title "Anthropic's protocol"
curl "$url/v1/messages" -H "$auth" -H "$json" -d '{
  "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "temperature": 0}'

title "Anthropic's count of prompt tokens"
curl "$url/v1/messages/count_tokens" -H "$auth" -H "$json" -d '{"messages": [{"role": "user", "content": "Hello"}]}'

title 'Same as /v1/completions, with a list of the generated strings in "text"'
curl "$url/generate" -H "$auth" -H "$json" -d '{"prompt": "The cat", "max_tokens": 24, "top_k": 20, "seed": 1}'

title "Text to token ids"
curl "$url/tokenize" -H "$auth" -H "$json" -d '{"prompt": "The cat"}'

title "Token ids to text"
curl "$url/detokenize" -H "$auth" -H "$json" -d '{"tokens": [65, 66, 67]}'

title "Embeddings, of a model such as Qwen/Qwen3-Embedding-0.6B; others answer with an error"
curl "$url/v1/embeddings" -H "$auth" -H "$json" -d '{"input": ["The cat", "The sun"], "dimensions": 32}' || true

title "Documents sorted by relevance, with a model such as Qwen/Qwen3-Reranker-0.6B; other scores mean little"
curl "$url/v1/rerank" -H "$auth" -H "$json" -d '{"query": "Who sat?", "documents": ["The cat sat.", "The sun."]}' || true

title "Relevance in the order of the documents"
curl "$url/v1/score" -H "$auth" -H "$json" -d '{"text_1": "Who sat?", "text_2": ["The cat sat.", "The sun."]}' || true

title "Metrics for Prometheus (prometheus.yml, grafana.json)"
curl "$url/metrics"

title "OpenAPI schema of all routes; chat page for browsers"
curl "$url/openapi.json" -o /dev/null -w '%{http_code} %{content_type}\n'
curl "$url/" -o /dev/null -w '%{http_code} %{content_type}\n'
