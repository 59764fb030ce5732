// The page's state, and its copy in the browser's storage, which may be full or blocked: the page works without it

const FORMAT = "tinyvllm chats", s = Superstruct
const OptionalText = s.optional(s.string())
const Call = s.type({id: OptionalText, name: s.string(), arguments: s.string(), result: OptionalText})
const Version = s.type({   // of a message; what all but content and files hold is of answers
  content: s.string(), files: s.optional(s.array(s.type({name: s.string(), text: s.string()}))),
  reasoning: OptionalText, calls: s.optional(s.array(Call)), stats: OptionalText,
  used: s.optional(s.number()), isCut: s.optional(s.boolean())})   // tokens of context; whether it can go on
const Message = s.assign(Version, s.type({   // shown: index of the version that the message shows
  role: s.enums(["user", "assistant"]), versions: s.optional(s.array(Version)), shown: s.optional(s.number())}))
const Messages = s.refine(s.nonempty(s.array(Message)), "order", list => list.every(({role}, i) =>
  role === "assistant" ? i > 0 : list[i - 1]?.role !== "user") || "A chat must start with a question, then its answer")
const Chat = s.type({messages: Messages, title: OptionalText, pinned: s.optional(s.boolean())})
const ExportedFile = s.type({format: s.literal(FORMAT), chats: s.array(Chat)})

const wide = matchMedia("(min-width: 50.01rem)"), html = htm.bind(preact.h)
const attempt = (action, other) => { try { return action() } catch { return other } }
const parsed = text => attempt(() => JSON.parse(text))
const load = (name, storage = "localStorage") => parsed(attempt(() => window[storage].getItem(`tinyvllm ${name}`)))
const state = {
  chats: new Map(), chat: {id: "", messages: []},   // by id; the open one
  running: null,      // AbortController of the answer in progress
  editing: null,      // {at, draft, files}: index of the edited message, previous content of the input box
  files: [], follow: true,   // attached to the next message; false: the user has scrolled up
  note: "", undo: null, error: "", search: "",
  shown: {chats: wide.matches, settings: false},
  server: {light: "loading", words: "Connecting"}, models: [],   // light: ready, loading, down or refused
  settings: {...load("settings"), key: load("key", "sessionStorage") ?? ""},   // typed texts by name
}

const $ = id => document.getElementById(id)
const pause = ms => new Promise(resolve => setTimeout(resolve, ms))
const update = fields => { Object.assign(state, fields); paint() }
const note = (message, undo = null) => update({note: message, undo})

function store(name, value, storage = "localStorage") {
  try {
    if (value) window[storage].setItem(`tinyvllm ${name}`, JSON.stringify(value))
    else window[storage].removeItem(`tinyvllm ${name}`)
  } catch { note("The browser's storage is full or blocked: new messages are lost when the page is closed.") }
}

function readChats() {
  const names = attempt(() => Object.keys(localStorage), []).filter(x => x.startsWith("tinyvllm chat "))
  for (const id of names.map(x => x.slice("tinyvllm chat ".length))) {
    const stored = load(`chat ${id}`), chat = Array.isArray(stored) ? {messages: stored} : stored   // list: older page
    if (s.is(chat, Chat)) state.chats.set(id, {...chat, id})
  }
}

/** Returns a chat's messages without an answer that has no tokens yet. */
const finished = ({messages}) => messages.filter(x => x.role === "user" || x.stats || x.content || x.versions)

function save(chat) {
  if (!state.chats.has(chat.id)) return   // deleted in the meantime
  const {id, ...stored} = chat, messages = finished(chat)
  if (!messages.length) state.chats.delete(id)
  store(`chat ${id}`, messages.length && {...stored, messages})
}

const titleOf = ({title, messages: [{content, files}]}) => title || content.trim().slice(0, 60) || files?.[0].name

/** Returns the chats that contain the searched text: pinned ones first, then the newest. */
function listed() {
  const words = state.search.trim().toLowerCase(), has = text => text?.toLowerCase().includes(words)
  return [...state.chats.values()].filter(chat => has(chat.title) || chat.messages.some(x => has(x.content)))
                                  .sort((a, b) => !!b.pinned - !!a.pinned || b.id - a.id)
}

function exportChats() {
  const chats = listed().reverse().map(({id, ...chat}) => ({...chat, messages: finished(chat)}))
  const blob = new Blob([JSON.stringify({format: FORMAT, chats}, null, 2)], {type: "application/json"})
  const href = URL.createObjectURL(blob), download = `tinyvllm-chats-${new Date().toISOString().slice(0, 10)}.json`
  Object.assign(document.createElement("a"), {href, download}).click()
  URL.revokeObjectURL(href)
}

/** Adds the chats of an exported file, except for those that the page has. A wrong file changes nothing. */
async function importChats([file]) {
  if (!wide.matches) show("chats", false)
  let chats
  try { chats = s.create(JSON.parse(await file.text()), ExportedFile).chats } catch ({message}) {
    return note(`${file.name} was not imported: ${message}. Choose a file that this page has exported.`)
  }
  const text = messages => JSON.stringify(messages.map(x => [x.content, x.reasoning, x.calls]))
  const known = new Set([...state.chats.values()].map(chat => text(finished(chat))))
  const added = chats.filter(chat => !known.has(text(chat.messages)))
  let id = Date.now()
  for (const chat of added) {
    while (state.chats.has(`${id}`)) id++
    state.chats.set(`${id}`, {...chat, id: `${id}`})
    save(state.chats.get(`${id}`))
  }
  note(`${added.length} of ${chats.length} chats imported` +
       (added.length < chats.length ? ", the others are here already." : "."))
}
