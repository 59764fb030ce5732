"""The page that plays a trace, in headless Chromium: each step equals the engine's, with the keyboard alone."""
import json
import re
import signal
import urllib.error
import urllib.request

import pytest
from axe_playwright_python.sync_playwright import Axe
from helpers.commands import error_line, flags, run_command, start_process
from helpers.engines import BS, ENGINE, greedy, prompt, tokens
from helpers.servers import Server, wait_until
from playwright.sync_api import expect

from tinyvllm import LLM
from tinyvllm_extra.trace import player


@pytest.fixture
def recorded(folder, tmp_path):
  """A trace of requests with hostile names and a common prefix in a pool of 12 blocks, and the blocks of each step."""
  path, used = tmp_path / "trace", []
  with LLM(folder, num_gpu_blocks_override=13, trace=str(path), **ENGINE) as llm:
    launch = llm.runner.launch
    def record(step):
      used.append({block for seq in llm.scheduler.running for block in seq.block_table})
      return launch(step)
    llm.runner.launch = record
    for i in range(3):
      llm.add_request(f"</script><b>{i}", tokens([*prompt(2 * BS), *prompt(3, i)]), greedy(12, n=1 + i % 2))
    while llm.has_unfinished_requests(): llm.step()
  return path, used


def used(tab):
  """Return the blocks that the page shows as used or shared."""
  labels = tab.locator("#grid button").evaluate_all("all => all.map(x => x.ariaLabel)")
  return {int(re.search(r"\d+", label)[0]) for label in labels if ": free" not in label}


def test_page_shows_each_step_and_scrubs_ten_thousand(recorded, browser, tmp_path):
  """With the keyboard alone. The page sends no request. The longer file ends within a line."""
  (path, blocks), page, tab, faults = recorded, tmp_path / "page.html", browser.new_page(), []
  assert run_command("trace", "show", path, "--output", page).stdout == f"{page}\n"
  tab.on("request", lambda request: faults.append(request.url))
  tab.on("pageerror", lambda error: faults.append(error))
  tab.goto(page.as_uri())
  for i, expected in enumerate(blocks):
    expect(tab.locator("#status")).to_contain_text(f"Step {i + 1} of {len(blocks)}: host ")
    assert used(tab) == expected
    tab.keyboard.press("ArrowRight")
  events = tab.locator("#events")
  expect(events).to_contain_text("ends: length")
  tab.keyboard.press("Home")
  expect(events).to_contain_text("A gets blocks")
  expect(tab.locator("#batch .prefill")).not_to_have_count(0)
  tab.locator("#grid button").first.focus()
  ids = " ".join(map(str, prompt(2 * BS)[:BS]))
  expect(tab.locator("#block")).to_have_text(re.compile(rf"^Block 1: of A \(</script><b>0\); hash \w+; tokens: {ids}$"))
  assert not Axe().run(tab).violations_count and tab.locator("b").count() == 0
  tab.locator("h1").click()
  tab.keyboard.press(" ")
  expect(tab.locator("#status")).to_contain_text(f"Step {len(blocks)} of")
  expect(tab.get_by_role("button", name="Play")).to_be_visible()

  header, *steps = path.read_text().splitlines()
  many = [json.dumps({**json.loads(x), "step": i}) for i, x in enumerate(steps * (10_000 // len(steps)))]
  (tmp_path / "long").write_text("\n".join([header, *many, '{"step']))
  tab.locator("#file").set_input_files(tmp_path / "long")
  expect(tab.locator("#status")).to_contain_text(f"of {len(many)}:")
  assert not {*faults} - {page.as_uri(), "data:,"}
  tab.close()
  assert "'nowhere' cannot be read: No such file" in error_line(run_command("trace", "show", "nowhere"))


def test_command_serves_the_page_at_an_address_with_a_secret(recorded):
  run = start_process("trace", "show", recorded[0], BROWSER="true")   # a browser that does nothing
  url = run.stdout.readline().strip()
  with urllib.request.urlopen(url) as answer: assert answer.read().decode() == player.page(str(recorded[0]))
  for other in ("", "favicon.ico", url[:-1].rpartition("/")[2]):
    with pytest.raises(urllib.error.HTTPError, match="404"): urllib.request.urlopen(f"{url.rpartition('/')[0]}/{other}")
  run.send_signal(signal.SIGINT)
  assert run.communicate()[0] == "" and run.returncode == 130 and len(url.rpartition("/")[2]) > 40


def test_debug_follows_a_running_server(folder, browser, tmp_path):
  """The page asks for the API key, shows the last step, and stays at another one that was chosen."""
  with Server(folder, *flags(**ENGINE, trace=tmp_path / "trace", api_key="secret", served_model_name="x")) as server:
    def lines(start=0, key="secret"):
      return server.get(f"/debug/steps?start={start}", headers={"Authorization": f"Bearer {key}"})
    def generate(num_requests):
      """Complete the num_requests-th request. Return the number of steps."""
      server.client(api_key="secret").completions.create(model="x", prompt=prompt(3), max_tokens=4)
      wait_until(lambda: lines().text.count('"finished":"length"') == num_requests, "the last line")
      return lines().text.count("\n") - 1
    tab, keys = browser.new_page(), ["wrong", "secret"]
    tab.on("dialog", lambda dialog: dialog.accept(keys.pop(0)))
    tab.goto(f"{server.url}/debug")
    num_steps = generate(1)
    expect(tab.locator("#status")).to_contain_text(f"Step {num_steps} of {num_steps}:")
    tab.keyboard.press("Home")
    num_steps = generate(2)
    expect(tab.locator("#status")).to_contain_text(f"Step 1 of {num_steps}:")
    assert not keys and not Axe().run(tab).violations_count
    assert lines().content == (tmp_path / "trace").read_bytes() and not lines(10**9).content
    assert lines(key="wrong").status_code == 401 and {lines(-1).status_code, lines(2**70).status_code} == {400}
    tab.close()
