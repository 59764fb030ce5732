#!/usr/bin/env bash
# Every route of `tinyvllm serve`, by curl.   bash examples/deploy/curl.sh [URL]
#
# URL: http://127.0.0.1:8000. A server started with --api-key wants the key in OPENAI_API_KEY; one without takes any.
# Each command stands alone, to be copied with $url, $auth and $json. -N shows a stream as it comes.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
auth="Authorization: Bearer ${OPENAI_API_KEY:-none}"
json="Content-Type: application/json"

say() { printf '\n\n# %s\n' "$*"; }
curl() { command curl --silent --show-error --fail-with-body --max-time 120 "$@"; }   # the first failure ends this

say "Is it up, and its model there? 200; before that, 503."
curl "$url/health"

say "Which version?"
curl "$url/version"

say 'Which model? Its id is what "model" may say in a request, which may also leave it out.'
curl "$url/v1/models" -H "$auth"

say "The same by its name."
model=$(curl "$url/v1/models" -H "$auth" | sed 's/.*"id":"\([^"]*\)".*/\1/')
curl "$url/v1/models/$model" -H "$auth"

say "A completion."
curl "$url/v1/completions" -H "$auth" -H "$json" -d '{"prompt": "The cat", "max_tokens": 24, "temperature": 0}'

say "As a stream, with the usage at its end."
curl -N "$url/v1/completions" -H "$auth" -H "$json" -d '{
  "prompt": "The cat", "max_tokens": 8, "seed": 1, "stream": true, "stream_options": {"include_usage": true}}'

say "Two prompts, two samples of each, each token with the best two and their log probabilities."
curl "$url/v1/completions" -H "$auth" -H "$json" -d '{
  "prompt": ["The cat", "The sun"], "n": 2, "seed": 1, "max_tokens": 2, "logprobs": 2}'

say "JSON by a schema. x-guidance: without white space, which a small model might add without end."
curl "$url/v1/completions" -H "$auth" -H "$json" -d '{
  "prompt": "My pet, as JSON:", "max_tokens": 60, "seed": 1,
  "response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": {
    "type": "object", "x-guidance": {"whitespace_flexible": false}, "additionalProperties": false,
    "properties": {"name": {"enum": ["Tom", "Kim"]}, "age": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["name", "age"]}}}}'

say "A chat, for a model with a chat template."
curl "$url/v1/chat/completions" -H "$auth" -H "$json" -d '{
  "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 24, "temperature": 0}'

say "A chat as a stream."
curl -N "$url/v1/chat/completions" -H "$auth" -H "$json" -d '{
  "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 8, "seed": 1, "stream": true}'

say 'As /v1/completions, and the texts alone as "text".'
curl "$url/generate" -H "$auth" -H "$json" -d '{"prompt": "The cat", "max_tokens": 24, "top_k": 20, "seed": 1}'

say "Text to token ids."
curl "$url/tokenize" -H "$auth" -H "$json" -d '{"prompt": "The cat"}'

say "Token ids to text."
curl "$url/detokenize" -H "$auth" -H "$json" -d '{"tokens": [65, 66, 67]}'

say "What Prometheus reads (prometheus.yml, grafana.json)."
curl "$url/metrics"

say "Every route and field, for programs. In a browser: /docs, and the chat page at /."
curl "$url/openapi.json" -o /dev/null -w '%{http_code} %{content_type}\n'
curl "$url/docs" -o /dev/null -w '%{http_code} %{content_type}\n'
curl "$url/" -o /dev/null -w '%{http_code} %{content_type}\n'
