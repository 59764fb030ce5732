"""Take the README's screenshot of the chat page with headless Chromium.

tinyvllm serve ~/models/SmolLM2-135M-Instruct
python examples/chat_page.py http://127.0.0.1:8000 [FILE.png]"""
import hashlib, pathlib, shutil, sys, zlib

from playwright.sync_api import sync_playwright

QUESTION = "How do I reverse a string in Python?"


def sign(picture: bytes, page: bytes) -> bytes:
  """Add a text to a PNG picture: the hash of the page that it shows. tests/core/test_readme.py compares it."""
  text = b"tEXtpage\0" + hashlib.sha256(page).hexdigest().encode()
  chunk = (len(text) - 4).to_bytes(4) + text + zlib.crc32(text).to_bytes(4)
  return picture[:-12] + chunk + picture[-12:]   # before the last chunk, IEND


def main() -> None:
  url, file = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "examples/chat_page.png"
  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 900, "height": 640})
    response = page.goto(url)
    assert response
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Message").fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Stop").wait_for()
    page.get_by_role("button", name="Send").wait_for(timeout=300_000)
    pathlib.Path(file).write_bytes(sign(page.screenshot(), response.body()))
    browser.close()


if __name__ == "__main__": main()
