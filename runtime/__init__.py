"""Runtime: a bundle as text."""

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.grammar import Form
from spaceport.runtime.logprobs import TokenLogprob
from spaceport.runtime.reading import Piece, ThreadText
from spaceport.runtime.sampling import Sampling
from spaceport.runtime.scheduler import QueueFull
from spaceport.runtime.scoring import Score
from spaceport.runtime.session import Runtime
from spaceport.runtime.stream import AsyncStream, Completion, Stream
from spaceport.runtime.worker import RuntimeClosed

__all__ = [
    "AsyncStream",
    "Completion",
    "Decoding",
    "Form",
    "OptionFault",
    "Piece",
    "QueueFull",
    "Runtime",
    "RuntimeClosed",
    "Sampling",
    "Score",
    "Stream",
    "ThreadText",
    "TokenLogprob",
]
