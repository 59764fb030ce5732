"""A thread that captures steps while a server or a chat already answers."""
import atexit, os, sys, threading, time
from collections.abc import Iterator

from tinygrad import Device

from tinyvllm.backend import cpu_cores
from tinyvllm.config import logger
from tinyvllm_extra.kernels.cpu import CAPTURES

CAPTURING = "capturing a step: below 1 s, or about 10 s if kernels compile"   # before the first capture


class CaptureThread(threading.Thread):
  """Runs `capture`, with low priority once the captured steps can run all requests: see `ready`."""
  def __init__(self, captures: Iterator[str]):
    super().__init__(target=self.capture, args=(captures,), name=CAPTURES, daemon=True)
    self.progress = next(captures, "")   # "" once requests can run
    self.ready = threading.Event()
    self.should_end = False
    atexit.register(self.allow_exit)
    self.start()

  def allow_exit(self) -> None:
    """Let the program exit: tinygrad cannot close devices during a capture. A CPU need not be closed."""
    self.should_end = True
    if cpu_cores(): Device._opened_devices.clear()
    else: self.join()

  def capture(self, captures: Iterator[str]) -> None:
    try:
      for self.progress in captures:
        if self.should_end: break
        if not self.progress and not self.ready.is_set():
          self.ready.set()
          if sys.platform == "linux": os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        time.sleep(1e-3)   # another thread may be waiting to capture
    except Exception:
      if threading.main_thread().is_alive():   # else the exit has ended the threads that compile
        logger.exception("a capture failed; its steps will be captured when they run")
    self.progress = ""
    self.ready.set()
    atexit.unregister(self.allow_exit)
