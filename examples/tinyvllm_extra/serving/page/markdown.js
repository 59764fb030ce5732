// Markdown, math and code of answers, as elements that Preact creates: no text becomes HTML

const DISPLAY = /\$\$([^]+?)\$\$|\\\[([^]+?)\\\]/   // a formula of its own line
const INLINE = /\$(?![\s$])((?:\\.|[^\\$\n`])*?[^\s\\$`])\$(?!\d)|\\\((.+?)\\\)/   // not "from $5 to $10"
const MAX_CODE = 30_000   // characters that are highlighted
const ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&nbsp;": "\u00a0"}
const TAGS = {heading: "h2", paragraph: "p", strong: "strong", em: "em", del: "del", blockquote: "blockquote", hr: "hr",
              br: "br", list_item: "li"}   // of marked's tokens; a heading of any level is below the page's h1

/** Returns an extension of marked for formulas. */
function formulas(level, isDisplay) {
  const {source} = isDisplay ? DISPLAY : INLINE, start = new RegExp(source)
  const whole = new RegExp(`^(?:${source})${level === "block" ? " *(?:\\n|$)" : ""}`)
  return {name: `${level} ${isDisplay}`, level, start: text => text.match(start)?.index, tokenizer(text) {
    const found = whole.exec(text)
    return found ? {type: "formula", raw: found[0], tex: found[1] ?? found[2], isDisplay} : undefined
  }}
}

marked.use({breaks: true, tokenizer: {html() {}, tag() {}},   // HTML is text
            extensions: [formulas("block", true), formulas("inline", true), formulas("inline", false)]})

const decoded = text => text.replace(/&\w+;/g, entity => ENTITIES[entity] ?? entity)
const scroller = (name, content) => html`
  <div class="scroll" role="group" aria-label=${name} tabindex="0">${content}</div>`

const RENDERERS = {   // of the other tokens
  checkbox: ({checked}) => checked ? "☑ " : "☐ ",
  code: ({text, lang}) => html`<${Code} source=${`${text}\n`} language=${lang?.match(/^\S+/)?.[0]} />`,
  codespan: ({text}) => html`<code>${text}</code>`,
  image: ({href, text}) => link(href, text || href),   // nothing is loaded
  link: ({href, tokens}) => link(href, rendered(tokens)),
  list: ({ordered, start, items}) => preact.h(ordered ? "ol" : "ul", ordered ? {start} : null, rendered(items)),
  formula: token => token.isDisplay ? scroller("Formula", formula(token)) : formula(token),
  table: ({header, rows}) => html`<div>${scroller("Table", html`<table><thead><tr>${header.map(cell("th"))}</tr></thead>
    <tbody>${rows.map(row => html`<tr>${row.map(cell("td"))}</tr>`)}</tbody></table>`)}</div>`,
}
const cell = tag => ({align, tokens}) => preact.h(tag, align && {align}, rendered(tokens))
const link = (href, content) => /^(https?|mailto):/i.test(href)
  ? html`<a href=${href} target="_blank" rel="noopener noreferrer">${content}</a>` : content
const rendered = tokens => tokens?.map(token => RENDERERS[token.type]?.(token) ??
  (TAGS[token.type] ? preact.h(TAGS[token.type], null, rendered(token.tokens))
                    : token.tokens ? rendered(token.tokens) : decoded(token.text ?? "")))

/** Returns a component that is drawn only if its properties change. */
const constant = draw => class extends preact.Component {
  shouldComponentUpdate(next) { return Object.keys(next).some(name => next[name] !== this.props[name]) }
  render(properties) { return draw(properties) }
}

const Markdown = constant(({source}) => html`<div class="markdown">${rendered(marked.lexer(source))}</div>`)

const formula = ({tex, isDisplay, raw}) => html`<span ref=${element => {
  if (!element || element.raw === raw) return
  element.raw = raw
  try { temml.render(tex, element, {displayMode: isDisplay, throwOnError: true}) } catch { element.textContent = raw }
}} />`

/** Highlighted code below its language and a copy button. */
const Code = constant(({source, language = ""}) => {
  const isKnown = hljs.getLanguage(language) && source.length <= MAX_CODE
  const content = isKnown ? hljs.highlight(source, {language})._emitter.rootNode.children.map(span) : source
  return html`<div class="code"><div><small>${language.slice(0, 20)}</small>
    ${button("Copy code", () => copy(source))}</div>
    ${scroller("Code", html`<pre><code>${content}</code></pre>`)}</div>`
})

const span = node => node.children
  ? html`<span class=${`hljs-${node.scope?.split(".")[0]}`}>${node.children.map(span)}</span>` : node

async function copy(words) {
  try { await navigator.clipboard.writeText(words) } catch {   // not available over plain http
    const setData = handler(event => event.clipboardData.setData("text/plain", words))
    document.addEventListener("copy", setData, {once: true})
    document.execCommand("copy")
  }
  note("Copied.")
}

/** Splits an answer into its reasoning, from the server or inline as <think>...</think>, and the rest. If the prompt
ended with <think>, the answer has only </think>, at the start of a line. */
function split({content, reasoning = ""}) {
  const [, inline = "", rest = ""] = /^\s*<think>([^]*?)(?:<\/think>\s*([^]*))?$/.exec(content) ??
    /^((?:(?!<think>)[^])*?\n)<\/think>\s*([^]*)$/.exec(content) ?? ["", "", content]
  return {thought: (reasoning + inline).trim(), answer: rest}
}
