"""Score given texts: which continuation is the most probable?"""

import math
import sys

from spaceport import Runtime

PROMPT = "import os\nimport "
CONTINUATIONS = ["sys\n", "re\n", "banana\n"]

with Runtime.open(sys.argv[1]) as runtime:
    scores = {text: runtime.score(PROMPT, text) for text in CONTINUATIONS}
    for text, score in sorted(scores.items(), key=lambda item: -item[1].sum):
        print(f"{text!r}: log probability {score.sum:.1f}, greedy {score.greedy}")

    score = runtime.score("def close(self):\n    self.file.close()\n", top=1)
    mean = score.sum / len(score.logprobs)
    print(f"perplexity of the given text: {math.exp(-mean):.1f} over {len(score.logprobs)} tokens")
    best = sum(one.top[0].token == one.token for one in score.logprobs)
    print(f"the most probable token was right {best} times")
