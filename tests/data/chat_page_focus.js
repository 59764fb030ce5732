// The name of the focused control
() => {
  const x = document.activeElement
  if (x === document.body) return "BODY"
  return x.ariaLabel ?? (x.textContent.trim() || x.closest("label")?.textContent.trim())
}
