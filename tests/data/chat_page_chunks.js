// 3000 events of one answer. renders counts the changes of its elements and texts
async () => {
  window.renders = 0
  const options = {childList: true, characterData: true, subtree: true}
  new MutationObserver(() => renders++).observe(document.querySelector("[aria-label=Model] > div"), options)
  for (let i = 0; i < 3000; i++) {
    const event = {choices: [{delta: {content: `word ${i} of a **block** that grows\n`}}]}
    enqueue(new TextEncoder().encode(`data: ${JSON.stringify(event)}\n\n`))
    await 0
  }
}
