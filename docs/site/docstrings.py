"""An extension of griffe, which reads the docstrings for the API pages. They are plain text: what looks like
a link of Markdown, shape[rank][row], is none.
"""

import griffe


class PlainBrackets(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("][", "]\\[")
