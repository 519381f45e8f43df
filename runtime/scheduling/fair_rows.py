"""Fair rows: how many rows requests with several threads get in a round with other requests."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.costs import StepCosts
from spaceport.runtime.decode.request import Request

_SHARE = 2.0  # plain steps: maximum cost of all threads of such requests together


class FairRows:
    """Limits the rows of requests with several threads while others run, so that these wait for few rows."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs

    @cached_property
    def rows(self) -> int:
        """Number of rows that cost as much as the share of a round."""
        most = _SHARE * self._costs.seconds(1)
        return next((rows for rows in range(2, STEP_ROWS + 1) if self._costs.seconds(rows) > most), STEP_ROWS + 1) - 1

    def share(self, running: Collection[Request]) -> None:
        """Set the limits of a round."""
        several = [request for request in running if len(request.threads) > 1]
        if several:
            rows = STEP_ROWS if len(running) == 1 else self.rows // len(several)
            for request in several:
                request.limit_rows(rows)
