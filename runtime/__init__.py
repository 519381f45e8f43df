"""Runtime: a bundle as text."""

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.sampling.scoring import Score
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.scheduling.scheduler import QueueFull
from spaceport.runtime.scheduling.stream import AsyncStream, Stream
from spaceport.runtime.scheduling.worker import RuntimeClosed
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.piece import Piece, ThreadText

__all__ = [
    "AsyncStream",
    "Completion",
    "Decoding",
    "Grammar",
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
