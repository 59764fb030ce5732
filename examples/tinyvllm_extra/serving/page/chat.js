// Messages, answers and chats

const newAnswer = () => ({role: "assistant", content: "", stats: ""})

/** Adds a streamed choice to an answer. Returns whether the choice has text. */
function extend(answer, {delta = {}, text = ""}) {
  const thought = delta.reasoning_content || delta.reasoning, piece = delta.content || text
  const parts = delta.tool_calls ?? []
  answer.content += piece
  if (thought) answer.reasoning = (answer.reasoning ?? "") + thought
  if (parts.length) answer.calls ??= []
  for (const {index = 0, id, function: part = {}} of parts) {
    const call = answer.calls[Math.min(index, answer.calls.length)] ??= {id, name: "", arguments: ""}
    call.name += part.name ?? ""
    call.arguments += part.arguments ?? ""
  }
  return piece || thought || parts.length
}

/** Streams an answer into the last one of `messages`, which become the chat's. Without any text, the chat keeps its
messages. Returns false then, if the chat is still open. */
async function answer(messages, isContinued = false) {
  const target = state.chat, before = target.messages, last = messages.at(-1), controller = new AbortController()
  const {signal} = controller, isOpen = () => state.running === controller, now = () => performance.now()
  let tokens = 0, started, first, end, failure, timer
  target.messages = messages
  state.chats.set(target.id, target)
  save(target)
  setRunning(controller, {follow: true, error: ""})
  try {
    const history = isContinued ? messages : messages.slice(0, -1)
    const response = await openWithRetry(history, isContinued, signal, () => { started = now() })
    for await (const {error, choices, usage} of events(response, signal)) {
      if (error) throw new Error(error.message)
      const isToken = choices[0] && extend(last, choices[0])
      tokens = usage?.completion_tokens ?? tokens + (isToken ? 1 : 0)   // about one per event; usage is exact
      last.used = usage?.total_tokens ?? last.used
      end = choices[0]?.finish_reason ?? end
      if (!tokens) continue
      first ??= {tokens, at: now()}
      const elapsed = now() - first.at, rate = elapsed > 10 ? (tokens - first.tokens) / elapsed * 1000 : 0
      last.stats = `${tokens} tokens${rate ? `, ${rate.toFixed(1)} tokens/s` : ""}` +
                   `, first token after ${((first.at - started) / 1000).toFixed(2)} s`
      timer ??= setTimeout(() => { timer = isOpen() && paint() }, 3 * state.paintTime)   // a quarter of the time
    }
  } catch (e) { failure = e }
  last.stats ||= "no tokens"
  last.stats += signal.aborted ? ", stopped" : failure || end === "stop" ? "" : ` (${end})`
  last.isCut = end === "length" || failure && first ? true : undefined
  const hasAnswer = first || !failure
  if (!hasAnswer) target.messages = isOpen() || before.length === messages.length ? before : messages.slice(0, -1)
  save(target)
  if (!isOpen()) return true   // another chat is open
  setRunning(null, {error: signal.aborted ? "" : failure?.message})
  if (failure) waitForServer()
  return !!hasAnswer
}

function setRunning(running, fields) {
  update({running, ...fields})
  $("text").focus()
}

/** Sends a message as number `at` of the chat. Deletes later messages. Without an answer, the message goes back to the
input box. */
async function send(content, files = [], at = state.chat.messages.length) {
  const before = state.chat.messages, message = {role: "user", content, ...(files.length && {files})}
  if (await answer([...before.slice(0, at), message, newAnswer()])) return
  if (at < before.length) return edit(at, content)
  $("text").value = content + $("text").value
  update({files: [...files, ...state.files]})
}

function submit() {
  const content = $("text").value, {files} = state, {at} = state.editing ?? {}
  if (state.running || !content.trim() && !files.length) return
  state.editing ??= {draft: "", files: []}
  leaveEdit()
  send(content, files, at)
}

function edit(at, words = state.chat.messages[at].content) {
  leaveEdit()
  state.editing = {at, draft: $("text").value, files: state.files}
  state.files = state.chat.messages[at].files ?? []
  $("text").value = words
  $("text").focus()
  note("Send replaces this message and deletes all later ones. Press Escape to cancel.")
}

function leaveEdit() {
  if (!state.editing) return
  $("text").value = state.editing.draft
  update({files: state.editing.files, editing: null, note: ""})
}

/** Returns the versions of an answer, oldest first. */
const versionsOf = ({versions, shown, ...version}) => versions?.[shown] ? versions.with(shown, version) : [version]

function showVersion(shown) {
  const {messages} = state.chat, versions = versionsOf(messages.at(-1))
  change(state.chat, {messages: messages.with(-1, {...versions[shown], versions, shown})})
}

function regenerate() {
  const {messages} = state.chat, versions = [...versionsOf(messages.at(-1)), newAnswer()]
  answer(messages.with(-1, {...newAnswer(), versions, shown: versions.length - 1}))
}

/** Goes on with an answer that was cut. */
function goOn() { answer(state.chat.messages.with(-1, {...state.chat.messages.at(-1)}), true) }

/** Attaches text files to the next message. */
async function attach(list) {
  const files = await Promise.all([...list].map(async file => ({name: file.name, text: await file.text()})))
  const binary = files.find(({text}) => text.includes("\0"))
  if (binary) note(`${binary.name} was not attached: it is not a text file.`)
  else update({files: [...state.files, ...files]})
}

/** Opens a chat, by default a new one. A question without an answer goes back to the input box. */
function open(chat = {id: `${Date.now()}`, messages: []}) {
  if (state.running && chat.id === state.chat.id) return $("text").focus()
  state.running?.abort()
  leaveEdit()
  const last = chat.messages.at(-1)
  Object.assign(state, {chat, note: "", undo: null})
  if (last?.role === "user") {
    Object.assign(state, {chat: {...chat, messages: chat.messages.slice(0, -1)}, files: last.files ?? []})
    $("text").value = last.content
  }
  store("current", chat.id, "sessionStorage")
  if (!wide.matches) show("chats", false)
  setRunning(null, {follow: true, error: ""})
}

function change(chat, fields) {
  Object.assign(chat, fields)
  save(chat)
  paint()
}

function rename(chat) {
  const title = prompt("Name of this chat", titleOf(chat))
  if (title !== null) change(chat, {title: title.trim() || undefined})
}

function remove(chat) {
  state.chats.delete(chat.id)
  store(`chat ${chat.id}`, null)
  if (chat.id === state.chat.id) open()
  note(`“${titleOf(chat)}” is deleted.`, () => {
    state.chats.set(chat.id, chat)
    save(chat)
    open(chat)
  })
  $("new").focus()
}
