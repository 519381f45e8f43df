"""Runtime: generate text from a bundle, and score given text."""

from spaceport.graphs.contract.faults import InputFault, LibraryPanic, MissingDependency, OptionFault, SpaceportError
from spaceport.runtime.backends import MissingBackend
from spaceport.runtime.bundle import Bundle, BundleError, open_bundle
from spaceport.runtime.costs import CostSource
from spaceport.runtime.decode.sequence import Ending, NotANumber
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.limits import Limits
from spaceport.runtime.sampling.grammar import DeadEnd, Grammar
from spaceport.runtime.sampling.logprobs import Score, TokenLogprob
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.scheduling.request_queue import QueueFull
from spaceport.runtime.scheduling.stream import AsyncStream, Stream
from spaceport.runtime.scheduling.worker import RuntimeClosed, RuntimeStatus
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.infill import InfillPrompt
from spaceport.runtime.text.messages import ChatPrompt, Message, TemplateError
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.transcript import Piece, ThreadText
from spaceport.runtime.trace import Trace

__all__ = [
    "AsyncStream",
    "Bundle",
    "BundleError",
    "ChatPrompt",
    "Completion",
    "CostSource",
    "DeadEnd",
    "Decoding",
    "Ending",
    "EngineFault",
    "Grammar",
    "InfillPrompt",
    "InputFault",
    "LibraryPanic",
    "Limits",
    "Message",
    "MissingBackend",
    "MissingDependency",
    "NotANumber",
    "OptionFault",
    "Piece",
    "Prompt",
    "QueueFull",
    "Runtime",
    "RuntimeClosed",
    "RuntimeStatus",
    "Sampling",
    "Score",
    "SpaceportError",
    "Statistics",
    "Stream",
    "TemplateError",
    "ThreadText",
    "TokenLogprob",
    "Trace",
    "open_bundle",
]
