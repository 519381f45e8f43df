"""Print a completion while it is generated, and cancel it."""

import sys

from spaceport import Decoding, Runtime

ENOUGH = 120  # characters

with Runtime.open(sys.argv[1]) as runtime:
    shown = ""
    with runtime.stream('def parse(self, text):\n    """', Decoding()) as stream:
        for piece in stream:
            shown += piece.reading
            if len(shown) >= ENOUGH:
                stream.close()  # leaving the `with` block would cancel it as well
                break
        completion = stream.completion()  # what was generated until then
    print(shown[:ENOUGH])
    print("---")
    print("ending:", completion.ending)
    print("completion begins with the text shown:", completion.text.startswith(shown))
