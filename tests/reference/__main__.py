"""Writes the pages that are made from the code: `python -m tests.reference`."""

from tests.reference.pages import made

for page, text in made().items():
    page.parent.mkdir(exist_ok=True)
    page.write_text(text)
