"""Request config: the limits, token selection and drafts of a request, fixed when it is admitted."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.planner import DraftPlanner
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.engine import CPU_COSTS


@dataclass(frozen=True)
class RequestConfig:
    """Limits, token selection and drafts of a request; fixed when it is admitted."""

    tokens: TokenIds
    selector: TokenSelector
    max_length: int  # maximum tokens of a thread, the prompt and its ancestors' tokens included
    max_total: int  # maximum new tokens of all threads; 0: the request ends after prefill
    draft_config: DraftConfig = field(default_factory=DraftConfig)
    planner: DraftPlanner = field(default_factory=lambda: DraftPlanner(relative_costs(CPU_COSTS.row)))
    kind: Hashable = None  # requests of one kind share their acceptance rates
    temperature: float = 0.0  # at which acceptance rates were measured that it may start from
    max_rows: int | None = None  # maximum rows of a step on this engine; None: any number
    max_threads: int = 1  # maximum threads that decode at the same time; the others wait
    echo: int | None = None  # position of the first prompt token whose logits observers get
    end: frozenset[int] = frozenset()  # tokens that end a thread, its ending is "end"
    stop: frozenset[int] = frozenset()  # tokens of the caller that end a thread, its ending is "stop"
    cache_salt: str | None = None  # requests of one salt reuse each other's KV rows; None: it reuses and leaves none
