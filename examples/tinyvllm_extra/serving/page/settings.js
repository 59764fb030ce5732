// The settings. An empty one is left to the server and the model.

const SETTINGS = [   // group, name in a request, label, kind, explanation
  ["Conversation", "system", "System prompt", "text", "Instructions before every conversation."],
  ["Conversation", "tools", "Tools", "text", "Functions that the model may call: a JSON list in OpenAI's format."],
  ["Conversation", "thinking", "Thinking", "choice", "Reasoning before the answer, if the model can turn it off."],
  ["Sampling", "temperature", "Temperature", "number", "0 takes the likeliest token. Higher values vary the answer."],
  ["Sampling", "top_p", "Top p", "number", "Only the likeliest tokens that have this probability together."],
  ["Sampling", "top_k", "Top k", "number", "Only this number of the likeliest tokens."],
  ["Sampling", "min_p", "Min p", "number", "Only tokens with this fraction of the best one's probability."],
  ["Sampling", "presence_penalty", "Presence penalty", "number", "Above 0: fewer tokens that the answer has."],
  ["Sampling", "frequency_penalty", "Frequency penalty", "number", "The same, for each time that it has them."],
  ["Sampling", "repetition_penalty", "Repetition penalty", "number", "Above 1: fewer tokens of the conversation."],
  ["Sampling", "seed", "Seed", "number", "The same seed gives the same answer again."],
  ["Output", "max_tokens", "Max tokens", "number", "The answer is cut here. Default: the rest of the context."],
  ["Output", "min_tokens", "Min tokens", "number", "The answer does not end before."],
  ["Output", "stop", "Stop strings", "lines", "The answer ends before any of these, one per line; \\n is a newline."],
  ["Output", "bad_words", "Bad words", "lines", "The answer has none of these, one per line."],
  ["Output", "include_stop_str_in_output", "Include stop string", "choice", "The answer ends after its stop string."],
  ["Output", "skip_special_tokens", "Skip special tokens", "choice", "No: show tokens such as the end of the answer."],
  ["Output", "ignore_eos", "Ignore EOS token", "choice", "The answer goes on until Max tokens."],
  ["This page", "key", "API key", "password", "For this session only."],
  ["This page", "theme", "Theme", "theme", "Light or dark, as your system has it or always."],
]
const PRESETS = {Precise: {temperature: "0.2", top_p: "0.9"}, Balanced: {temperature: "0.7", top_p: "0.95"},
                 Creative: {temperature: "1.1", min_p: "0.05"}, Reset: {}}
const CHOICES = {choice: ["default", "yes", "no"], theme: ["system", "light", "dark"]}
const PARSERS = {number: Number, choice: x => x === "yes",
                 lines: x => x.split("\n").filter(Boolean).map(line => line.replaceAll("\\n", "\n"))}

/** Returns the fields of a request that are set, those of chats only, and the system prompt. Throws an Error for tools
that are not a list. */
function options() {
  const {system = "", tools, thinking} = state.settings, isOn = thinking === "yes"
  const sent = SETTINGS.filter(([, name, , kind]) => state.settings[name] && PARSERS[kind] && name !== "thinking")
  const list = parsed(tools || "[]")
  if (!Array.isArray(list)) throw new Error("Settings: Tools must be a JSON list in OpenAI's format.")
  const template = {chat_template_kwargs: {enable_thinking: isOn, thinking: isOn}}   // names of two families of models
  return {system: system.trim(), chatFields: {...(list.length && {tools: list}), ...(thinking && template)},
          fields: Object.fromEntries(sent.map(([, name, , kind]) => [name, PARSERS[kind](state.settings[name])]))}
}

function set(fields) {
  state.settings = {...state.settings, ...fields}
  const {key, ...stored} = state.settings
  store("settings", stored)
  store("key", key, "sessionStorage")
  document.documentElement.style.colorScheme = state.settings.theme ?? ""
}

/** Replaces the sampling settings. Reset: also those of the output. */
function applyPreset(name) {
  const replaced = SETTINGS.filter(([group]) => group === "Sampling" || group === "Output" && name === "Reset")
  set({...Object.fromEntries(replaced.map(([, name]) => [name, ""])), ...PRESETS[name]})
  note(name === "Reset" ? "The server's defaults apply again." : `Sampling is ${name.toLowerCase()} now.`)
}

function Setting([, name, label, kind, help]) {
  const shared = {name, value: state.settings[name] ?? "", "aria-describedby": `about-${name}`,
                  onInput: ({target}) => set({[name]: target.value}),
                  onChange: () => Promise.resolve(waiting).then(waitForServer)}   // with the new key
  const field = CHOICES[kind] ? html`<select ...${shared}>
      ${CHOICES[kind].map((words, i) => html`<option value=${i ? words : ""}>${words}</option>`)}</select>`
    : kind === "text" || kind === "lines" ? html`<textarea rows="1" spellcheck=${false} ...${shared} />`
    : html`<input type=${kind} step="any" autocomplete="off" placeholder="default" ...${shared} />`
  return html`<div class=${kind}><label>${label} ${field}</label><small id=${`about-${name}`}>${help}</small></div>`
}

const Settings = () => html`<section id="settings" aria-label="Settings" inert=${isDrawer()}
  hidden=${!state.shown.settings}>
  <div class="row" role="group" aria-label="Presets">
    ${Object.keys(PRESETS).map(name => button(name, () => applyPreset(name)))}</div>
  ${["Conversation", "Sampling", "Output", "This page"].map(group => html`<fieldset><legend>${group}</legend>
    ${SETTINGS.filter(x => x[0] === group).map(Setting)}</fieldset>`)}</section>`
