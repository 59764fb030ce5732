// What the page shows, and its keys

const EXAMPLES = ["Explain why the sky is blue.", "Reverse a string in Python.", "Compare tea and coffee in a table."]
const SHORTCUTS = {   // what they do, and how, unless the browser does it
  "Enter": ["Send", submit],
  "Shift+Enter": ["New line"],
  "Ctrl+K": ["Search chats", () => show("chats", true, "search")],
  "Ctrl+Shift+O": ["New chat", () => open()],
  "Escape": ["Stop the answer, leave editing, close the open panel", escapeFrom],
  "?": ["This list", () => $("shortcuts").showModal()],
}
const MAX_PASTE = 5000   // characters of a paste that is not attached as a file
const button = (words, onClick, more) => html`<button type="button" onClick=${onClick} ...${more}>${words}</button>`
const toggle = (words, id) =>
  button(words, () => show(id), {"aria-controls": id, "aria-expanded": state.shown[id], id: `toggle-${id}`})
const FileInput = ({onFiles, ...more}) => html`<input type="file" hidden ...${more}
  onClick=${({target}) => { target.value = "" }} onChange=${({target}) => onFiles(target.files)} />`
const handler = action => event => {
  event.preventDefault()
  action(event)
}
const isDrawer = () => !wide.matches && state.shown.chats

function paint() {
  const start = performance.now()
  preact.render(html`<${Page} />`, $("page"))
  if (state.follow) $("log").scrollTop = $("log").scrollHeight
  state.paintTime = performance.now() - start
}

/** Opens or closes a panel. On a narrow page the list of chats is a drawer: the rest is inert while it is open. */
function show(id, isShown = !state.shown[id], focused = id === "chats" && isShown && !wide.matches ? "new" : "") {
  state.shown[id] = isShown
  paint()
  $(focused)?.focus()
}

const Page = () => html`<${Header} /><${Chats} />
  <div id="shade" hidden=${!isDrawer()} onClick=${() => show("chats", false)} />
  <${Settings} />
  <main inert=${isDrawer()}>
    <${Conversation} />
    <div id="notes"><small id="note" role="status">${state.note}</small>
      ${state.undo && button("Undo", state.undo)}</div>
    <${Form} /></main>
  <dialog id="shortcuts" aria-labelledby="keys"><h2 id="keys">Keyboard shortcuts</h2>
    <dl>${Object.entries(SHORTCUTS).map(([key, [words]]) => html`<dt><kbd>${key}</kbd></dt><dd>${words}</dd>`)}</dl>
    ${button("Close", () => $("shortcuts").close())}</dialog>`

const Header = () => html`<header>${toggle("Chats", "chats")}
  <h1>tinyvllm <small id="model" hidden=${state.models.length > 1}>${modelInUse()?.id}</small></h1>
  <select aria-label="Model" hidden=${state.models.length < 2} value=${modelInUse()?.id}
    onChange=${({target}) => set({model: target.value})}>
    ${state.models.map(({id}) => html`<option>${id}</option>`)}</select>
  <small id="state" class=${state.server.light}>${state.server.words}</small>${toggle("Settings", "settings")}
  ${button("?", SHORTCUTS["?"][1], {"aria-label": "Keyboard shortcuts"})}</header>`

function Chats() {
  const found = listed(), isAll = found.length === state.chats.size, hasNone = !isAll && !found.length
  return html`<nav id="chats" aria-label="Chats" hidden=${!state.shown.chats}>
    ${button("New chat", () => open(), {id: "new", class: "primary"})}
    <input id="search" type="search" aria-label="Search chats" placeholder="Search chats" value=${state.search}
      onInput=${({target}) => update({search: target.value})} />
    <ul hidden=${hasNone}>${found.map(chat => html`<${Row} key=${chat.id} chat=${chat} />`)}</ul>
    <p hidden=${!hasNone}>No chat has this text.</p>
    <div class="row">${button("Import", () => $("import").click())}
      ${button(isAll ? "Export all" : `Export ${found.length} found`, exportChats, {disabled: !found.length})}</div>
    <${FileInput} id="import" accept=".json" aria-label="File of chats" onFiles=${importChats} /></nav>`
}

function Row({chat}) {
  const title = titleOf(chat), {pinned} = chat, pin = {"aria-label": `Pin ${title}`, "aria-pressed": !!pinned}
  return html`<li>${button(title, () => open(chat), {"aria-current": chat.id === state.chat.id})}
    ${button(pinned ? "★" : "☆", () => change(chat, {pinned: !pinned || undefined}), pin)}
    ${button("✎", () => rename(chat), {"aria-label": `Rename ${title}`, class: "rename"})}
    ${button("✕", () => remove(chat), {"aria-label": `Delete ${title}`})}</li>`
}

const Conversation = () => html`
  <section id="empty" aria-label="Examples" hidden=${state.chat.messages.length > 0}><h2>Ask a question</h2>
    ${EXAMPLES.map(words => button(words, () => send(words)))}</section>
  <div id="log" role="log" aria-live="polite" aria-label="Conversation" aria-busy=${!!state.running} tabindex="0"
    onScroll=${({target: x}) => { state.follow = x.scrollHeight - x.scrollTop - x.clientHeight < 40 }}>
    ${state.chat.messages.map((message, at) => html`
      <${message.role === "user" ? Question : Answer} key=${`${state.chat.id} ${at}`} ...${{message, at}} />`)}
    ${state.error && html`<p role="alert">${state.error}</p>`}</div>`

