"""The site's search finds what it should, in a browser, where one is installed."""

import http.server
import shutil
import subprocess
import threading
import urllib.parse
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MKDOCS = shutil.which("mkdocs")
WORDS = ("learning rate", "optimizer", "rotary")
# The theme's own worker with the site's index. It answers a setup (0) by 1, and a query (2) by 3.
PROBE = """<script>
fetch("search/search_index.json").then(r => r.json()).then(index => {
  const worker = new Worker("WORKER");
  worker.onmessage = e => {
    if (e.data.type == 1) WORDS.forEach(word => worker.postMessage({type: 2, data: word}));
    if (e.data.type == 3) fetch("/found/" + e.data.data.items.length);
  };
  worker.onerror = e => fetch("/failed/" + encodeURIComponent(e.message));
  worker.postMessage({type: 0, data: {...index, options: {suggest: false}}});
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(not (BROWSER and MKDOCS), reason="needs mkdocs and chromium")
def test_search_finds_words_of_the_pages(tmp_path):
    site = tmp_path / "site"
    command = [MKDOCS, "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    worker = next(site.glob("assets/javascripts/workers/search.*.js")).relative_to(site)
    text = PROBE.replace("WORKER", worker.as_posix()).replace("WORDS", repr(list(WORDS)))
    (site / "probe.html").write_text(text)
    answers, done = [], threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(site))

        def log_message(self, *args):
            parts = urllib.parse.unquote(self.path).split("/")
            if parts[1] in ("found", "failed"):
                answers.append(parts[1:])
                if parts[1] == "failed" or len(answers) == len(WORDS):
                    done.set()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/probe.html"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        flags.append(f"--user-data-dir={tmp_path / 'browser'}")
        with subprocess.Popen([BROWSER, *flags, url], stderr=subprocess.DEVNULL) as browser:
            try:
                assert done.wait(60), answers
            finally:
                browser.terminate()
                server.shutdown()
    assert all(kind == "found" and int(n) > 0 for kind, n in answers), answers
