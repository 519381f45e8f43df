"""Constrain completions to a JSON schema and to a regular expression."""

import json
import sys

from spaceport import Decoding, Grammar, Runtime

SCHEMA = {
    "type": "object",
    "properties": {
        "module": {"enum": ["os", "sys", "json", "re"]},
        "function": {"type": "string", "pattern": "^[a-z_]{3,12}$"},
        "arguments": {"type": "integer", "minimum": 0, "maximum": 5},
    },
    "required": ["module", "function", "arguments"],
    "additionalProperties": False,
}

with Runtime.open(sys.argv[1]) as runtime:
    completion = runtime.generate("import json\n", Decoding(max_tokens=200, grammar=Grammar(json_schema=SCHEMA)))
    number = runtime.generate("import json\n", Decoding(max_tokens=20, grammar=Grammar(regex="[0-9]{3}-[0-9]{4}")))

if completion.ending != "end":  # a limit cut the text, so it is no complete JSON
    sys.exit(f"incomplete: {completion.ending}")
print(json.loads(completion.text))
print(number.text)
