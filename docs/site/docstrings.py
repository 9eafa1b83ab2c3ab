"""An extension of griffe, which reads the docstrings for the API pages. They are plain text: what looks like
a link of Markdown, shape[rank][row], is none.
"""

from typing import Any

import griffe


class PlainBrackets(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("][", "]\\[")