const Question = ({message: {content, files = []}, at}) => html`
  <article class=${state.editing?.at === at ? "user editing" : "user"} aria-label="You">
    ${files.map(({name, text}) => html`<${Fold} name=${name}><${Code} source=${text} /><//>`)}
    <div>${content}</div>
    <footer>${button("Copy", () => copy(content))}${button("Edit", () => edit(at))}</footer></article>`

function Answer({message, at}) {
  const {thought, answer} = split(message), isLast = at === state.chat.messages.length - 1 && !state.running
  const {calls = [], stats, used, isCut} = message, limit = modelInUse()?.max_model_len
  return html`<article class="assistant" aria-label="Model">
    ${thought && html`<${Fold} name="Reasoning"><${Markdown} source=${thought} /><//>`}
    <${Markdown} source=${answer} />
    ${calls.map(({name, arguments: source, result}) => html`<${Fold} name=${`Tool call: ${name}`}>
      <${Code} source=${indented(source)} language="json" />
      ${!isLast && result && html`<${Code} source=${result} />`}<//>`)}
    ${isLast && calls.length > 0 && html`<${Results} calls=${calls} />`}
    <footer><small>${stats || state.running && "…"}</small>
      ${used && limit && html`<span>context: ${used.toLocaleString("en")} of ${limit.toLocaleString("en")}</span>`}
      ${isLast && html`<${Versions} message=${message} />`}
      ${button("Copy", () => copy(answer))}
      ${isLast && button("Regenerate", regenerate)}${isLast && isCut && button("Continue", goOn)}</footer></article>`
}

const Fold = ({name, children}) => html`<details><summary>${name}</summary>${children}</details>`

const Results = ({calls}) => html`
  <form class="results" onSubmit=${handler(() => answer([...state.chat.messages, newAnswer()]))}>
    ${calls.map(call => html`<label>Result of ${call.name}
    <textarea rows="1" required value=${call.result ?? ""} onInput=${({target}) => { call.result = target.value }} />
  </label>`)}<button>Send results</button></form>`

function Versions({message: {shown, versions = []}}) {
  const step = (words, name, by) =>
    button(words, () => showVersion(shown + by), {"aria-label": `${name} version`, disabled: !versions[shown + by]})
  return versions.length > 1 && html`<span>
    ${step("‹", "Previous", -1)} ${shown + 1}/${versions.length} ${step("›", "Next", 1)}</span>`
}

const indented = text => parsed(text) === undefined ? text : JSON.stringify(parsed(text), null, 2)   // or incomplete

const Form = () => html`
  <form id="form" onSubmit=${handler(() => state.running ? state.running.abort() : submit())}>
  ${state.files.length > 0 && html`<ul class="row" aria-label="Attached files">${state.files.map((file, i) => html`
    <li>${file.name}${button("✕", () => update({files: state.files.toSpliced(i, 1)}),
                             {"aria-label": `Remove ${file.name}`})}</li>`)}</ul>`}
  ${button("+", () => $("files").click(), {"aria-label": "Attach text files"})}
  <${FileInput} id="files" multiple aria-label="Text files" onFiles=${attach} />
  <textarea id="text" rows="1" aria-label="Message" placeholder="Message" enterkeyhint="send" onPaste=${onPaste} />
  <button id="send" class="primary" onClick=${event => { if (event.detail > 1) event.preventDefault() }}>
    ${state.running ? "Stop" : "Send"}</button></form>`   // a double click does not mean Stop

/** Attaches pasted files and long texts. */
function onPaste(event) {
  const {files} = event.clipboardData, text = event.clipboardData.getData("text")
  if (!files.length && text.length <= MAX_PASTE) return
  event.preventDefault()
  attach(files.length ? files : [new File([text], `pasted ${state.files.length + 1}.txt`)])
}

document.onkeydown = event => {
  const {key, target, shiftKey} = event, isControl = event.ctrlKey || event.metaKey
  const action = SHORTCUTS[isControl ? `Ctrl+${shiftKey ? "Shift+" : ""}${key.toUpperCase()}` : key]?.[1]
  const isOther = {"Enter": target.id !== "text" || shiftKey, "?": target.matches("input, textarea, select"),
                   "Escape": target.id === "search" && state.search}[key]
  if (!action || isOther || event.isComposing || $("shortcuts").open) return
  event.preventDefault()
  action()
}

function escapeFrom() {
  if (isDrawer()) show("chats", false, "toggle-chats")
  else if (state.running) state.running.abort()
  else if (state.editing) leaveEdit()
  else show("settings", false)
}

wide.onchange = () => show("chats", wide.matches)
onpagehide = () => { if (state.running) save(state.chat) }

readChats()
paint()
set({})
open(state.chats.get(load("current", "sessionStorage")))
waitForServer()
setInterval(() => document.hidden || request("health").catch(waitForServer), 15_000)
