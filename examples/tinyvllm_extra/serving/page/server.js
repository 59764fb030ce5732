// Requests to the server

const HINTS = {429: "The server's queue is full, try again later", 503: "The server is not ready yet"}
let waiting = null, hasTemplate = true   // promise of waitForServer(); whether the model has a chat template

/** Sends a request and returns the response. Throws an Error with a readable message and .status, 0: no response. */
async function request(path, body, signal) {
  const key = state.settings.key.trim(), method = body ? "POST" : "GET"
  const headers = new Headers({"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})})
  const failure = (status, message) => Object.assign(new Error(message), {status})
  const response = await fetch(path, {method, headers, body: JSON.stringify(body), signal}).catch(e => {
    throw signal?.aborted ? e : failure(0, "The server is not responding.")
  })
  if (response.ok) return response
  if (response.status === 401) show("settings", true)
  const text = await response.text(), hint = HINTS[response.status]   // text: JSON, or a proxy's error page
  const words = `${response.status}: ${attempt(() => JSON.parse(text).error.message, text)}`
  throw failure(response.status, hint ? `${hint} (${words}).` : words)
}

/** Waits until the server is ready or refuses. Shows its state meanwhile. */
const waitForServer = () => waiting ??= checkServer().finally(() => { waiting = null })

async function checkServer() {
  try {
    await request("health")
    const models = (await (await request("v1/models")).json()).data, {light} = state.server
    return update({models, server: {light: "ready", words: "Ready"}, note: light === "ready" ? state.note : ""})
  } catch (e) { if (!showState(e)) return }
  await pause(1000)
  await checkServer()
}

/** Shows why a request failed. Returns whether to try it again. */
function showState({status, message}) {
  const isLoading = status === 503, isDown = status === 0, isTemporary = isLoading || isDown
  const words = isLoading ? `Loading ${/\d+ of \d+/.exec(message) ?? ""}` : isDown ? "Down" : "Refused"
  state.server = {light: words.split(" ")[0].toLowerCase(), words}
  note(isTemporary ? `${message} Retrying automatically.` : message)
  return isTemporary
}

const modelInUse = () => state.models.find(x => x.id === state.settings.model) ?? state.models[0]

/** Returns a message as messages in OpenAI's format, without reasoning, which chat templates drop as well. */
function forServer(message) {
  const {role, content, calls = [], files = []} = message
  if (role === "user") return [{role, content: [...files.map(fenced), content].join("\n\n")}]
  const tool_calls = calls.map(({id, result, ...called}) => ({id, type: "function", function: called}))
  return [{role, content: split(message).answer, ...(calls.length && {tool_calls})},
          ...calls.filter(x => x.result).map(x => ({role: "tool", tool_call_id: x.id ?? x.name, content: x.result}))]
}

/** Returns a file as a code block with its name. Its fence is longer than those in the file. */
function fenced({name, text}) {
  const fence = "`".repeat(Math.max(2, ...(text.match(/`+/g) ?? []).map(x => x.length)) + 1)
  return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}`
}

/** Opens a stream that answers a conversation or continues its last answer. Without a chat template, it completes the
last message. */
async function openStream(history, isContinued, signal) {
  const {fields, chatFields, system} = options(), start = system ? [{role: "system", content: system}] : []
  const model = state.models.length > 1 && {model: modelInUse().id}
  const more = {stream: true, stream_options: {include_usage: true}, ...fields, ...model}
  const messages = [...start, ...history.flatMap(forServer)], {content} = history.at(-1)
  if (isContinued) Object.assign(messages.at(-1), {content})   // with its reasoning
  const open = isContinued ? {continue_final_message: true, add_generation_prompt: false} : {}
  try {
    if (hasTemplate) return await request("v1/chat/completions", {messages, ...chatFields, ...more, ...open}, signal)
  } catch (e) {
    if (e.status !== 400 || !/no chat template/i.test(e.message)) throw e
    note("This model has no chat template: it completes each message separately.")
    hasTemplate = false
  }
  const prompt = isContinued ? history.at(-2).content + content : messages.at(-1).content
  return request("v1/completions", {prompt, ...more}, signal)
}

/** Calls openStream once the server is ready. Retries once if the server does not respond. */
async function openWithRetry(history, isContinued, signal, onStart, failures = 0) {
  onStart()
  try { return await openStream(history, isContinued, signal) } catch (e) {
    if (signal.aborted || e.status !== 503 && (e.status !== 0 || failures)) throw e
    showState(e)
    await Promise.race([pause(1000).then(waitForServer), new Promise((_, reject) => { signal.onabort = reject })])
    return openWithRetry(history, isContinued, signal, onStart, failures + (e.status === 0))
  }
}

/** Yields the server-sent events up to [DONE]. */
async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  for (let lines = [""]; ;) {
    const {value} = await reader.read().catch(e => signal.aborted ? Promise.reject(e) : {})
    if (value === undefined) throw new Error("The connection closed before the answer was complete.")
    lines = (lines.at(-1) + value).split("\n")
    for (const line of lines.slice(0, -1).filter(x => x.startsWith("data: "))) {
      if (line.trim() === "data: [DONE]") return
      yield JSON.parse(line.slice("data: ".length))
    }
  }
}
