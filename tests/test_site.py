"""The site: its search finds what it should, tables fit a phone, API pages show what readers call.

What takes mkdocs and a browser is slow, and is skipped where these are not installed.
"""

import html
import http.server
import json
import re
import shutil
import subprocess
import threading
import urllib.parse
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, page_name

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MKDOCS = shutil.which("mkdocs")
needs_mkdocs = pytest.mark.skipif(not MKDOCS, reason="needs mkdocs")
needs_browser = pytest.mark.skipif(not (BROWSER and MKDOCS), reason="needs mkdocs and chromium")
WORDS = ("learning rate", "optimizer", "rotary")
# Of Material for MkDocs, "Setting up site search".
RECOMMENDED = r"""[\s\-,:!=\[\]()"`/]+|\.(?!\d)|&[lg]t;|(?!\b)(?=[A-Z][a-z])"""
OF_MODULES = [page for page in PAGES if "\n::: " in page.read_text()]
WITH_TABLES = [page for page in PAGES[1:] if "\n| --- |" in page.read_text()]

# The theme's own worker with the site's index. It answers a setup (0) by 1, and a query (2) by 3.
SEARCH = """
fetch("search/search_index.json").then(r => r.json()).then(index => {
  const worker = new Worker("WORKER");
  worker.onmessage = e => {
    if (e.data.type == 1) ALL.forEach(word => worker.postMessage({type: 2, data: word}));
    if (e.data.type == 3) answer(e.data.data.items.length);
  };
  worker.onerror = e => answer(e.message);
  worker.postMessage({type: 0, data: {...index, options: {suggest: false}}});
});"""
# By how much pages are wider than a phone; the smallest letters of their tables, how many names in
# them are broken.
TABLES = """
const next = () => {
  if (!ALL.length) return;
  const page = ALL.shift(), frame = document.createElement("iframe");
  frame.style = "width: 390px; height: 800px; border: 0";
  frame.onload = () => {
    const root = frame.contentDocument.documentElement;
    const cells = [...root.querySelectorAll(".md-typeset__table td, .md-typeset__table th")];
    const size = cell => parseFloat(frame.contentWindow.getComputedStyle(cell).fontSize);
    const names = [...root.querySelectorAll(".md-typeset__table td code")];
    answer([page, root.scrollWidth - 390, Math.min(...cells.map(size)),
            names.filter(name => name.getClientRects().length > 1).length]);
    frame.remove();
    next();
  };
  frame.src = page;
  document.body.append(frame);
};
next();"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [MKDOCS, "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return folder


def _ask(site: Path, script: str, asked: list[str], profile: Path) -> list:
    """What a script calls `answer` with in a browser, as often as there is something to ask."""
    text = f"""<!doctype html><body><script>const ALL = {json.dumps(asked)};
      const answer = x => fetch("/answer/" + encodeURIComponent(JSON.stringify(x)));{script}
      </script></body>"""
    (site / "probe.html").write_text(text)
    answers, done = [], threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(site))

        def do_GET(self):
            if not self.path.startswith("/answer/"):
                super().do_GET()
                return
            answers.append(json.loads(urllib.parse.unquote(self.path.removeprefix("/answer/"))))
            if len(answers) == len(asked) or isinstance(answers[-1], str):
                done.set()
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/probe.html"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        flags.append(f"--user-data-dir={profile}")
        with subprocess.Popen([BROWSER, *flags, url], stderr=subprocess.DEVNULL) as browser:
            try:
                assert done.wait(120), answers
            finally:
                browser.terminate()
                server.shutdown()
    return answers


def test_the_separator_of_words_is_the_one_that_the_theme_recommends():
    (separator,) = re.findall(r"^ +separator: '(.+)'$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert separator == RECOMMENDED
    words = [word for word in re.split(separator, "loop.train(n_hashes=4), learning rate") if word]
    assert words == ["loop", "train", "n_hashes", "4", "learning", "rate"]


@pytest.mark.slow
@needs_browser
def test_search_finds_words_of_the_pages(site, tmp_path):
    worker = next(site.glob("assets/javascripts/workers/search.*.js")).relative_to(site)
    script = SEARCH.replace("WORKER", worker.as_posix())
    found = _ask(site, script, list(WORDS), tmp_path / "browser")
    assert all(isinstance(n, int) and n > 0 for n in found), found


@pytest.mark.slow
@needs_browser
def test_tables_are_readable_on_a_phone(site, tmp_path):
    addresses = [page_name(page).removesuffix(".md").removesuffix("index") for page in WITH_TABLES]
    found = _ask(site, TABLES, [f"/{a}/".replace("//", "/") for a in addresses], tmp_path / "b")
    assert len({page for page, *_ in found}) == len(WITH_TABLES)
    for page, wider, letters, broken in found:
        assert wider <= 0 and letters >= 11 and not broken, (page, wider, letters, broken)


@pytest.mark.slow
@needs_mkdocs
def test_pages_of_the_api_show_signatures_and_docstrings_and_no_source(site):
    pages = {path: path.read_text() for path in sorted(site.glob("reference/*/index.html"))}
    modules = {path: text for path, text in pages.items() if "doc-object" in text}
    assert {path.parent.name for path in modules} == {page.stem for page in OF_MODULES}
    for path, text in modules.items():
        assert "doc-signature" in text and "Source code in" not in text, path
    plain = html.unescape(re.sub(r"<.*?>", "", pages[site / "reference/ops/index.html"]))
    listed = (ROOT / "docs/reference/ops.md").read_text()
    names = set(re.findall(r"^::: reformax\.ops\.(\w+)$", listed, re.M))
    for name in names - {"base", "block_patterns"}:
        assert re.search(rf"\b{name}\(\s*\*,\s*soft_cap: ", plain), name
    assert re.search(r"\blsh\(\s*\*,[^)]*\bchunk_len: Size = 64", plain)
    assert "LSH attention with its hyperparameters fixed." in plain
