"""Intake: takes requests from callers, bounded from the first moment, and admits them here or on other OS threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decode.request import Observer
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.admission import Admission
from spaceport.runtime.scheduling.generation import Deliver, Generation, ScoringTask
from spaceport.runtime.scheduling.lanes import Lanes
from spaceport.runtime.scheduling.submission import Admitted, Submission
from spaceport.runtime.scheduling.worker import Worker
from spaceport.runtime.text.messages import estimated_tokens
from spaceport.runtime.text.prompt import Prompt

_QUICK_IDS = 4096  # token ids that need no OS thread of their own to be checked


class Intake:
    """Takes requests for one worker."""

    def __init__(self, bundle: Bundle, admission: Admission, worker: Worker) -> None:
        self._bundle = bundle
        self._admission = admission
        self._worker = worker
        self._lanes = Lanes()

    def generation(
        self,
        prompt: Prompt,
        decoding: Decoding,
        deliver: Deliver,
        on_settled: Callable[[], None] = lambda: None,
        observers: Sequence[Observer] = (),
    ) -> Submission[Generation]:
        """A request for a completion, with a reservation in the queue; its timeout counts from now."""
        self._worker.check_process()
        self._admission.check_decoding(decoding)
        deadline = None if decoding.timeout is None else monotonic() + decoding.timeout
        admit = partial(self._admission.generation, prompt, decoding, deliver, deadline, observers)
        return self._submission(prompt, admit, deadline, on_settled)

    def scoring(
        self,
        prompt: Prompt,
        continuation: str | Sequence[int] | None,
        top: int,
        parse_special: bool,
        on_settled: Callable[[], None] = lambda: None,
    ) -> Submission[ScoringTask]:
        """A request for log probabilities, with a reservation in the queue."""
        self._worker.check_process()
        admit = partial(self._admission.scoring, prompt, continuation, top, parse_special)
        return self._submission((prompt, continuation), admit, None, on_settled)

    def admit(self, submission: Submission[Admitted]) -> None:
        """Admit a request in this OS thread, and raise its error."""
        submission.run()
        if submission.fault is not None:
            raise submission.fault

    def admit_elsewhere(
        self, submission: Submission[Admitted], prompt: Prompt, decoding: Decoding | None = None
    ) -> None:
        """Admit a request on another OS thread, unless it takes no time."""
        quick = isinstance(prompt, list | tuple) and 0 < len(prompt) <= _QUICK_IDS and isinstance(prompt[0], int)
        if quick and decoding is not None and decoding.grammar is None and not self._bundle.maybe_changed:
            self.admit(submission)
        else:
            self._lanes.admit(submission, lambda: self._admission.isolates(prompt, decoding))

    def discard(self, submission: Submission[Admitted]) -> None:
        """Give up what remains to be done for a submission that has ended."""
        self._lanes.discard(submission)

    def expire(self, submission: Submission[Admitted]) -> None:
        """End a submission whose deadline has passed."""
        submission.end("deadline")
        self.discard(submission)

    def close(self) -> None:
        """Fail the requests that are being admitted, without waiting for what is done for them."""
        self._lanes.close()
        self._admission.close()

    def _submission(
        self, prompt: object, admit: Callable[[], Admitted], deadline: float | None, on_settled: Callable[[], None]
    ) -> Submission[Admitted]:
        reservation = self._worker.reserve(estimated_tokens(prompt))

        def admit_unchanged() -> Admitted:
            self._bundle.require_unchanged()
            return admit()

        return Submission(
            admit_unchanged,
            lambda task: self._worker.submit(task, reservation),
            lambda: self._worker.cancel(reservation),
            deadline,
            on_settled,
        )
