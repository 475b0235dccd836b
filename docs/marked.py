"""A page's table that a script writes, between two comments of the page."""

from __future__ import annotations

END = "<!-- end -->\n"


def written(page: str, script: str, table: str) -> str:
    """The page's text with the table between the comments that name the script.

    Raises:
      ValueError: the page has no such comments.
    """
    begin = f"<!-- begin: python {script} -->\n"
    before, _, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no lines {begin!r} and {END!r}: add both")
    return f"{before}{begin}{table}{END}{after}"
